"""Load the pinned flan-t5-small encoder: dequantize the int8 weights of an ONNX file into transformers' T5EncoderModel.

This is flan-t5-small, fine-tuned on titles and quantized to int8 by its package, not T5-small.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders.hf import TransformersEncoder
from jpeg_dlm.encoders.onnx_reader import OnnxGraph, read_onnx
from jpeg_dlm.errors import AssetError, reason_of

NAME = "flan-t5-small (fine-tuned, int8)"
# Exporters keep the module path in the name of a node: /enc/block.0/layer.0/SelfAttention/q/MatMul_quant
_NODE_PATH = re.compile(r"^/[^/]+/(block\.\d+/layer\.\d+/(?:SelfAttention/[qkvo]|DenseReluDense/w[io](?:_[01])?))/MatMul")


def dequantize(quantized: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> Tensor:
    """Return (q - zero_point) * scale in fp32; a vector of scales applies to the last axis."""
    if not {scale.size, zero_point.size} <= {1, quantized.shape[-1] if quantized.ndim else 1}:
        raise ValueError("the scales do not match their tensor")  # broadcasting them could allocate any amount of memory
    return torch.from_numpy((quantized.astype(np.float32) - zero_point.astype(np.float32)) * scale.astype(np.float32))


def t5_state_dict(graph: OnnxGraph) -> dict[str, Tensor]:
    """Return the weights of the graph under the names of T5EncoderModel."""
    weights = graph.initializers

    def read(name: str) -> Tensor:
        base = name.removesuffix("_quantized")
        if name == base:
            return torch.from_numpy(weights[name].astype(np.float32))
        return dequantize(weights[name], weights[f"{base}_scale"], weights[f"{base}_zero_point"])

    state: dict[str, Tensor] = {}
    for name in weights:
        if name.split(".", 1)[0] == "enc" and name.endswith((".weight", ".weight_quantized")):
            state["encoder." + name.split(".", 1)[1].removesuffix("_quantized")] = read(name)
    for node in graph.nodes:
        found = _NODE_PATH.match(node.name)
        if found and len(node.inputs) > 1 and node.inputs[1] in weights:
            # MatMul stores (in, out), nn.Linear stores (out, in).
            state[f"encoder.{found.group(1).replace('/', '.')}.weight"] = read(node.inputs[1]).t().contiguous()
    state["shared.weight"] = state["encoder.embed_tokens.weight"]
    return state


def convert_t5_encoder(graph: OnnxGraph) -> nn.Module:
    """Build a T5EncoderModel with the sizes of the weights; raise `AssetError` for missing or extra tensors."""
    from transformers import T5Config, T5EncoderModel

    try:
        state = t5_state_dict(graph)
        vocab_size, d_model = state["shared.weight"].shape
        attention = "encoder.block.0.layer.0.SelfAttention"
        buckets, heads = state[f"{attention}.relative_attention_bias.weight"].shape
        gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight" in state
        config = T5Config(
            vocab_size=vocab_size,
            d_model=d_model,
            d_kv=state[f"{attention}.q.weight"].shape[0] // heads,
            d_ff=state[f"encoder.block.0.layer.1.DenseReluDense.{'wi_0' if gated else 'wi'}.weight"].shape[0],
            num_layers=1 + max(int(found.group(1)) for name in state if (found := re.match(r"encoder\.block\.(\d+)\.", name))),
            num_heads=heads,
            relative_attention_num_buckets=buckets,
            feed_forward_proj="gated-gelu" if gated else "relu",
        )
        with torch.device("meta"):  # skips random initialization, which would take longer than all the rest
            model = T5EncoderModel(config)
        model.load_state_dict(state, strict=True, assign=True)
    except (LookupError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise AssetError(f"The ONNX file does not hold a T5 encoder ({reason_of(error)}): fetch it again.") from error
    return model.eval()


def load_flan_t5_small(config: EncoderConfig, path: Path | None = None) -> TransformersEncoder:
    """Load the pinned encoder from its encoder.onnx, which is downloaded on first use if no `path` is given."""
    if path is None:
        from jpeg_dlm.fetch.assets import fetch

        path = fetch("flan-t5-small")
    return TransformersEncoder(convert_t5_encoder(read_onnx(path)), NAME, config)
