"""Pairs as ELF reads them: one row of a source and, right behind it, its target, filled up with the target's end token.

The source has clean features, zero where it is dropped, and no loss; the filling has a loss as any other token (ELF).
Shapes: B batch, S tokens of a source, L of a target, J = S + L, F feature width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.methods.base import Batch

if TYPE_CHECKING:
    from jpeg_dlm.methods.elf import Elf


@dataclass(frozen=True)
class PairRows:
    """Rows of pairs: their tokens, which of them are of the source, and which are not filling."""

    tokens_BJ: Tensor
    source_BJ: Tensor
    real_BJ: Tensor

    @classmethod
    def of(cls, batch: Batch) -> PairRows:
        """Return the rows of a batch of pairs."""
        assert batch.source is not None
        tokens_BJ = torch.cat([batch.source.tokens_BL, batch.tokens_BL], 1)
        size, place_J = batch.source.tokens_BL.shape[1], torch.arange(tokens_BJ.shape[1], device=tokens_BJ.device)
        ends_B1, lengths_B1 = batch.source.real_BL.sum(1, keepdim=True), batch.real_BL.sum(1, keepdim=True)
        source_BJ = place_J < ends_B1
        # The last token of a target is its end token.
        from_BJ = torch.where(source_BJ, place_J, size + torch.minimum(place_J - ends_B1, lengths_B1 - 1))
        return cls(tokens_BJ.gather(1, from_BJ), source_BJ, place_J < ends_B1 + lengths_B1)

    def attention(self, dropped_B: Tensor) -> Tensor:
        """Return what the encoder's queries see (B, J, J): a source itself, a target all but filling and a dropped source."""
        query_BJ1, key_B1J = self.source_BJ[:, :, None], self.source_BJ[:, None]
        hidden_BJJ = dropped_B[:, None, None] & ~query_BJ1 & key_B1J
        return torch.where(query_BJ1, key_B1J, self.real_BJ[:, None]) & ~hidden_BJJ


class PairNetworks:
    """ELF's networks as the sampler calls them, at the targets of given sources, which are put back into every input."""

    def __init__(self, elf: Elf, source: Batch, scale: float) -> None:
        """`scale` is that of classifier-free guidance over the source."""
        self.elf, self.scale = elf, scale
        self.noise_scale, self.v_floor, self.latent_shape = elf.noise_scale, elf.v_floor, elf.latent_shape
        x_BSF = elf.features(source)  # alone, as the encoder sees a source before any target
        place_J1 = torch.arange(elf.latent_shape[0], device=x_BSF.device)[:, None]
        self.source_BJ1 = place_J1 < source.real_BL.sum(1)[:, None, None]
        self.x_BJF = F.pad(x_BSF, (0, 0, 0, len(place_J1) - x_BSF.shape[1]))

    def _clean(self, z_BJF: Tensor) -> Tensor:
        return torch.where(self.source_BJ1, self.x_BJF, z_BJF)

    def denoise(self, z: Tensor, t: float, s: Tensor | None, w: float) -> Tensor:
        """Predict clean features; where the scale is not 1, go on from the prediction without the source."""
        s = torch.zeros_like(z) if s is None else s
        x = self.elf.denoise(self._clean(z), t, self._clean(s), w)
        if self.scale != 1:
            without = (torch.where(self.source_BJ1, 0.0, state) for state in (z, s))
            x = torch.lerp(self.elf.denoise(next(without), t, next(without), w), x, self.scale)
        return self._clean(x)

    def tokens(self, z: Tensor, w: float) -> Tensor:
        """Return the most probable tokens of the targets."""
        return self._targets(self.elf.tokens(self._clean(z), w)[..., None])[..., 0]

    def logits(self, z: Tensor, w: float) -> Tensor:
        """Return the logits of the targets."""
        return self._targets(self.elf.logits(self._clean(z), w))

    def _targets(self, rows_BJV: Tensor) -> Tensor:
        place_L1 = torch.arange(self.elf.config.data.token_len, device=rows_BJV.device)[:, None]
        place_BL1 = self.source_BJ1.sum(1, keepdim=True) + place_L1
        return rows_BJV.gather(1, place_BL1.expand(-1, -1, rows_BJV.shape[-1]))
