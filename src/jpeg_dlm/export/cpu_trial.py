"""Try matrix products of every type that this project uses, and measure their speed.

`machine.cpu` runs `python -m jpeg_dlm.export.cpu_trial torch` as a child process, which a signal ends if the CPU traps.
"""

from __future__ import annotations

import base64
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from jpeg_dlm.sampling.linear import FEW_ROWS, DenseLinear, Int8Linear

ROWS, WIDTH = 256, 512  # of the timed products: 2 ms in fp32 on one AVX2 core, 16 ms in emulated bf16 (measured)
SECONDS = 0.03  # measuring time per type, with at least two products

# An ONNX file: h (64, 128) = x w, where w (128, 128) is filled with 1/2, then y (64, 64) = h h^T.
MODEL = (
    "CAg6qgEKMgoBcxIBdyIPQ29uc3RhbnRPZlNoYXBlKhkKBXZhbHVlKg0IARABIgQAAAA/QgFmoAEEChEKAXgKAXcSAWgiBk1hdE11"
    "bAoRCgFoEgF0IglUcmFuc3Bvc2UKEQoBaAoBdBIBeSIGTWF0TXVsEgFnKg0IAhAHOgSAAYABQgFzWhQKAXgSDwoNCAESCQoCCEAK"
    "AwiAAWITCgF5Eg4KDAgBEggKAghACgIIQEIECgAQEQ=="
)


def try_torch() -> None:
    """Run training under autocast with attention, then the prepared layers of the sampler with few and many rows."""
    layer, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(4, 8, 64, WIDTH // 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        q = x.bfloat16()
        y = F.scaled_dot_product_attention(q, q, q)
        layer(y.transpose(1, 2).flatten(2)).float().square().mean().backward()
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


@torch.inference_mode()
def measure_speeds() -> dict[str, float]:
    """Return GFLOP/s by type from the CPU time of one thread, so that other processes do not matter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
        x16, weight16, layer8 = x.bfloat16(), weight.bfloat16(), Int8Linear(weight, None)
        products = {"fp32": lambda: F.linear(x, weight), "bf16": lambda: F.linear(x16, weight16), "int8": lambda: layer8(x)}
        return {dtype: 2 * ROWS * WIDTH**2 / _best(product) / 1e9 for dtype, product in products.items()}
    finally:
        torch.set_num_threads(threads)


def _best(product: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls."""
    best, began, calls = float("inf"), time.thread_time(), 0
    while calls < 2 or time.thread_time() - began < SECONDS:
        start = time.thread_time()
        product()
        best, calls = min(best, time.thread_time() - start), calls + 1
    return max(best, 1e-9)  # a coarse clock may return 0


if __name__ == "__main__":
    try_torch() if sys.argv[1] == "torch" else try_file(sys.argv[1])
