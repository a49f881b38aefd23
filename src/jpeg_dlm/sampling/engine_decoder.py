"""Decompressor and token projection on folded weights.

What the first layer does before it sees the latents is computed once, and logits exist only for a few rows at a time.
Shapes: B batch, L tokens, N latents, D latent width, M rows of all samples together.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import logit_rows
from jpeg_dlm.flow.latent_sampler import LatentNetworks
from jpeg_dlm.nn.perceiver import NORM_EPS
from jpeg_dlm.nn.token_decoder import TokenDecoder, TokenProjection
from jpeg_dlm.sampling.folded import FoldedDecoder, FoldedLayer
from jpeg_dlm.sampling.linear import MakeLinear, full_precision, keep_from_compiler, unit_rms


class FastLayer(nn.Module):
    """One layer over rows (M, D), which are overwritten; keys and values of the latents come from outside."""

    gain: Tensor

    def __init__(self, layer: FoldedLayer, make: MakeLinear) -> None:
        super().__init__()
        self.heads, self.layer_norm_eps = layer.heads, layer.layer_norm_eps
        self.qkv, self.out = make(*layer.qkv), make(*layer.out)
        self.widen, self.narrow = make(*layer.widen), make(*layer.narrow)
        self.register_buffer("gain", layer.q_gain)

    def own(self, x_MD: Tensor) -> Tensor:
        """Return queries, keys and values of the tokens themselves."""
        return self.qkv.of_unit_rms(x_MD, NORM_EPS)

    def forward(self, x_MD: Tensor, own: Tensor, kv_ctx_BN2D: Tensor, seen: Tensor | None) -> Tensor:
        """Apply the layer; `own` (1 or B, L, 3 D) may be common to all samples."""
        batch, d = len(kv_ctx_BN2D), x_MD.shape[1]
        q, own_kv = own.split([d, 2 * d], dim=-1)
        kv = torch.cat([kv_ctx_BN2D, own_kv.expand(batch, -1, -1)], dim=1)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q = (unit_rms(q.float(), NORM_EPS) * self.gain).to(v.dtype).expand(batch, -1, -1, -1)
        y = F.scaled_dot_product_attention(q, unit_rms(k.float(), NORM_EPS).to(v.dtype), v, attn_mask=seen)
        x_MD = self.out.add_to(x_MD, y.transpose(1, 2).reshape(-1, d))
        h_MD = F.layer_norm(x_MD, (d,), eps=self.layer_norm_eps)
        return self.narrow.add_to(x_MD, F.gelu(self.widen(h_MD)))


class FastDecoder(nn.Module):
    """Standardized latents (B, N, D) to the most probable tokens (B, L)."""

    queries: Tensor
    own_first: Tensor
    shift: Tensor
    spread: Tensor
    seen: Tensor | None

    def __init__(self, folded: FoldedDecoder, make: MakeLinear, compile: bool) -> None:
        super().__init__()
        layers = [FastLayer(layer, make) for layer in folded.layers]
        self.layers = nn.ModuleList(layers)
        self.register_buffer("queries", folded.queries)
        self.register_buffer("own_first", layers[0].own(self.queries)[None])
        self.register_buffer("spread", folded.spread)
        self.register_buffer("shift", folded.shift)
        self.register_buffer("seen", folded.seen)
        self.kv_ctx = make(*folded.kv_ctx)
        self.down, self.up, self.lm_head = (full_precision(*w) for w in (folded.down, folded.up, folded.lm_head))
        if compile:
            keep_from_compiler(self)
            for layer in self.layers:
                layer.compile()

    def forward(self, z_BND: Tensor) -> Tensor:
        return self.most_probable(self.states(z_BND)).view(len(z_BND), -1)

    def states(self, z_BND: Tensor) -> Tensor:
        """Return the states (M, D) of the tokens after all layers."""
        batch, length = len(z_BND), len(self.queries)
        ctx_MD = torch.addcmul(self.shift, z_BND, self.spread).flatten(0, 1)
        kv_layers = self.kv_ctx.of_unit_rms(ctx_MD, NORM_EPS).unflatten(0, z_BND.shape[:2]).chunk(len(self.layers), dim=-1)
        x_MD = self.queries.repeat(batch, 1)
        own = self.own_first
        for i, (layer, kv_ctx) in enumerate(zip(cast("list[FastLayer]", self.layers), kv_layers, strict=True)):
            if i:
                own = layer.own(x_MD).unflatten(0, (batch, length))
            x_MD = layer(x_MD, own, kv_ctx, self.seen)
        return x_MD

    def most_probable(self, x_MD: Tensor) -> Tensor:
        rows = logit_rows(0, len(self.lm_head.weight_NK))
        return torch.cat([self.lm_head(part).argmax(-1) for part in F.gelu(self.up(self.down(x_MD))).split(rows)])


class ContextualEnd:
    """From the states of `FastDecoder` to tokens by a contextual decoder, as torch computes it; weights are copied."""

    def __init__(self, networks: LatentNetworks, decoder: TokenDecoder) -> None:
        W = TokenProjection(networks.unembed_proj, networks.lm_head)
        self.out_proj, self.decoder, self.W = copy.deepcopy((networks.decompressor.out_proj, decoder, W))
        self.decoder.eval()

    def __call__(self, x_MD: Tensor, batch: int, given_BL: Tensor | None) -> Tensor:
        return self.decoder.written(self.out_proj(x_MD.float()).unflatten(0, (batch, -1)), self.W, given_BL)
