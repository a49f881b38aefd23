"""ELF for `transformers`: flow matching in the features of a frozen encoder, one for each token.

The sampler and the network are in latent_flow.py. A source stands before its target in the same row: its features are clean
in every input. Shapes: B batch, L tokens of a target, S of a source, J = S + L, F feature width, H hidden width.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .latent_flow import Encoder, LatentFlow, LatentTransformer
from .text_diffusion import TextDiffusionConfig


class ElfConfig(TextDiffusionConfig):
    model_type = "elf"


class ElfNetwork(LatentTransformer):
    """f, whose hidden states in decode mode go to tokens through two linear layers."""

    def __init__(self, c: Any) -> None:
        super().__init__(c, c.feature_dim)
        self.proj, self.unembed = nn.Linear(c.hidden, c.proj_dim), nn.Linear(c.proj_dim, c.vocab_size)


class ElfModel(LatentFlow):
    """f, and the frozen encoder where the model writes targets of sources."""

    config_class = ElfConfig
    least_rest = 0.05

    def __init__(self, config: ElfConfig) -> None:
        super().__init__(config)
        c: Any = config
        self.noise_scale, self.latent_shape = c.noise_scale, (c.source_len + c.token_len, c.feature_dim)
        self.dit = ElfNetwork(c)
        self.encoder: Any = Encoder(c) if c.source_len else None
        self.post_init()

    def read(self, source: Tensor) -> Any:
        """Return features of rows (B, J, F), and where they are those of a source (B, J, 1)."""
        present = source != self.c.pad_token_id
        rows = (0, 0, 0, self.c.token_len)
        return F.pad(self.encoder(source, present), rows), F.pad(present[..., None], rows)

    def denoise(self, z: Tensor, t: float, s: Tensor, o: SimpleNamespace, seen: Any) -> Tensor:
        if seen is None:
            return self.predicted(z, t, s, o.w)
        clean, of_source = seen
        x = self.predicted(torch.where(of_source, clean, z), t, torch.where(of_source, clean, s), o.w)
        if o.source_scale != 1:  # go on from the prediction without the source
            without = self.predicted(torch.where(of_source, 0.0, z), t, torch.where(of_source, 0.0, s), o.w)
            x = torch.lerp(without, x, o.source_scale)
        return torch.where(of_source, clean, x)

    def predicted(self, z: Tensor, t: float, s: Tensor, w: float) -> Tensor:
        return self.dit.denoise_head(self.dit.states(z, t, s, w))

    def decode(self, z: Tensor, w: float, seen: Any) -> Tensor:
        """Return hidden states of the texts after one evaluation at t = 1, without self-conditioning."""
        if seen is None:
            return self.dit.states(z, 1.0, torch.zeros_like(z), w, True)
        clean, of_source = seen
        h = self.dit.states(torch.where(of_source, clean, z), 1.0, torch.zeros_like(z), w, True)
        places = of_source.sum(1, keepdim=True) + torch.arange(self.c.token_len, device=z.device)[:, None]  # of the target
        return h.gather(1, places.expand(-1, -1, h.shape[-1]))

    def project(self, h: Tensor) -> Tensor:
        return self.dit.unembed(F.gelu(self.dit.proj(h), approximate="tanh"))
