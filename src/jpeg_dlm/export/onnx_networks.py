"""The two networks of Algorithm 2 as ONNX graphs, on the folded weights, for texts of one block.

The scale of attention goes into the gain of q, and pairs of rotary channels become halves.
Shapes: B batch, N latents, D latent width, H hidden width, P prefix tokens, S = P + N, L tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jpeg_dlm.export.interface import DECODE, DENOISE, OUTPUTS, input_sizes
from jpeg_dlm.export.onnx_builder import Graph
from jpeg_dlm.flow.latent_sampler import LatentNetworks
from jpeg_dlm.nn.dit import NORM_EPS
from jpeg_dlm.nn.perceiver import NORM_EPS as CODEC_EPS
from jpeg_dlm.sampling.folded import Folded, FoldedBlock, FoldedDecoder, FoldedDiT, FoldedLayer, FoldedScalar, Weights, fold


def write_network(name: str, networks: LatentNetworks, path: Path) -> None:
    """Write the network `name` as one ONNX file."""
    g, folded = Graph(), fold(networks)
    sizes = input_sizes(name, networks.config)
    inputs = {key: g.input(key, *shape) for key, shape in sizes.items()}
    if name == DENOISE:
        g.save(path, denoise(g, folded, **inputs), OUTPUTS[name], sizes["z"], integers=False)
    else:
        tokens = g.op("ArgMax", logits(g, folded, **inputs), axis=-1, keepdims=0)
        g.save(path, tokens, OUTPUTS[DECODE], [networks.config.data.token_len], integers=True)


def denoise(g: Graph, folded: Folded, z: str, t: str, s: str, w: str) -> str:
    """x = f(z, t; s, w)."""
    dit = folded.dit
    mode = g.for_each_row(torch.zeros_like(dit.mode), z)
    out = head(g, folded.denoise_head, states(g, dit, z, s, scalar_tokens(g, dit.time, t), w, mode))
    return with_skip(g, out, z, t) if folded.denoise_skip else out


def with_skip(g: Graph, out: str, z: str, t: str) -> str:
    """c_skip(t) z_t + c_out(t) F, as `nn.dit.DiT.with_skip`."""
    t = g.op("Unsqueeze", t, g.constant([1, 2]))
    rest = g.op("Sub", g.constant(torch.ones(1)), t)
    variance = g.op("Add", g.op("Mul", t, t), g.op("Mul", rest, rest))
    kept = g.op("Mul", g.op("Div", t, variance), z)
    return g.op("Add", kept, g.op("Mul", g.op("Div", rest, g.op("Sqrt", variance)), out))


def logits(g: Graph, folded: Folded, z: str, w: str) -> str:
    """f(z, t = 1) in decode mode, then D and W: (B, L, V)."""
    dit = folded.predictor
    time = g.for_each_row(dit.time.tokens_of(torch.ones(1, device=dit.mode.device)), z)
    predicted = head(g, folded.decode_head, states(g, dit, z, None, time, w, g.for_each_row(dit.mode, z), folded.decode_seen))
    if folded.decode_residual:
        predicted = g.op("Add", predicted, z)
    x = decompressed(g, folded.decoder, predicted)
    h = g.linear(g.linear(x, *folded.decoder.down), *folded.decoder.up)
    return g.linear(g.op("Gelu", h), *folded.decoder.lm_head)


def states(
    g: Graph, dit: FoldedDiT, z: str, s: str | None, time: str, w: str, mode: str, seen: Tensor | None = None
) -> str:  # fmt: skip
    """Hidden states (B, N, H) of the latents."""
    x = g.linear(z, *dit.in_z)
    x = x if s is None else g.op("Add", x, g.linear(s, *dit.in_s))
    none = [g.for_each_row(dit.none, z)] if dit.none.shape[1] else []
    x = g.op("Concat", time, scalar_tokens(g, dit.scale, w), mode, *none, g.linear(x, *dit.widen), axis=1)
    for b in dit.blocks:
        x = block(g, b, x, dit.cos, dit.sin, seen)
    return g.op("Slice", x, g.constant([dit.prefix]), g.constant([len(dit.cos)]), g.constant([1]))


def scalar_tokens(g: Graph, scalar: FoldedScalar, x_B: str) -> str:
    """As `FoldedScalar.tokens_of`."""
    angles = g.op("Mul", g.op("Unsqueeze", x_B, g.constant([1])), g.constant(scalar.frequencies))
    waves = g.op("Concat", g.op("Cos", angles), g.op("Sin", angles), axis=-1)
    y = g.linear(g.silu(g.linear(waves, *scalar.mlp_0)), *scalar.mlp_2)
    return g.op("Add", g.op("Unsqueeze", y, g.constant([1])), g.constant(scalar.learned))


def block(g: Graph, b: FoldedBlock, x: str, cos: Tensor, sin: Tensor, seen: Tensor | None) -> str:
    x = g.op("Add", x, self_attention(g, b, g.unit_rms(x, b.qkv.inputs, NORM_EPS), cos, sin, seen))
    gate, up = g.split(g.linear(g.unit_rms(x, b.w12.inputs, NORM_EPS), *b.w12), [b.w3.inputs] * 2)
    return g.op("Add", x, g.linear(g.op("Mul", g.silu(gate), up), *b.w3))


def self_attention(g: Graph, b: FoldedBlock, x: str, cos: Tensor, sin: Tensor, seen: Tensor | None) -> str:
    width, size = b.proj.inputs, len(b.q_gain)
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    rows = (torch.arange(b.heads)[:, None] * size + order).flatten()  # the channels of all heads, halves for pairs
    rows = torch.cat([rows, width + rows, torch.arange(2 * width, 3 * width)])
    q, k, v = g.split(g.linear(x, *b.qkv.reordered(rows)), [width] * 3)
    q, k = (
        rotary(g, g.rms_norm(g.heads(y, b.heads), gain[order], NORM_EPS), cos[:, order], sin[:, order])
        for y, gain in ((q, b.q_gain * size**-0.5), (k, b.k_gain))
    )
    return g.linear(g.attention(q, k, g.heads(v, b.heads), seen), *b.proj)


def rotary(g: Graph, x: str, cos: Tensor, sin: Tensor) -> str:
    """Turns the channel i of the first half together with i of the second."""
    first, second = g.split(x, [cos.shape[1] // 2] * 2)
    across = g.op("Concat", g.op("Neg", second), first, axis=-1)
    return g.op("Add", g.op("Mul", x, g.constant(cos)), g.op("Mul", across, g.constant(sin)))


def head(g: Graph, weights: Weights, x: str) -> str:
    return g.linear(g.unit_rms(x, weights.inputs, NORM_EPS), *weights)


def decompressed(g: Graph, decoder: FoldedDecoder, z: str) -> str:
    """The tokens' states (B, L, D) after the layers of D."""
    width = len(decoder.spread)
    ctx = g.op("Add", g.op("Mul", z, g.constant(decoder.spread)), g.constant(decoder.shift))
    kv = g.split(g.linear(g.unit_rms(ctx, width, CODEC_EPS), *decoder.kv_ctx), [width] * 2 * len(decoder.layers))
    x = g.for_each_row(decoder.queries[None], z)
    for layer, ctx_k, ctx_v in zip(decoder.layers, kv[::2], kv[1::2], strict=True):
        x = g.op("Add", x, cross_attention(g, layer, x, ctx_k, ctx_v, decoder.seen))
        ones = g.constant(torch.ones(width))
        h = g.op("LayerNormalization", x, ones, axis=-1, epsilon=layer.layer_norm_eps)
        x = g.op("Add", x, g.linear(g.op("Gelu", g.linear(h, *layer.widen)), *layer.narrow))
    return x


def cross_attention(g: Graph, layer: FoldedLayer, x: str, ctx_k: str, ctx_v: str, seen: Tensor | None) -> str:
    """Tokens attend to the latents, of which keys and values are given, and to themselves."""
    width, size = layer.out.inputs, len(layer.q_gain)
    q, own_k, own_v = g.split(g.linear(g.unit_rms(x, width, CODEC_EPS), *layer.qkv), [width] * 3)
    k, v = (g.op("Concat", other, own, axis=1) for other, own in ((ctx_k, own_k), (ctx_v, own_v)))
    q = g.rms_norm(g.heads(q, layer.heads), layer.q_gain * size**-0.5, CODEC_EPS)
    k = g.unit_rms(g.heads(k, layer.heads), size, CODEC_EPS)
    return g.linear(g.attention(q, k, g.heads(v, layer.heads), seen), *layer.out)
