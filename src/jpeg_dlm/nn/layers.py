"""Parts that several networks share: attention, rotary positions, embeddings of scalars, fp32 under autocast, recomputation.

Shapes: B batch, L positions, H hidden width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------- precision


def autocast_device(like: Tensor) -> str:
    """Return the kind of device whose autocast applies to `like`: the meta device has none, so there it is the CPU's."""
    return "cpu" if like.is_meta else like.device.type


def fp32_island(like: Tensor) -> torch.autocast:
    """Return a context without autocast: input projections, prefix tokens and heads stay in fp32 under bf16 (released)."""
    return torch.autocast(autocast_device(like), enabled=False)


# ---------------------------------------------------------------- positions and scalars


def rotary_angles(positions_L: Tensor, head_dim: int) -> Tensor:
    """Return the angles (L, head_dim / 2) of float positions."""
    inv = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_L.device) / head_dim)
    return torch.outer(positions_L, inv)


def rotary_table(length: int, head_dim: int, device: torch.device, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return cos and sin (L, head_dim) of the positions from `start`, with the same angles in both halves of a head (NeoX)."""
    positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
    angles = rotary_angles(positions, head_dim).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def scalar_frequencies(dim: int, device: torch.device, period: float = 10_000.0) -> Tensor:
    """Return `dim / 2` frequencies from 1 down to 1 / period (released: 1e-4)."""
    half = dim // 2
    return torch.exp(-math.log(period) * torch.arange(half, device=device, dtype=torch.float32) / half)


def scalar_embedding(x_B: Tensor, dim: int, period: float = 10_000.0) -> Tensor:
    """Return cosines then sines of x at all frequencies; x is not multiplied by 1000 (released)."""
    angles = x_B.float()[:, None] * scalar_frequencies(dim, x_B.device, period)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


# ---------------------------------------------------------------- layers


PRODUCT_KEYS = 256  # keys up to which all scores of bf16 on a CPU fit beside the rest (assumed)


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Attend as PyTorch does; on a CPU in bf16 by plain products, 3 to 9 times as fast with gradients (measured)."""
    if not (v.dtype == torch.bfloat16 and v.device.type == "cpu" and v.shape[-2] <= PRODUCT_KEYS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=v.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer that is initialized to zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class SwiGluBlock(nn.Module):
    """The pre-norm layer of Llama, which the small encoder and COSMOS's network are made of.

    x += Attention(norm(x)); x += SwiGLU(norm(x)), with rotary positions and without biases.
    """

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLH: Tensor, cos: Tensor, sin: Tensor, keys: Tensor | None = None) -> Tensor:
        """Attend to the positions where `keys` is True (None: all)."""
        qkv = self.qkv(self.norm_attention(x_BLH)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 B heads L d
        q, k = rotate_halves(qkv[:2].float(), cos, sin).to(qkv.dtype)
        x_BLH = x_BLH + self.out(attend(q, k, qkv[2], attn_mask=keys).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(x_BLH)).chunk(2, dim=-1)
        return x_BLH + self.down(F.silu(gate) * up)


def recompute_in_backward(layer: nn.Module) -> None:
    """Make `layer` keep only its inputs and recompute the rest in backward; names, results and dropout stay the same."""
    forward = layer.forward

    def recomputed(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False)  # restores the random state, so dropout repeats its mask

    layer.forward = recomputed
