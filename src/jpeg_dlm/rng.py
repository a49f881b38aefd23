"""Random numbers addressed by (seed, purpose, counters): resuming needs no saved state, and batches do not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """Return a 63-bit seed for an address; distinct addresses have unrelated seeds."""
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator for one address."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, *counters))


@dataclass(frozen=True)
class RowNoise:
    """Noise for a batch whose rows have global numbers `rows` at step `step`."""

    seed: int
    rows: Sequence[int]
    step: int = 0
    device: torch.device | str = "cpu"
    total: int = 0  # rows of the whole batch over all processes and micro-batches; 0: only these rows

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Draw standard normal numbers of shape (B, *shape); a row depends only on its global number."""
        return self._draw(torch.randn, purpose, shape)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Draw uniform numbers on [0, 1) of shape (B, *shape)."""
        return self._draw(torch.rand, purpose, shape)

    def stratified(self, purpose: str) -> Tensor:
        """Draw uniform numbers on [0, 1) of shape (B), one of the whole batch in each of `total` equal intervals."""
        total = self.total or len(self.rows)
        places = torch.tensor([row % total for row in self.rows], device=self.device)
        return (self.uniform(purpose) + places) / total

    def repeated(self, draws: int) -> RowNoise:
        """Return noise for `draws` concatenated copies of the batch; the first copy draws the same as this noise."""
        return self if draws == 1 else RepeatedNoise(self.seed, self.rows, self.step, self.device, self.total, draws)

    def streams(self, purpose: str) -> RowStreams:
        """Return one generator per row that keeps its state between draws, for samplers with many steps."""
        return RowStreams([generator(self.seed, purpose, self.step, row, device=self.device) for row in self.rows], self.device)

    def shared(self, purpose: str) -> torch.Generator:
        """Return a CPU generator shared by the whole batch and all processes."""
        return generator(self.seed, purpose, self.step)

    def _draw(self, kind, purpose: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ANN001 - torch.randn or torch.rand
        out = torch.empty(len(self.rows), *shape, device=self.device)
        for i, row in enumerate(self.rows):
            g = generator(self.seed, purpose, self.step, row, device=self.device)
            out[i] = kind(shape, generator=g, device=self.device)
        return out


@dataclass(frozen=True)
class RepeatedNoise(RowNoise):
    """Independent draws for several copies of a batch."""

    draws: int = 1

    def _draw(self, kind, purpose: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ANN001 - torch.randn or torch.rand
        purposes = [purpose, *(f"{purpose}#{copy}" for copy in range(1, self.draws))]
        return torch.cat([super(RepeatedNoise, self)._draw(kind, p, shape) for p in purposes])


@dataclass(frozen=True)
class RowStreams:
    """One generator per row of a batch; a row's numbers depend on its earlier draws, never on other rows."""

    generators: list[torch.Generator]
    device: torch.device | str

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Draw uniform numbers on [0, 1) of shape (B, *shape), in float64 by default, which resolves rare events."""
        rows = [torch.rand(shape, generator=g, device=self.device, dtype=dtype) for g in self.generators]
        return torch.stack(rows)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers of shape (B, *shape)."""
        return torch.stack([torch.randn(shape, generator=g, device=self.device) for g in self.generators])
