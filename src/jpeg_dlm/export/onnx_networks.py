"""The two networks of Algorithm 2 as ONNX graphs, for texts of one block; `nn.dit` and `nn.perceiver` are the originals.

A model of pairs has a third one, which reads sources with the small encoder and the layers of the DiT.

They are written node by node: a trace takes most of a minute at the paper's sizes and fixes the batch size.
Linears without anything between them become one, and gates go into the linear before them. The scale of attention goes into
the gain of q, and pairs of rotary channels become halves.
Shapes: B batch, N latents, D latent width, H hidden width, S prefix tokens and latents, L tokens, C tokens of a source.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.encoders.frozen import FrozenEncoder
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.nn.dit import NORM_EPS, Attention, DiT, DitBlock, Head, ScalarEmbedder
from jpeg_dlm.nn.layers import SwiGluBlock, rotary_table, scalar_frequencies
from jpeg_dlm.nn.perceiver import NORM_EPS as CODEC_EPS
from jpeg_dlm.nn.perceiver import Decompressor, DecompressorLayer, PerceiverAttention
from jpeg_dlm.util.errors import MissingPackageError, UsageError

HIDDEN = -1e9  # added to the scores of positions that are not attended to
OPSET, IR_VERSION = 20, 9  # the first opset with Gelu
LARGEST = (1 << 31) - (1 << 20)  # bytes of weights: a protobuf holds less than 2 GiB, nodes included
BATCH = "batch"  # the name of the free size


def onnx_package(name: str) -> Any:
    """Import a package of the extra `onnx`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(name.split(".")[0], "onnx", "The ONNX backend") from error


class Graph:
    """Nodes and constants; values are known by their names, which `op` and `constant` return."""

    def __init__(self, int8: bool) -> None:
        self.onnx, self.int8 = onnx_package("onnx"), int8
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.quantized: list[str] = []  # names of the products that int8 computes

    def input(self, name: str, *sizes: int) -> str:
        """Add an input of shape (batch, *sizes): floats, or token ids."""
        kind = self.onnx.TensorProto.INT64 if name == "source" else self.onnx.TensorProto.FLOAT
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, kind, [BATCH, *sizes]))
        return name

    def constant(self, value: Tensor | Sequence[int] | float) -> str:
        """Add floats as fp32, sequences of integers as int64."""
        if isinstance(value, Tensor):
            array = value.detach().cpu().float().contiguous().numpy()
        else:
            array = np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
        name = f"c{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, whose name is that of the node."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        names = [f"n{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, names[0], **attributes))
        return names

    def serialized(self, output: str, name: str, sizes: Sequence[int], integers: bool) -> bytes:
        """Return the graph whose only output is the value `output`, called `name`, of shape (batch, *sizes)."""
        if sum(len(constant.raw_data) for constant in self.constants) >= LARGEST:
            raise UsageError("The network is larger than an ONNX file can be, which is 2 GB: use the torch backend.")
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        self.nodes.append(helper.make_node("Identity", [output], [name]))
        result = helper.make_tensor_value_info(name, kinds.INT64 if integers else kinds.FLOAT, [BATCH, *sizes])
        graph = helper.make_graph(self.nodes, name, self.inputs, [result], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        return quantize(model, self.quantized) if self.int8 else model.SerializeToString()

    def linear(self, x: str, weight_OI: Tensor, bias_O: Tensor | None = None, int8: bool = False) -> str:
        y = self.op("MatMul", x, self.constant(weight_OI.T))
        if int8:
            self.quantized.append(y)
        return y if bias_O is None else self.op("Add", y, self.constant(bias_O))

    def block_linear(self, x: str, weight_OI: Tensor, bias_O: Tensor, level: bool = True) -> str:
        """A linear that int8 computes; `level`: the rows of x are about equally large.

        ONNX Runtime has one scale for all rows of x, so that others are first divided by their largest value (measured: this
        keeps 98% instead of 94% of the bundled model's tokens).
        """
        scale = ""
        if self.int8 and not level:
            largest = self.op("ReduceMax", self.op("Abs", x), self.constant([-1]), keepdims=1)
            scale = self.op("Max", largest, self.constant(1e-30))
        y = self.linear(self.op("Div", x, scale) if scale else x, weight_OI, int8=True)
        return self.op("Add", self.op("Mul", y, scale) if scale else y, self.constant(bias_O))

    def rms_norm(self, x: str, gain: Tensor, eps: float) -> str:
        """The last axis scaled to RMS 1 and by a gain, in the form that ONNX Runtime recognizes and fuses."""
        square = self.op("Pow", x, self.constant(2.0))
        mean = self.op("ReduceMean", square, self.constant([-1]), keepdims=1)
        unit = self.op("Div", x, self.op("Sqrt", self.op("Add", mean, self.constant(eps))))
        return self.op("Mul", unit, self.constant(gain))

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def heads(self, x: str, heads: int) -> str:
        """(B, S, heads * C) to (B, heads, S, C)."""
        return self.op("Transpose", self.op("Reshape", x, self.constant([0, 0, heads, -1])), perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str, mask: str = "") -> str:
        """softmax(q k^T + mask) v of (B, heads, S, C), heads side by side again; the caller scales."""
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Add", scores, mask) if mask else scores
        y = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.op("Reshape", y, self.constant([0, 0, -1]))

    def split(self, x: str, sizes: Sequence[int]) -> list[str]:
        """Along the last axis."""
        return self.ops("Split", x, self.constant(list(sizes)), outputs=len(sizes), axis=-1)

    def for_each_row(self, value: Tensor, like: str) -> str:
        """A constant (1, S, C) once for each row of `like`."""
        rows = self.op("Shape", like, start=0, end=1)
        shape = self.op("Concat", rows, self.constant(list(value.shape[1:])), axis=0)
        return self.op("Expand", self.constant(value), shape)


def quantize(model: Any, products: list[str]) -> bytes:
    """Return a graph whose products with these names multiply in int8, with a scale for each output channel of a weight.

    A CPU without VNNI adds two products in 16 bits, which 7-bit weights cannot overflow.
    """
    quantization = onnx_package("onnxruntime.quantization")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        logging.disable(logging.WARNING)  # one line for each product
        try:
            quantization.quantize_dynamic(
                model,
                path,
                op_types_to_quantize=["MatMul"],
                per_channel=True,
                reduce_range=not torch.cpu._is_vnni_supported(),
                weight_type=quantization.QuantType.QInt8,
                nodes_to_quantize=products,
            )
        finally:
            logging.disable(logging.NOTSET)
        return path.read_bytes()


# ---------------------------------------------------------------- the networks


def network_names(config: Config) -> tuple[str, ...]:
    """Return the names of a model's networks."""
    return ("denoise", "decode", "read") if config.data.source_len else ("denoise", "decode")


def input_sizes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    """Return the inputs of a network and their sizes after the batch; `present` is 1 at tokens of a source and 0 at padding."""
    m, length = config.model, config.data.source_len
    latents = (m.latent_len, m.latent_dim)
    if name == "decode":
        return {"z": latents, "w": ()}
    if name == "read":
        return {"source": (length,), "present": (length,)}
    memory = {"memory": (2 * m.depth, m.heads, length, m.hidden // m.heads), "present": (length,)} if length else {}
    return {"z": latents, "t": (), "s": latents, "w": (), **memory}


@torch.no_grad()
def build_graph(name: str, networks: JpegDlm, int8: bool) -> bytes:
    """Return a network as a serialized ONNX graph, with the weights as they are now."""
    g, sizes = Graph(int8), input_sizes(name, networks.config)
    inputs = {key: g.input(key, *shape) for key, shape in sizes.items()}
    if name == "denoise":
        return g.serialized(denoise(g, networks.dit, **inputs), "x", sizes["z"], integers=False)
    if name == "read":
        memory = input_sizes("denoise", networks.config)["memory"]
        return g.serialized(read(g, networks.dit, cast(FrozenEncoder, networks.encoder), **inputs), "memory", memory, False)
    tokens = g.op("ArgMax", logits(g, networks, **inputs), axis=-1, keepdims=0)
    return g.serialized(tokens, "tokens", [networks.config.data.token_len], integers=True)


def denoise(g: Graph, dit: DiT, z: str, t: str, s: str, w: str, memory: str = "", present: str = "") -> str:
    """x = f(z, t; s, w), for latents that may attend to the memory of a source."""
    time = scalar_tokens(g, dit.t_emb_tokens, dit.t_embedder, t)
    mode = g.for_each_row(torch.zeros_like(dit.mode_tokens), z)
    out = head(g, dit.denoise_head, states(g, dit, z, s, time, w, mode, memory, present))
    if not dit.denoise_skip:
        return out
    t = g.op("Unsqueeze", t, g.constant([1, 2]))  # c_skip(t) z_t + c_out(t) F
    rest = g.op("Sub", g.constant(torch.ones(1)), t)
    variance = g.op("Add", g.op("Mul", t, t), g.op("Mul", rest, rest))
    skip = g.op("Mul", g.op("Div", t, variance), z)
    return g.op("Add", skip, g.op("Mul", g.op("Div", rest, g.op("Sqrt", variance)), out))


def logits(g: Graph, networks: JpegDlm, z: str, w: str) -> str:
    """f(z, t = 1) in decode mode, then D and W: (B, L, V)."""
    dit = networks.predictor or networks.dit
    ones = torch.ones(1, device=dit.mode_tokens.device)
    time = g.for_each_row(dit.t_emb_tokens + dit.t_embedder(ones)[:, None], z)
    zhat = head(g, dit.decode_head, states(g, dit, z, None, time, w, g.for_each_row(dit.mode_tokens, z)))
    zhat = g.op("Add", zhat, z) if networks.config.model.decode_residual else zhat
    zhat = g.op("Add", g.op("Mul", zhat, g.constant(1 / networks.latent_scale)), g.constant(networks.latent_mean))
    down, up = networks.decompressor.out_proj.down.weight, networks.decompressor.out_proj.up.weight
    h = g.linear(decompressed(g, networks.decompressor, zhat), down)
    h = g.linear(h, networks.unembed_proj.weight @ up, networks.unembed_proj.bias)
    return g.linear(g.op("Gelu", h), networks.lm_head.weight, networks.lm_head.bias, int8=True)


def states(g: Graph, dit: DiT, z: str, s: str | None, time: str, w: str, mode: str, memory: str = "", present: str = "") -> str:
    """Hidden states (B, N, H) of the latents."""
    outer, narrow, widen = dit.self_cond_proj, dit.in_proj.proj1.weight, dit.in_proj.proj2
    of_z, of_s = outer.weight.chunk(2, dim=1)
    x = g.linear(z, narrow @ of_z, narrow @ outer.bias)
    x = x if s is None else g.op("Add", x, g.linear(s, narrow @ of_s))
    scale = scalar_tokens(g, dit.sc_tokens, dit.sc_embedder, w)
    x = g.op("Concat", time, scale, mode, g.linear(x, widen.weight, widen.bias), axis=1)
    cos, sin = dit.rope_cos, dit.rope_sin
    layers, mask = [("", "")] * len(dit.blocks), ""
    if memory:
        parts = g.ops("Split", memory, outputs=2 * len(layers), axis=1, num_outputs=2 * len(layers))
        parts = [g.op("Squeeze", part, g.constant([1])) for part in parts]
        layers = list(zip(parts[::2], parts[1::2], strict=True))
        mask = hidden_positions(g, g.op("Concat", present, g.for_each_row(torch.ones(1, len(cos)), z), axis=1))
    for module, seen in zip(dit.blocks, layers, strict=True):
        x, _ = block(g, cast(DitBlock, module), x, cos, sin, mask, seen)
    return g.op("Slice", x, g.constant([dit.prefix]), g.constant([len(cos)]), g.constant([1]))


def hidden_positions(g: Graph, present: str) -> str:
    """What is added to scores (B, 1, 1, S): 0 where a position is present, and otherwise a large negative number."""
    absent = g.op("Sub", g.constant(torch.ones(1)), present)
    return g.op("Unsqueeze", g.op("Mul", absent, g.constant(HIDDEN)), g.constant([1, 2]))


def block(
    g: Graph, m: DitBlock, x: str, cos: Tensor, sin: Tensor, mask: str, memory: tuple[str, str]
) -> tuple[str, tuple[str, str]]:
    """The states after a layer, and the keys and values of its positions."""
    y, own = self_attention(g, m.attn, g.rms_norm(x, m.norm1.weight, NORM_EPS), cos, sin, mask, memory)
    x, w12, w3 = g.op("Add", x, y), m.mlp.w12, m.mlp.w3
    gate, up = g.split(g.block_linear(g.rms_norm(x, m.norm2.weight, NORM_EPS), w12.weight, w12.bias), [w3.in_features] * 2)
    return g.op("Add", x, g.block_linear(g.op("Mul", g.silu(gate), up), w3.weight, w3.bias, level=False)), own


def read(g: Graph, dit: DiT, encoder: FrozenEncoder, source: str, present: str) -> str:
    """Keys and values of all layers (B, 2 layers, heads, C, head width) of a source, which sees itself alone."""
    mask, layers = hidden_positions(g, present), []
    proj = cast(nn.Linear, dit.source_proj)
    standard = encoder.scale != "none"
    weight = proj.weight / encoder.feature_std if standard else proj.weight
    bias = proj.bias + dit.context_kind.flatten() - (weight @ encoder.feature_mean if standard else 0)
    x = g.linear(encoded(g, encoder, source, dit.context_len, mask), weight, bias)
    cos, sin = dit.context_cos, dit.context_sin
    for module in dit.blocks:
        x, own = block(g, cast(DitBlock, module), x, cos, sin, mask, ("", ""))
        layers += [g.op("Unsqueeze", part, g.constant([1])) for part in own]
    return g.op("Concat", *layers, axis=1)


def encoded(g: Graph, encoder: FrozenEncoder, source: str, length: int, mask: str) -> str:
    """Features of the small encoder before standardization (B, C, F)."""
    m = cast(SmallEncoder, encoder.model)
    width, size, last = m.feature_dim, m.feature_dim // m.heads, m.layer_index(encoder.layer)
    cos, sin = rotary_table(length, size, torch.device("cpu"))
    x = g.op("Gather", g.constant(m.embedding.weight * width**0.5), source)
    scale = torch.cat([torch.full((width, 1), size**-0.5), torch.ones(2 * width, 1)])  # of attention, in the rows of q
    for module in m.blocks[:last]:
        b = cast(SwiGluBlock, module)
        q, k, v = g.split(g.linear(g.rms_norm(x, b.norm_attention.weight, NORM_EPS), b.qkv.weight * scale), [width] * 3)
        q, k = (rotary(g, g.heads(y, m.heads), cos, sin) for y in (q, k))
        x = g.op("Add", x, g.linear(g.attention(q, k, g.heads(v, m.heads), mask), b.out.weight))
        gate_up = g.linear(g.rms_norm(x, b.norm_mlp.weight, NORM_EPS), b.gate_up.weight)
        gate, up = g.split(gate_up, [b.down.in_features] * 2)
        x = g.op("Add", x, g.linear(g.op("Mul", g.silu(gate), up), b.down.weight))
    return g.rms_norm(x, m.final_norm.weight, NORM_EPS) if last == m.depth else x


def scalar_tokens(g: Graph, learned: Tensor, embedder: ScalarEmbedder, x_B: str) -> str:
    """Learned tokens plus the embedding of each scalar (B, P, H)."""
    frequencies = scalar_frequencies(embedder.freq_dim, learned.device)
    angles = g.op("Mul", g.op("Unsqueeze", x_B, g.constant([1])), g.constant(frequencies))
    waves = g.op("Concat", g.op("Cos", angles), g.op("Sin", angles), axis=-1)
    y = g.silu(g.linear(waves, embedder.mlp_0.weight, embedder.mlp_0.bias))
    y = g.linear(y, embedder.mlp_2.weight, embedder.mlp_2.bias)
    return g.op("Add", g.op("Unsqueeze", y, g.constant([1])), g.constant(learned))


def self_attention(
    g: Graph, a: Attention, x: str, cos: Tensor, sin: Tensor, mask: str, memory: tuple[str, str]
) -> tuple[str, tuple[str, str]]:
    """Attention to the memory, if there is one, and to x itself; also the keys and values of x."""
    width, size = a.proj.in_features, cos.shape[1]
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    rows = (torch.arange(a.heads)[:, None] * size + order).flatten()  # the channels of all heads, halves for pairs
    rows = torch.cat([rows, width + rows, torch.arange(2 * width, 3 * width)])
    q, k, v = g.split(g.block_linear(x, a.qkv.weight[rows], a.qkv.bias[rows]), [width] * 3)
    q, k = (
        rotary(g, g.rms_norm(g.heads(y, a.heads), gain[order], NORM_EPS), cos[:, order], sin[:, order])
        for y, gain in ((q, a.q_norm.weight * size**-0.5), (k, a.k_norm.weight))
    )
    own = keys, values = k, g.heads(v, a.heads)
    if memory[0]:
        keys, values = (g.op("Concat", seen, new, axis=2) for seen, new in zip(memory, own, strict=True))
    return g.block_linear(g.attention(q, keys, values, mask), a.proj.weight, a.proj.bias), own


def rotary(g: Graph, x: str, cos: Tensor, sin: Tensor) -> str:
    """Turn the channel i of the first half together with i of the second."""
    first, second = g.split(x, [cos.shape[1] // 2] * 2)
    across = g.op("Concat", g.op("Neg", second), first, axis=-1)
    return g.op("Add", g.op("Mul", x, g.constant(cos)), g.op("Mul", across, g.constant(sin)))


def head(g: Graph, m: Head, x: str) -> str:
    return g.linear(g.rms_norm(x, m.norm_final.weight, NORM_EPS), m.linear.weight, m.linear.bias)


def decompressed(g: Graph, d: Decompressor, z: str) -> str:
    """The tokens' states (B, L, D) after the layers of D."""
    ctx = g.op("Add", z, g.constant(d.position_scale * d.pos_latent.weight))
    x = g.for_each_row(d.query_gate(d.query_ffn(d.base_query)) + d.position_scale * d.pos_emb.weight, z)
    for module in d.layers:
        layer = cast(DecompressorLayer, module)
        attn_gate, ffn_gate = (gate(torch.ones((), device=d.base_query.device)) for gate in (layer.attn_gate, layer.ffn_gate))
        x = g.op("Add", x, g.linear(cross_attention(g, layer.attn, x, ctx), layer.attn.out.weight * attn_gate))
        norm, widen, narrow = (cast(nn.Linear, layer.ffn.net[i]) for i in (0, 1, 4))
        h = g.op("LayerNormalization", x, g.constant(norm.weight), g.constant(norm.bias), epsilon=cast(nn.LayerNorm, norm).eps)
        h = g.op("Gelu", g.linear(h, widen.weight, widen.bias))
        x = g.op("Add", x, g.linear(h, narrow.weight * ffn_gate, narrow.bias * ffn_gate))
    return x


def cross_attention(g: Graph, a: PerceiverAttention, x: str, ctx: str) -> str:
    """Tokens attend to the latents and to themselves."""
    width, size = a.out.in_features, len(a.q_norm.gamma)
    own = torch.cat([a.to_q.weight, a.to_kv_latents.weight])
    q, own_k, own_v = g.split(g.linear(g.rms_norm(x, a.norm_latents.gamma, CODEC_EPS), own), [width] * 3)
    ctx_k, ctx_v = g.split(g.linear(g.rms_norm(ctx, a.norm_ctx.gamma, CODEC_EPS), a.to_kv_ctx.weight), [width] * 2)
    k, v = (g.op("Concat", latents, tokens, axis=1) for latents, tokens in ((ctx_k, own_k), (ctx_v, own_v)))
    q = g.rms_norm(g.heads(q, a.heads), a.q_norm.gamma * size**-0.5, CODEC_EPS)
    return g.attention(q, g.rms_norm(g.heads(k, a.heads), a.k_norm.gamma, CODEC_EPS), g.heads(v, a.heads))
