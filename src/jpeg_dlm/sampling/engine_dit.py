"""The DiT on folded weights, in one mode for all rows.

Conditioning tokens are made once for a grid, and the last block skips them, since no head reads them.
Shapes: B batch, N latents, C latents of the context, D latent width, H hidden width, P prefix tokens with the context,
S = P + N, M rows of all samples together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.dit import NORM_EPS, Context
from jpeg_dlm.sampling.folded import FoldedBlock, FoldedDiT
from jpeg_dlm.sampling.linear import MakeLinear, full_precision, keep_from_compiler, unit_rms


class FastBlock(nn.Module):
    """A transformer block over rows (M, H), which are overwritten; the last one returns those of the latents only."""

    gain: Tensor

    def __init__(self, block: FoldedBlock, make: MakeLinear, skip: int) -> None:
        super().__init__()
        self.heads, self.skip = block.heads, skip
        self.qkv, self.proj, self.w12, self.w3 = (make(*w) for w in (block.qkv, block.proj, block.w12, block.w3))
        self.register_buffer("gain", torch.stack([block.q_gain, block.k_gain])[:, None])

    def forward(self, x_MH: Tensor, cis: Tensor, batch: int, seen_SS: Tensor | None = None) -> Tensor:
        y_MH = self.attend(x_MH, cis, batch, seen_SS)
        if self.skip:
            x_MH = x_MH.view(batch, -1, x_MH.shape[1])[:, self.skip :].flatten(0, 1)
        x_MH = self.proj.add_to(x_MH, y_MH)
        gate, up = self.w12.of_unit_rms(x_MH, NORM_EPS).chunk(2, dim=-1)
        return self.w3.add_to(x_MH, F.silu(gate).mul_(up))

    def attend(self, x_MH: Tensor, cis: Tensor, batch: int, seen_SS: Tensor | None) -> Tensor:
        """Attend, with pairs of channels rotated as complex numbers by `cis` (S, 1, 1, head_dim / 2)."""
        qkv = self.qkv.of_unit_rms(x_MH, NORM_EPS).view(batch, -1, 3, self.heads, x_MH.shape[1] // self.heads)
        v = qkv[:, :, 2]
        qk = unit_rms(qkv[:, :, :2].float(), NORM_EPS).mul_(self.gain)
        qk = torch.view_as_real(torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * cis).flatten(-2).to(v.dtype)
        q, k, v = (part.transpose(1, 2) for part in (qk[:, self.skip :, 0], qk[:, :, 1], v))
        seen = None if seen_SS is None else seen_SS[self.skip :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(-1, x_MH.shape[1])


class FastDiT(nn.Module):
    """f before its heads: `states(z, s, prefix)` gives the hidden states of the latents."""

    cis: Tensor

    def __init__(self, folded: FoldedDiT, make: MakeLinear, compile: bool) -> None:
        super().__init__()
        self.prefix, self.time, self.scale, self.mode = folded.prefix, folded.time, folded.scale, folded.mode
        self.none, self.kind = folded.none, folded.kind
        self.in_z, self.in_s, self.widen = (full_precision(*w) for w in (folded.in_z, folded.in_s, folded.widen))
        last = folded.blocks[-1]
        self.blocks = nn.ModuleList(FastBlock(b, make, self.prefix if b is last else 0) for b in folded.blocks)
        self.register_buffer("cis", torch.complex(folded.cos[:, ::2], folded.sin[:, ::2])[:, None, None])
        if compile:
            keep_from_compiler(self)
            for block in self.blocks:
                block.compile()

    def prefixes(self, times: Sequence[float], w: float, decode: bool) -> Tensor:
        """Return the conditioning tokens (T, P, H) of each time, without a context; they are the same for every sample."""
        t = torch.tensor(times, device=self.mode.device)
        mode, none = ((self.mode * decode).expand(len(t), -1, -1), self.none.expand(len(t), -1, -1))
        return torch.cat([self.time.tokens_of(t), self.scale.tokens_of(torch.full_like(t, w)), mode, none], dim=1)

    def context_tokens(self, context: Context) -> Tensor:
        """Return the conditioning tokens (B, C, H) of a context, for the last C of the prefix."""
        x_BCH = self.widen(self.in_z(context.z_BCD.flatten(0, 1))).unflatten(0, context.present_BC.shape) + self.kind
        return torch.where(context.present_BC[..., None], x_BCH, self.none)

    def states(
        self, z_BND: Tensor, s_BND: Tensor | None, prefix_PH: Tensor, context_BCH: Tensor | None = None,
        seen_SS: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return hidden states (B, N, H); the sequence is one buffer that blocks overwrite."""
        batch, n = z_BND.shape[:2]
        u = self.in_z(z_BND.flatten(0, 1))
        if s_BND is not None:  # without it that half of the projection would only see zeros
            u = self.in_s.add_to(u, s_BND.flatten(0, 1))
        x_BSH = z_BND.new_empty(batch, self.prefix + n, prefix_PH.shape[-1])
        x_BSH[:, : self.prefix] = prefix_PH
        if context_BCH is not None:
            x_BSH[:, self.prefix - context_BCH.shape[1] : self.prefix] = context_BCH
        x_BSH[:, self.prefix :] = self.widen(u).unflatten(0, (batch, n))
        x_MH = x_BSH.flatten(0, 1)
        for block in self.blocks:
            x_MH = block(x_MH, self.cis, batch, seen_SS)
        return x_MH.unflatten(0, (batch, n))
