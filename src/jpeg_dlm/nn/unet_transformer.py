"""The diffusion network of COSMOS: a transformer over latents with long skips from its first half to its second.

Every layer receives the time and the self-conditioning. COSMOS's latents are as wide as its network; if the widths differ,
linear layers project in and out. Features of a source, which COSMOS does not have, are positions before the latents.
Shapes: B batch, N latents, D latent width, H hidden width, C positions of a source.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.dit import Context
from jpeg_dlm.nn.layers import SwiGluBlock, fp32_island, rotary_table, scalar_embedding, zero_linear

MLP_RATIO = 4  # SwiGLU inner width over H (COSMOS)
MAX_PERIOD = 10.0  # of the time sinusoids; t is in [0, 1] and not rescaled (COSMOS)


class UNetTransformer(nn.Module):
    """`forward(z, t, s, source)` predicts the clean latents."""

    def __init__(self, m: Any, source_dim: int = 0) -> None:  # CosmosModel
        super().__init__()
        dim, hidden, depth = m.latent_dim, m.hidden, m.depth
        self.hidden, self.head_dim = hidden, hidden // m.heads
        same = dim == hidden
        self.in_proj = nn.Identity() if same else nn.Linear(dim, hidden)
        self.source_proj = nn.Linear(source_dim, hidden) if source_dim else None
        self.time_mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))
        self.blocks = nn.ModuleList(SwiGluBlock(hidden, m.heads, MLP_RATIO * hidden) for _ in range(depth))
        self.time_layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.self_cond_layers = nn.ModuleList(nn.Linear(dim, hidden) for _ in range(depth))
        self.output_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.out_proj = nn.Identity() if same else zero_linear(hidden, dim)  # assumed: the first prediction is the mean

    def forward(self, z_BND: Tensor, t_B: Tensor, s_BND: Tensor | None = None, source: Context | None = None) -> Tensor:
        """Predict the clean latents, given the previous prediction s (None: zeros)."""
        with fp32_island(z_BND):
            z_BND = z_BND.float()
            s_BND = torch.zeros_like(z_BND) if s_BND is None else s_BND.float()
            x = self.in_proj(z_BND)
            if source is not None and self.source_proj is not None:
                x_BCH = self.source_proj(source.z_BCD.float()) * source.present_BC[..., None]
                x, s_BND = torch.cat([x_BCH, x], 1), F.pad(s_BND, (0, 0, x_BCH.shape[1], 0))
            time_BH = F.silu(self.time_mlp(scalar_embedding(t_B, self.hidden, MAX_PERIOD)))
        cos, sin = rotary_table(x.shape[1], self.head_dim, z_BND.device)
        depth, half = len(self.blocks), len(self.blocks) // 2
        skips: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i < half:
                skips.append(x)
            elif i >= depth - half:  # an odd depth has a middle layer without a skip
                x = x + skips.pop()
            x = x + self.time_layers[i](time_BH)[:, None] + self.self_cond_layers[i](s_BND)
            x = block(x, cos, sin)
        with fp32_island(z_BND):
            return self.out_proj(self.output_norm(x[:, -z_BND.shape[1] :]))
