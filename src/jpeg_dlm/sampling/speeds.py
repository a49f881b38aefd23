"""Measured speeds of matrix products by type on this CPU, and the training precision that follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from jpeg_dlm.config import Config
from jpeg_dlm.machine.cpu import make_safe, remembered
from jpeg_dlm.sampling.linear import Int8Linear

WORTH_IT = 1.2  # smallest speedup of bf16 products with which training is faster, as casts take time too (assumed)
ROWS, WIDTH = 256, 512  # of the timed products: 2 ms in fp32 on one AVX2 core, 16 ms in emulated bf16 (measured)
SECONDS = 0.03  # measuring time per type, with at least two products


def speeds() -> dict[str, float]:
    """Return GFLOP/s of one core in fp32, bf16 and int8, measured once in a tenth of a second."""
    make_safe()

    def valid(found: Any) -> bool:
        numbers = found.values() if isinstance(found, dict) and found.keys() == {"fp32", "bf16", "int8"} else [None]
        return all(isinstance(n, float) and n > 0 for n in numbers)

    return remembered("GFLOP/s of one core", measure_speeds, valid)


def cost_of(dtype: str) -> str | None:
    """Return a warning if products in this type are slower than in fp32 on this CPU, else None."""
    found = speeds()
    ratio = found[dtype] / found["fp32"]
    return None if ratio >= 1 else f"{dtype} products run at {ratio:.2f}x the speed of fp32 on this CPU (measured)."


def training_precision(asked: str, device: str) -> Literal["fp32", "bf16"]:
    """Resolve `train.precision`: 'auto' is bf16 on CUDA, as in the paper, and the faster type on a CPU."""
    if asked != "auto":
        if asked == "bf16" and device == "cpu":
            make_safe()
        return "bf16" if asked == "bf16" else "fp32"
    if device == "cpu":
        return "bf16" if speeds()["bf16"] >= WORTH_IT * speeds()["fp32"] else "fp32"
    return "bf16" if device == "cuda" else "fp32"


def with_precision(config: Config, device: str) -> Config:
    """Return the config with the training precision for a kind of device, after making it safe to use."""
    return replace(config, train=replace(config.train, precision=training_precision(config.train.precision, device)))


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
