"""Perceiver compressor C and decompressor D: L token features <-> N latents (released code, which follows COSMOS).

`sampling.folded` mirrors the decompressor for sampling: a change here belongs there too.
Shapes: B batch, L tokens, N latents, D latent width, F feature width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jpeg_dlm.nn.attention import attend
from jpeg_dlm.nn.lean import gelu_linear, norm_linear, rms_norm
from jpeg_dlm.nn.spans import compressor_mask, decompressor_mask

# rms_norm adds eps to the mean square; 1e-16 equals the floor of 1e-8 on the RMS up to rounding (released).
NORM_EPS = 1e-16


class CodecRMSNorm(nn.Module):
    """x / max(rms(x), 1e-8) * gamma: epsilon is a floor on the RMS, not added to it (released)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gamma, NORM_EPS)


class FeedForward(nn.Module):
    """LayerNorm, expansion, GELU, contraction; the names in `net` match the released checkpoints."""

    def __init__(self, dim: int, ratio: float, dropout: float) -> None:
        super().__init__()
        inner = int(dim * ratio)
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        norm, expand, _, drop, contract = self.net
        assert isinstance(drop, nn.Dropout) and isinstance(contract, nn.Linear)
        if self.training and drop.p:
            return self.net(x)
        return gelu_linear(expand(norm(x)), contract.weight, contract.bias)


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

    def forward(self, x: Tensor, ctx: Tensor, ctx_mask: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """Attend from `x` to itself and `ctx`; `x` may be one row shared by the batch (learned queries), projected once.

        `ctx_mask` (B, context) is False at padding; `seen` (queries, keys) is the mask of a causal codec.
        """
        q, own = norm_linear(
            x, self.norm_latents.gamma, NORM_EPS, (self.to_q.weight, None), (self.to_kv_latents.weight, None)
        )  # fmt: skip
        (other,) = norm_linear(ctx, self.norm_ctx.gamma, NORM_EPS, (self.to_kv_ctx.weight, None))
        own = own.expand(len(ctx), -1, -1)
        kv = torch.cat([other, own] if self.context_first else [own, other], dim=1)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).unbind(2)  # B S heads head_dim
        q = self.q_norm(q.unflatten(-1, (self.heads, -1))).to(v.dtype).expand(len(ctx), -1, -1, -1)
        k = self.k_norm(k).to(v.dtype)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=self._mask(ctx_mask, x.shape[1], seen))
        return self.out(y.transpose(1, 2).flatten(2))

    def _mask(self, ctx_mask: Tensor | None, n_own: int, seen: Tensor | None) -> Tensor | None:
        """Return the attention mask, which excludes padded context and includes all latents that are seen."""
        if ctx_mask is None:
            return seen
        own = ctx_mask.new_ones(ctx_mask.shape[0], n_own)
        parts = [ctx_mask, own] if self.context_first else [own, ctx_mask]
        mask = torch.cat(parts, dim=1)[:, None, None, :]
        return mask if seen is None else mask & seen


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
        self.scale_mlp = nn.Linear(1, 1)
        nn.init.zeros_(self.scale_mlp.weight)  # assumed: start as the identity
        nn.init.zeros_(self.scale_mlp.bias)

    def forward(self, y: Tensor) -> Tensor:
        return y * (1 + self.scale_mlp.weight[0, 0] + self.scale_mlp.bias[0])


class CompressorLayer(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: float, dropout: float) -> None:
        super().__init__()
        self.attn = PerceiverAttention(dim, heads, context_first=False)
        self.ffn = FeedForward(dim, ratio, dropout)

    def forward(self, x: Tensor, ctx: Tensor, mask: Tensor | None, seen: Tensor | None = None) -> Tensor:
        x = x + self.attn(x, ctx, mask, seen)
        return x + self.ffn(x)


class DecompressorLayer(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: float, dropout: float) -> None:
        super().__init__()
        self.attn = PerceiverAttention(dim, heads, context_first=True)
        self.attn_gate = Gate()
        self.ffn = FeedForward(dim, ratio, dropout)
        self.ffn_gate = Gate()

    def forward(self, x: Tensor, ctx: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.attn_gate(self.attn(x, ctx, None, seen))
        return x + self.ffn_gate(self.ffn(x))


def position_table(length: int, dim: int) -> nn.Embedding:
    """Return a learned table of absolute positions, initialized from N(0, 1) (released)."""
    return nn.Embedding(length, dim)


class Compressor(nn.Module):
    """C: features (B, L, F) to latents (B, N, D), each of RMS 1 before the output gain.

    With `causal`, latent n attends to the tokens of its span and before, and to the latents up to itself.
    """

    seen: Tensor | None

    def __init__(
        self, token_len: int, latent_len: int, feature_dim: int, dim: int, bottleneck: int,
        layers: int, heads: int, ratio: float, dropout: float, position_scale: float, causal: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.position_scale = position_scale or dim**-0.5
        self.latents = nn.Parameter(0.02 * torch.randn(latent_len, dim))
        self.in_proj = Bottleneck(feature_dim, bottleneck, dim)
        self.latent_norm = CodecRMSNorm(dim)
        # The paper's text omits token positions; its released code has this table.
        self.pos_emb = position_table(token_len, dim)
        self.layers = nn.ModuleList(CompressorLayer(dim, heads, ratio, dropout) for _ in range(layers))
        self.output_norm = CodecRMSNorm(dim)
        self.register_buffer("seen", compressor_mask(token_len, latent_len) if causal else None, persistent=False)

    def forward(self, h_BLF: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        ctx_BLD = self.in_proj(h_BLF) + self.position_scale * self.pos_emb.weight
        z_BND = self.latent_norm(self.latents)[None]  # one row until it attends to the context
        for layer in self.layers:
            z_BND = layer(z_BND, ctx_BLD, mask_BL, self.seen)
        return self.output_norm(z_BND)


class Decompressor(nn.Module):
    """D: latents (B, N, D) to features (B, L, F); no final norm.

    With `causal`, a token attends to the latents and tokens of its span and before.
    """

    seen: Tensor | None

    def __init__(
        self, token_len: int, latent_len: int, feature_dim: int, dim: int, bottleneck: int,
        layers: int, heads: int, ratio: float, dropout: float, position_scale: float, causal: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.position_scale = position_scale or dim**-0.5
        self.base_query = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.query_ffn = FeedForward(dim, ratio, dropout)
        self.query_gate = Gate()
        self.pos_emb = position_table(token_len, dim)
        self.pos_latent = position_table(latent_len, dim)
        self.layers = nn.ModuleList(DecompressorLayer(dim, heads, ratio, dropout) for _ in range(layers))
        self.out_proj = Bottleneck(dim, bottleneck, feature_dim)
        self.register_buffer("seen", decompressor_mask(token_len, latent_len) if causal else None, persistent=False)

    def forward(self, z_BND: Tensor) -> Tensor:
        query = self.query_gate(self.query_ffn(self.base_query)).float()  # no residual here (released)
        x_BLD = query + self.position_scale * self.pos_emb.weight  # one row until it attends to the context
        ctx_BND = z_BND + self.position_scale * self.pos_latent.weight
        for layer in self.layers:
            x_BLD = layer(x_BLD, ctx_BND, self.seen)
        return self.out_proj(x_BLD).float()
