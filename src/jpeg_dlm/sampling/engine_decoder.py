"""Decompressor and token projection prepared for sampling.

Rearrangements only: the queries and all of the first layer that does not see the latents are computed once, gains and
gates go into weights, the keys and values of the latents are one product for all layers, the last bias-free linear of
the decompressor joins the first of the token projection, and logits exist only for a few rows at a time.
Shapes: B batch, L tokens, N latents, D latent width, M rows of all samples together.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import logit_rows
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.nn.perceiver import NORM_EPS, DecompressorLayer, FeedForward, Gate, PerceiverAttention
from jpeg_dlm.sampling.linear import MakeLinear, full_precision, keep_from_compiler, unit_rms


def gate_value(gate: Gate) -> Tensor:
    """The learned factor 1 + w + b."""
    return 1 + gate.scale_mlp.weight[0, 0] + gate.scale_mlp.bias[0]


class FastFeedForward(nn.Module):
    """x + gate * FFN(x), written over x."""

    def __init__(self, ffn: FeedForward, gate: Gate, make: MakeLinear) -> None:
        super().__init__()
        norm, widen, narrow = cast(nn.LayerNorm, ffn.net[0]), cast(nn.Linear, ffn.net[1]), cast(nn.Linear, ffn.net[4])
        self.eps = norm.eps
        self.widen = make(widen.weight * norm.weight, widen.bias + widen.weight @ norm.bias)
        factor = gate_value(gate)
        self.narrow = make(narrow.weight * factor, narrow.bias * factor)

    def forward(self, x_MD: Tensor) -> Tensor:
        h_MD = F.layer_norm(x_MD, x_MD.shape[1:], eps=self.eps)
        return self.narrow.add_to(x_MD, F.gelu(self.widen(h_MD)))


class FastLayer(nn.Module):
    """One layer over rows (M, D), which are overwritten; keys and values of the latents come from outside."""

    gain: Tensor

    def __init__(self, layer: DecompressorLayer, make: MakeLinear) -> None:
        super().__init__()
        a: PerceiverAttention = layer.attn
        self.heads = a.heads
        self.qkv = make(torch.cat([a.to_q.weight, a.to_kv_latents.weight]) * a.norm_latents.gamma, None)
        # q and k meet in products only, so one of them carries both gains.
        self.register_buffer("gain", a.q_norm.gamma * a.k_norm.gamma)
        self.out = make(a.out.weight * gate_value(layer.attn_gate), None)
        self.ffn = FastFeedForward(layer.ffn, layer.ffn_gate, make)

    def own(self, x_MD: Tensor) -> Tensor:
        """Queries, keys and values of the tokens themselves."""
        return self.qkv.of_unit_rms(x_MD, NORM_EPS)

    def forward(self, x_MD: Tensor, own: Tensor, kv_ctx_BN2D: Tensor) -> Tensor:
        """`own` (1 or B, L, 3 D) may be common to all samples."""
        batch, d = len(kv_ctx_BN2D), x_MD.shape[1]
        q, own_kv = own.split([d, 2 * d], dim=-1)
        kv = torch.cat([kv_ctx_BN2D, own_kv.expand(batch, -1, -1)], dim=1)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q = (unit_rms(q.float(), NORM_EPS) * self.gain).to(v.dtype).expand(batch, -1, -1, -1)
        y = F.scaled_dot_product_attention(q, unit_rms(k.float(), NORM_EPS).to(v.dtype), v)
        return self.ffn(self.out.add_to(x_MD, y.transpose(1, 2).reshape(-1, d)))


class FastDecoder(nn.Module):
    """Standardized latents (B, N, D) to the most probable tokens (B, L)."""

    queries: Tensor
    own_first: Tensor
    shift: Tensor
    spread: Tensor

    def __init__(self, method: JpegDlm, make: MakeLinear, compile: bool) -> None:
        super().__init__()
        d = method.decompressor
        query = d.query_gate(d.query_ffn(d.base_query))
        self.register_buffer("queries", (query + d.position_scale * d.pos_emb.weight)[0])
        given = cast("list[DecompressorLayer]", list(d.layers))
        layers = [FastLayer(layer, make) for layer in given]
        self.layers = nn.ModuleList(layers)
        self.register_buffer("own_first", layers[0].own(self.queries)[None])
        attentions = [layer.attn for layer in given]
        self.kv_ctx = make(torch.cat([a.to_kv_ctx.weight * a.norm_ctx.gamma for a in attentions]), None)
        # unstandardize and the positions of the latents in one step: z * spread + shift
        self.register_buffer("spread", 1 / method.latent_scale)
        self.register_buffer("shift", method.latent_mean + d.position_scale * d.pos_latent.weight)
        self.down = full_precision(d.out_proj.down.weight, None)
        self.up = full_precision(method.unembed_proj.weight @ d.out_proj.up.weight, method.unembed_proj.bias)
        self.lm_head = full_precision(method.lm_head.weight, method.lm_head.bias)
        if compile:
            keep_from_compiler(self)
            for layer in self.layers:
                layer.compile()

    def forward(self, z_BND: Tensor) -> Tensor:
        batch, length = len(z_BND), len(self.queries)
        ctx_MD = torch.addcmul(self.shift, z_BND, self.spread).flatten(0, 1)
        kv_layers = self.kv_ctx.of_unit_rms(ctx_MD, NORM_EPS).unflatten(0, z_BND.shape[:2]).chunk(len(self.layers), dim=-1)
        x_MD = self.queries.repeat(batch, 1)
        own = self.own_first
        for i, (layer, kv_ctx) in enumerate(zip(cast("list[FastLayer]", self.layers), kv_layers, strict=True)):
            if i:
                own = layer.own(x_MD).unflatten(0, (batch, length))
            x_MD = layer(x_MD, own, kv_ctx)
        return self.most_probable(x_MD).view(batch, length)

    def most_probable(self, x_MD: Tensor) -> Tensor:
        h = F.gelu(self.up(self.down(x_MD)))
        rows = logit_rows(0, len(self.lm_head.weight_NK))
        return torch.cat([self.lm_head(part).argmax(-1) for part in h.split(rows)])
