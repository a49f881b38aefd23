"""The diffusion network of COSMOS: a transformer over latents with long skips from its first half to its second.

Every layer receives the time and the self-conditioning. Layers follow Llama: RMSNorm, rotary positions, SwiGLU, no
biases. COSMOS's latents are as wide as its network; if the widths differ, linear layers project in and out.
Shapes: B batch, N latents, D latent width, H hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.attention import attend
from jpeg_dlm.nn.ddit import rotary_table, rotate_halves, zero_linear
from jpeg_dlm.nn.dit import scalar_embedding
from jpeg_dlm.nn.perceiver import CodecRMSNorm
from jpeg_dlm.nn.precision import fp32_island

MAX_PERIOD = 10.0  # of the time sinusoids; t is in [0, 1] and not rescaled (COSMOS)


def time_waves(t_B: Tensor, dim: int) -> Tensor:
    """Return cosines then sines of t at `dim / 2` frequencies from 1 down to 1 / MAX_PERIOD."""
    return scalar_embedding(t_B, dim, MAX_PERIOD)


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, ratio: float) -> None:
        super().__init__()
        self.heads = heads
        inner = int(hidden * ratio)
        self.norm_attn = CodecRMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm_mlp = CodecRMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attn(x), cos, sin)
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 B heads N head_dim
        v = qkv[2]
        q, k = rotate_halves(qkv[:2].float(), cos, sin).to(v.dtype)
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class UNetTransformer(nn.Module):
    """`forward(z, t, s)` predicts the clean latents."""

    def __init__(self, dim: int, hidden: int, depth: int, heads: int, ratio: float) -> None:
        super().__init__()
        self.hidden, self.head_dim = hidden, hidden // heads
        same = dim == hidden
        self.in_proj = nn.Identity() if same else nn.Linear(dim, hidden)
        self.time_mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))
        self.blocks = nn.ModuleList(LlamaBlock(hidden, heads, ratio) for _ in range(depth))
        self.time_layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.self_cond_layers = nn.ModuleList(nn.Linear(dim, hidden) for _ in range(depth))
        self.output_norm = CodecRMSNorm(hidden)
        self.out_proj = nn.Identity() if same else zero_linear(hidden, dim)  # assumed: the first prediction is the mean

    def forward(self, z_BND: Tensor, t_B: Tensor, s_BND: Tensor | None = None) -> Tensor:
        """Predict the clean latents, given the previous prediction s (None: zeros)."""
        with fp32_island(z_BND):
            z_BND = z_BND.float()
            s_BND = torch.zeros_like(z_BND) if s_BND is None else s_BND.float()
            x = self.in_proj(z_BND)
            time_BH = F.silu(self.time_mlp(time_waves(t_B, self.hidden)))
        cos, sin = rotary_table(z_BND.shape[1], self.head_dim, z_BND.device)
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
            return self.out_proj(self.output_norm(x))
