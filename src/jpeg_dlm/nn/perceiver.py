"""Perceiver compressor C and decompressor D: L token features <-> N latents (released code, which follows COSMOS).

`export.onnx_networks` mirrors the decompressor: a change here belongs there too.
The networks take the options of a model, `m`: latent_len, latent_dim, bottleneck_dim, codec_*, position_scale.
Shapes: B batch, L tokens, N latents, D latent width, F feature width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.nn.layers import attend, zero_linear

# F.rms_norm adds eps to the mean square; 1e-16 equals the floor of 1e-8 on the RMS up to rounding (released).
NORM_EPS = 1e-16
MLP_RATIO = 4  # (released)


class CodecRMSNorm(nn.Module):
    """x / max(rms(x), 1e-8) * gamma: epsilon is a floor on the RMS, not added to it (released)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.gamma.shape, self.gamma, NORM_EPS)


class FeedForward(nn.Module):
    """LayerNorm, expansion, GELU, contraction; the names in `net` match the released checkpoints."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = MLP_RATIO * dim
        # The identity stands where the released code has a dropout, which is off.
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, inner), nn.GELU(), nn.Identity(), nn.Linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class PerceiverAttention(nn.Module):
    """Latents attend to themselves and to a context; projections without bias, q and k normalized per head."""

    def __init__(self, dim: int, heads: int, context_first: bool) -> None:
        super().__init__()
        self.heads, self.context_first = heads, context_first
        self.norm_ctx, self.norm_latents = CodecRMSNorm(dim), CodecRMSNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv_ctx = nn.Linear(dim, 2 * dim, bias=False)
        self.to_kv_latents = nn.Linear(dim, 2 * dim, bias=False)
        self.q_norm, self.k_norm = CodecRMSNorm(dim // heads), CodecRMSNorm(dim // heads)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, ctx: Tensor, ctx_mask: Tensor | None = None) -> Tensor:
        """Attend from `x` to itself and `ctx`; `x` may be one row shared by the batch (learned queries), projected once.

        `ctx_mask` (B, context) is False at padding.
        """
        x = self.norm_latents(x)
        q, own, other = self.to_q(x), self.to_kv_latents(x).expand(len(ctx), -1, -1), self.to_kv_ctx(self.norm_ctx(ctx))
        kv = torch.cat([other, own] if self.context_first else [own, other], dim=1)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).unbind(2)  # B S heads head_dim
        q = self.q_norm(q.unflatten(-1, (self.heads, -1))).to(v.dtype).expand(len(ctx), -1, -1, -1)
        k = self.k_norm(k).to(v.dtype)
        if ctx_mask is not None:  # excludes padded context and includes all latents
            own = ctx_mask.new_ones(len(ctx), x.shape[1])
            ctx_mask = torch.cat([ctx_mask, own] if self.context_first else [own, ctx_mask], dim=1)[:, None, None, :]
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=ctx_mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Bottleneck(nn.Module):
    """Two bias-free linear layers with a narrow middle."""

    def __init__(self, dim_in: int, middle: int, dim_out: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim_in, middle, bias=False)
        self.up = nn.Linear(middle, dim_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class Gate(nn.Module):
    """y * (1 + w + b): a learned scalar, stored like the 1-to-1 linear layer of COSMOS's mask scale at m = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_mlp = zero_linear(1, 1)  # assumed: start as the identity

    def forward(self, y: Tensor) -> Tensor:
        return y * (1 + self.scale_mlp.weight[0, 0] + self.scale_mlp.bias[0])


class CompressorLayer(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.attn = PerceiverAttention(m.latent_dim, m.codec_heads, context_first=False)
        self.ffn = FeedForward(m.latent_dim)

    def forward(self, x: Tensor, ctx: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(x, ctx, mask)
        return x + self.ffn(x)


class DecompressorLayer(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.attn = PerceiverAttention(m.latent_dim, m.codec_heads, context_first=True)
        self.attn_gate = Gate()
        self.ffn = FeedForward(m.latent_dim)
        self.ffn_gate = Gate()

    def forward(self, x: Tensor, ctx: Tensor) -> Tensor:
        x = x + self.attn_gate(self.attn(x, ctx))
        return x + self.ffn_gate(self.ffn(x))


class Compressor(nn.Module):
    """C: features (B, L, F) to latents (B, N, D), each of RMS 1 before the output gain."""

    def __init__(self, m: Any, token_len: int, feature_dim: int) -> None:
        super().__init__()
        dim = m.latent_dim
        self.position_scale = m.position_scale or dim**-0.5
        self.latents = nn.Parameter(0.02 * torch.randn(m.latent_len, dim))
        self.in_proj = Bottleneck(feature_dim, m.bottleneck_dim, dim)
        self.latent_norm = CodecRMSNorm(dim)
        # The paper's text omits token positions; its released code has this table, initialized from N(0, 1).
        self.pos_emb = nn.Embedding(token_len, dim)
        self.layers = nn.ModuleList(CompressorLayer(m) for _ in range(m.codec_layers))
        self.output_norm = CodecRMSNorm(dim)

    def forward(self, h_BLF: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        ctx_BLD = self.in_proj(h_BLF) + self.position_scale * self.pos_emb.weight
        z_BND = self.latent_norm(self.latents)[None]  # one row until it attends to the context
        for layer in self.layers:
            z_BND = layer(z_BND, ctx_BLD, mask_BL)
        return self.output_norm(z_BND)


class Decompressor(nn.Module):
    """D: latents (B, N, D) to features (B, L, F); no final norm."""

    def __init__(self, m: Any, token_len: int, feature_dim: int) -> None:
        super().__init__()
        dim = m.latent_dim
        self.position_scale = m.position_scale or dim**-0.5
        self.base_query = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.query_ffn = FeedForward(dim)
        self.query_gate = Gate()
        self.pos_emb = nn.Embedding(token_len, dim)
        self.pos_latent = nn.Embedding(m.latent_len, dim)
        self.layers = nn.ModuleList(DecompressorLayer(m) for _ in range(m.codec_layers))
        self.out_proj = Bottleneck(dim, m.bottleneck_dim, feature_dim)

    def forward(self, z_BND: Tensor) -> Tensor:
        query = self.query_gate(self.query_ffn(self.base_query)).float()  # no residual here (released)
        x_BLD = query + self.position_scale * self.pos_emb.weight  # one row until it attends to the context
        ctx_BND = z_BND + self.position_scale * self.pos_latent.weight
        for layer in self.layers:
            x_BLD = layer(x_BLD, ctx_BND)
        return self.out_proj(x_BLD).float()
