"""The two networks of Algorithm 2 as ONNX graphs.

What torch computes, rearranged where that leaves the mathematics alone: gates go into weights, the scale of attention into
the gain of q, linears without anything between them become one where that is smaller, and pairs of rotary channels become
halves (q and k are permuted alike, so their products stay).
Shapes: B batch, N latents, D latent width, H hidden width, P prefix tokens, S = P + N, L tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from jpeg_dlm.export.graph import Graph
from jpeg_dlm.export.networks import DECODE, DENOISE, OUTPUTS, input_sizes
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.nn.dit import NORM_EPS, Attention, Block, DiT, Head, ScalarEmbedder
from jpeg_dlm.nn.perceiver import NORM_EPS as CODEC_EPS
from jpeg_dlm.nn.perceiver import Decompressor, DecompressorLayer, FeedForward, Gate, PerceiverAttention


@torch.no_grad()
def write_network(name: str, method: JpegDlm, path: Path) -> None:
    """The network `name` of a method as one ONNX file."""
    g = Graph()
    inputs = {key: g.input(key, *sizes) for key, sizes in input_sizes(name, method.config).items()}
    if name == DENOISE:
        x = denoise(g, method.dit, **inputs)
        g.save(path, x, OUTPUTS[name], input_sizes(name, method.config)["z"], integers=False)
    else:
        tokens = g.op("ArgMax", logits(g, method, **inputs), axis=-1, keepdims=0)
        g.save(path, tokens, OUTPUTS[DECODE], [method.config.data.token_len], integers=True)


# ---------------------------------------------------------------- the DiT


def denoise(g: Graph, dit: DiT, z: str, t: str, s: str, w: str) -> str:
    """x = f(z, t; s, w)."""
    mode = g.for_each_row(torch.zeros_like(dit.mode_tokens), z)
    out = head(g, dit.denoise_head, states(g, dit, z, s, scalar_tokens(g, dit.t_embedder, dit.t_emb_tokens, t), w, mode))
    return with_skip(g, out, z, t) if dit.denoise_skip else out


def with_skip(g: Graph, out: str, z: str, t: str) -> str:
    """c_skip(t) z_t + c_out(t) F, as `nn.dit.DiT.with_skip`."""
    t = g.op("Unsqueeze", t, g.constant([1, 2]))
    rest = g.op("Sub", g.constant(torch.ones(1)), t)
    variance = g.op("Add", g.op("Mul", t, t), g.op("Mul", rest, rest))
    kept = g.op("Mul", g.op("Div", t, variance), z)
    return g.op("Add", kept, g.op("Mul", g.op("Div", rest, g.op("Sqrt", variance)), out))


def logits(g: Graph, method: JpegDlm, z: str, w: str) -> str:
    """f(z, t = 1) in decode mode, then D and W: (B, L, V)."""
    dit = method.predictor or method.dit
    one = dit.t_embedder(torch.ones(1, device=method.latent_mean.device))
    time = g.for_each_row(dit.t_emb_tokens + one[:, None], z)
    predicted = head(g, dit.decode_head, states(g, dit, z, None, time, w, g.for_each_row(dit.mode_tokens, z)))
    if method.config.model.decode_residual:
        predicted = g.op("Add", predicted, z)
    return projected(g, method, decompressed(g, method, predicted))


def states(g: Graph, dit: DiT, z: str, s: str | None, time: str, w: str, mode: str) -> str:
    """Hidden states (B, N, H) of the latents."""
    outer, inner = dit.self_cond_proj, dit.in_proj.proj1
    both = inner.weight @ outer.weight  # (bottleneck, 2 D): the halves of z and of s
    of_z, of_s = both.chunk(2, dim=1)
    x = g.linear(z, of_z, inner.weight @ outer.bias)
    x = x if s is None else g.op("Add", x, g.linear(s, of_s))
    x = g.linear(x, dit.in_proj.proj2.weight, dit.in_proj.proj2.bias)
    scale = scalar_tokens(g, dit.sc_embedder, dit.sc_tokens, w)
    x = g.op("Concat", time, scale, mode, x, axis=1)
    cos, sin = cast(Tensor, dit.rope_cos), cast(Tensor, dit.rope_sin)
    for b in dit.blocks:
        x = block(g, cast(Block, b), x, cos, sin)
    return g.op("Slice", x, g.constant([dit.prefix]), g.constant([len(cos)]), g.constant([1]))


def scalar_tokens(g: Graph, embedder: ScalarEmbedder, tokens: Tensor, x_B: str) -> str:
    """Learned tokens plus the embedding of each row's scalar."""
    half = embedder.freq_dim // 2
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half) / half)  # as in `scalar_embedding`
    angles = g.op("Mul", g.op("Unsqueeze", x_B, g.constant([1])), g.constant(frequencies))
    waves = g.op("Concat", g.op("Cos", angles), g.op("Sin", angles), axis=-1)
    y = g.linear(
        g.silu(g.linear(waves, embedder.mlp_0.weight, embedder.mlp_0.bias)), embedder.mlp_2.weight, embedder.mlp_2.bias
    )
    return g.op("Add", g.op("Unsqueeze", y, g.constant([1])), g.constant(tokens))


def block(g: Graph, b: Block, x: str, cos: Tensor, sin: Tensor) -> str:
    x = g.op("Add", x, self_attention(g, b.attn, g.rms_norm(x, b.norm1.weight, NORM_EPS), cos, sin))
    h = g.linear(g.rms_norm(x, b.norm2.weight, NORM_EPS), b.mlp.w12.weight, b.mlp.w12.bias)
    gate, up = g.split(h, [b.mlp.w3.in_features] * 2)
    return g.op("Add", x, g.linear(g.op("Mul", g.silu(gate), up), b.mlp.w3.weight, b.mlp.w3.bias))


def self_attention(g: Graph, a: Attention, x: str, cos: Tensor, sin: Tensor) -> str:
    width = a.proj.in_features
    size = width // a.heads
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    rows = (torch.arange(a.heads)[:, None] * size + order).flatten()  # the channels of all heads, halves for pairs
    rows = torch.cat([rows, width + rows, torch.arange(2 * width, 3 * width)])
    q, k, v = g.split(g.linear(x, a.qkv.weight[rows], a.qkv.bias[rows]), [width] * 3)
    q, k = (
        rotary(g, g.rms_norm(g.heads(y, a.heads), gain[order], NORM_EPS), cos[:, order], sin[:, order])
        for y, gain in ((q, a.q_norm.weight * size**-0.5), (k, a.k_norm.weight))
    )
    return g.linear(g.attention(q, k, g.heads(v, a.heads)), a.proj.weight, a.proj.bias)


def rotary(g: Graph, x: str, cos: Tensor, sin: Tensor) -> str:
    """Turns the channel i of the first half together with i of the second."""
    first, second = g.split(x, [cos.shape[1] // 2] * 2)
    across = g.op("Concat", g.op("Neg", second), first, axis=-1)
    return g.op("Add", g.op("Mul", x, g.constant(cos)), g.op("Mul", across, g.constant(sin)))


def head(g: Graph, h: Head, x: str) -> str:
    return g.linear(g.rms_norm(x, h.norm_final.weight, NORM_EPS), h.linear.weight, h.linear.bias)


# ---------------------------------------------------------------- D and W


def decompressed(g: Graph, method: JpegDlm, z: str) -> str:
    """The tokens' states (B, L, D) before D's last two linears."""
    d: Decompressor = method.decompressor
    query = d.query_gate(d.query_ffn(d.base_query)) + d.position_scale * d.pos_emb.weight
    x = g.for_each_row(query, z)
    # unstandardize and the positions of the latents in one step
    shift = method.latent_mean + d.position_scale * d.pos_latent.weight
    ctx = g.op("Add", g.op("Mul", z, g.constant(1 / method.latent_scale)), g.constant(shift))
    ctx = g.unit_rms(ctx, CODEC_EPS)  # every layer norms it anew, with another gain
    for module in d.layers:
        layer = cast(DecompressorLayer, module)
        x = g.op("Add", x, cross_attention(g, layer.attn, x, ctx, gate_of(layer.attn_gate)))
        x = g.op("Add", x, feed_forward(g, layer.ffn, x, gate_of(layer.ffn_gate)))
    return x


def gate_of(gate: Gate) -> Tensor:
    return gate(torch.ones((), device=gate.scale_mlp.weight.device))


def cross_attention(g: Graph, a: PerceiverAttention, x: str, ctx: str, gate: Tensor) -> str:
    """Tokens attend to the latents `ctx`, which are normed already, and to themselves; times a gate."""
    width = a.out.in_features
    x = g.unit_rms(x, CODEC_EPS)
    q, own_k, own_v = g.split(
        g.linear(x, torch.cat([a.to_q.weight, a.to_kv_latents.weight]) * a.norm_latents.gamma), [width] * 3
    )
    ctx_k, ctx_v = g.split(g.linear(ctx, a.to_kv_ctx.weight * a.norm_ctx.gamma), [width] * 2)
    k, v = (g.op("Concat", other, own, axis=1) for other, own in ((ctx_k, own_k), (ctx_v, own_v)))
    q = g.rms_norm(g.heads(q, a.heads), a.q_norm.gamma * (width // a.heads) ** -0.5, CODEC_EPS)
    k = g.rms_norm(g.heads(k, a.heads), a.k_norm.gamma, CODEC_EPS)
    return g.linear(g.attention(q, k, g.heads(v, a.heads)), a.out.weight * gate)


def feed_forward(g: Graph, ffn: FeedForward, x: str, gate: Tensor) -> str:
    norm, widen, narrow = cast(nn.LayerNorm, ffn.net[0]), cast(nn.Linear, ffn.net[1]), cast(nn.Linear, ffn.net[4])
    h = g.op("LayerNormalization", x, g.constant(norm.weight), g.constant(norm.bias), axis=-1, epsilon=norm.eps)
    return g.linear(g.op("Gelu", g.linear(h, widen.weight, widen.bias)), narrow.weight * gate, narrow.bias * gate)


def projected(g: Graph, method: JpegDlm, x: str) -> str:
    """D's last two linears, of which the second joins the first of W, and the rest of W."""
    last = method.decompressor.out_proj
    h = g.linear(g.linear(x, last.down.weight), method.unembed_proj.weight @ last.up.weight, method.unembed_proj.bias)
    return g.linear(g.op("Gelu", h), method.lm_head.weight, method.lm_head.bias)
