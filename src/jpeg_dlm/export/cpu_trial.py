"""Try matrix products of every type that this project uses, in a child process of `machine.cpu` that a trapping CPU kills."""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from jpeg_dlm.sampling.linear import FEW_ROWS, DenseLinear, Int8Linear

WIDTH = 512

# An ONNX file: h (64, 128) = x w, where w (128, 128) is filled with 1/2, then y (64, 64) = h h^T.
MODEL = (
    "CAg6qgEKMgoBcxIBdyIPQ29uc3RhbnRPZlNoYXBlKhkKBXZhbHVlKg0IARABIgQAAAA/QgFmoAEEChEKAXgKAXcSAWgiBk1hdE11"
    "bAoRCgFoEgF0IglUcmFuc3Bvc2UKEQoBaAoBdBIBeSIGTWF0TXVsEgFnKg0IAhAHOgSAAYABQgFzWhQKAXgSDwoNCAESCQoCCEAK"
    "AwiAAWITCgF5Eg4KDAgBEggKAghACgIIQEIECgAQEQ=="
)


def try_torch() -> None:
    """Run training under autocast with attention, then the prepared layers of the sampler."""
    layer, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(4, 8, 64, WIDTH // 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        q = x.bfloat16()
        y = F.scaled_dot_product_attention(q, q, q)
        layer(y.transpose(1, 2).flatten(2)).float().square().mean().backward()
    try_layers()


def try_layers() -> None:
    """Run the prepared layers of the sampler with few and many rows."""
    weight, bias = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    for rows in (1, FEW_ROWS, 2 * FEW_ROWS):
        x_MK = torch.randn(rows, WIDTH)
        Int8Linear(weight, bias)(x_MK)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            DenseLinear(weight, bias, torch.bfloat16)(x_MK)


def try_file(runtime: str) -> None:
    """Run a network in another runtime with this project's settings."""
    from jpeg_dlm.export.onnx_runtime import open_onnx
    from jpeg_dlm.export.openvino_runtime import open_openvino

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.onnx"
        path.write_bytes(base64.b64decode(MODEL))
        opened = open_onnx(path) if runtime == "onnxruntime" else open_openvino(path)
        opened.run({"x": np.ones((64, 128), np.float32)})


if __name__ == "__main__":
    try_torch() if sys.argv[1] == "torch" else try_file(sys.argv[1])
