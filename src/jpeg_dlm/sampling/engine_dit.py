"""The DiT prepared for sampling: one mode for all rows, weights folded where the mathematics allow.

Against `nn.dit` these are rearrangements only: gains of norms go into the linear that follows, the two input
projections become one, the halves of the self-conditioning projection are kept apart, conditioning tokens are made once
for a grid, and the last block skips them, since no head reads them.
Shapes: B batch, N latents, D latent width, H hidden width, P prefix tokens, S = P + N, M rows of all samples together.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.dit import NORM_EPS, Block, Head, LatentTransformer
from jpeg_dlm.sampling.linear import MakeLinear, full_precision, keep_from_compiler, unit_rms


class FastHead(nn.Module):
    """Norm and linear, in fp32."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.linear = full_precision(head.linear.weight * head.norm_final.weight, head.linear.bias)

    def forward(self, x_BNH: Tensor) -> Tensor:
        return self.linear.of_unit_rms(x_BNH.flatten(0, 1), NORM_EPS).unflatten(0, x_BNH.shape[:2])


class FastBlock(nn.Module):
    """A transformer block over rows (M, H), which are overwritten; the last one returns those of the latents only."""

    gain: Tensor

    def __init__(self, block: Block, make: MakeLinear, skip: int) -> None:
        super().__init__()
        attention, mlp = block.attn, block.mlp
        self.heads, self.skip = attention.heads, skip
        self.qkv = make(attention.qkv.weight * block.norm1.weight, attention.qkv.bias)
        self.register_buffer("gain", torch.stack([attention.q_norm.weight, attention.k_norm.weight])[:, None])
        self.proj = make(attention.proj.weight, attention.proj.bias)
        self.w12 = make(mlp.w12.weight * block.norm2.weight, mlp.w12.bias)
        self.w3 = make(mlp.w3.weight, mlp.w3.bias)

    def forward(self, x_MH: Tensor, cis: Tensor, batch: int) -> Tensor:
        y_MH = self.attend(x_MH, cis, batch)
        if self.skip:
            x_MH = x_MH.view(batch, -1, x_MH.shape[1])[:, self.skip :].flatten(0, 1)
        x_MH = self.proj.add_to(x_MH, y_MH)
        gate, up = self.w12.of_unit_rms(x_MH, NORM_EPS).chunk(2, dim=-1)
        return self.w3.add_to(x_MH, F.silu(gate).mul_(up))

    def attend(self, x_MH: Tensor, cis: Tensor, batch: int) -> Tensor:
        """`cis` (S, 1, 1, head_dim / 2) turns pairs of channels as complex numbers, in one pass."""
        qkv = self.qkv.of_unit_rms(x_MH, NORM_EPS).view(batch, -1, 3, self.heads, x_MH.shape[1] // self.heads)
        v = qkv[:, :, 2]
        qk = unit_rms(qkv[:, :, :2].float(), NORM_EPS).mul_(self.gain)
        qk = torch.view_as_real(torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * cis).flatten(-2).to(v.dtype)
        q, k, v = (part.transpose(1, 2) for part in (qk[:, self.skip :, 0], qk[:, :, 1], v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, x_MH.shape[1])


class Conditioning(nn.Module):
    """The prefix of a whole grid at once; it is the same for every sample."""

    time: Tensor
    scale: Tensor
    mode: Tensor

    def __init__(self, dit: LatentTransformer) -> None:
        super().__init__()
        tokens = {"time": dit.t_emb_tokens, "scale": dit.sc_tokens, "mode": dit.mode_tokens}
        for name, learned in tokens.items():
            self.register_buffer(name, learned.detach().clone())
        self.t_embedder, self.sc_embedder = copy.deepcopy(dit.t_embedder), copy.deepcopy(dit.sc_embedder)

    def forward(self, times: list[float], w: float, decode: bool) -> Tensor:
        """Conditioning tokens (T, P, H) of each time."""
        t = torch.tensor(times, device=self.time.device)
        time = self.time + self.t_embedder(t)[:, None]
        scale = self.scale + self.sc_embedder(torch.full_like(t, w))[:, None]
        return torch.cat([time, scale, (self.mode * decode).expand(len(t), -1, -1)], dim=1)


class FastDiT(nn.Module):
    """f before its heads: `states(z, s, prefix)` gives the hidden states of the latents."""

    cis: Tensor

    def __init__(self, dit: LatentTransformer, make: MakeLinear, compile: bool) -> None:
        super().__init__()
        self.prefix, self.prefixes = dit.prefix, Conditioning(dit)
        narrow = dit.in_proj.proj1.weight
        of_z, of_s = dit.self_cond_proj.weight.chunk(2, dim=1)
        self.in_z = full_precision(narrow @ of_z, narrow @ dit.self_cond_proj.bias)
        self.in_s = full_precision(narrow @ of_s, None)
        self.widen = full_precision(dit.in_proj.proj2.weight, dit.in_proj.proj2.bias)
        blocks = cast("list[Block]", list(dit.blocks))
        self.blocks = nn.ModuleList(FastBlock(b, make, self.prefix if b is blocks[-1] else 0) for b in blocks)
        cos, sin = cast(Tensor, dit.rope_cos), cast(Tensor, dit.rope_sin)
        cis = torch.complex(cos[:, ::2].float(), sin[:, ::2].float())
        self.register_buffer("cis", cis[:, None, None])
        if compile:
            keep_from_compiler(self)
            for block in self.blocks:
                block.compile()

    def states(self, z_BND: Tensor, s_BND: Tensor | None, prefix_PH: Tensor) -> Tensor:
        """Hidden states (B, N, H); the sequence is one buffer that blocks write over."""
        batch, n = z_BND.shape[:2]
        u = self.in_z(z_BND.flatten(0, 1))
        if s_BND is not None:  # without it that half of the projection would only see zeros
            u = self.in_s.add_to(u, s_BND.flatten(0, 1))
        x_BSH = z_BND.new_empty(batch, self.prefix + n, prefix_PH.shape[-1])
        x_BSH[:, : self.prefix] = prefix_PH
        x_BSH[:, self.prefix :] = self.widen(u).unflatten(0, (batch, n))
        x_MH = x_BSH.flatten(0, 1)
        for block in self.blocks:
            x_MH = block(x_MH, self.cis, batch)
        return x_MH.unflatten(0, (batch, n))
