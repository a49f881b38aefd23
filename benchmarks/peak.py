"""Peak speed of this machine: matrix products of each type, with the kernels of the sampler.

python benchmarks/run.py peak
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from workers import clock

from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.sampling.linear import DTYPES, ZERO_POINT, DenseLinear, Dtype, Int8Linear, linear_maker

ROWS, WIDTH, OUT = 1024, 1024, 2048  # sizes of the product; the DiT at batch 64 has 2816, 768 and 4096


def measure(short: bool = False) -> dict:
    """Measure the GFLOP/s of each type: the best of several products, since disturbances only make one slower."""
    rows = [{"dtype": dtype, "gflops": peak(dtype, 0.5 if short else 3.0)} for dtype in DTYPES]
    base = rows[0]["gflops"]
    cells = [[r["dtype"], f"{r['gflops']:.3g}", f"{r['gflops'] / base:.2f}x"] for r in rows]
    return {
        "title": "Peak of matrix products",
        "markdown": markdown_table(["type", "GFLOP/s", "to fp32"], cells) + "\n",
        "rows": rows,
        "ratios": {f"{r['dtype']} peak": r["gflops"] / base for r in rows[1:]},
    }


@torch.inference_mode()
def peak(dtype: Dtype, seconds: float = 1.0) -> float:
    """Return the GFLOP/s of the fastest product within `seconds`, of at least two."""
    act, best, tried = product(dtype), float("inf"), 0
    end = clock() + seconds
    while tried < 2 or clock() < end:
        began = clock()
        act()
        best, tried = min(best, clock() - began), tried + 1
    return 2 * ROWS * WIDTH * OUT / best / 1e9


def product(dtype: Dtype) -> Callable[[], object]:
    """Return a function that computes the product alone, without preparing its input."""
    layer = linear_maker(dtype)(torch.randn(OUT, WIDTH), None)
    if isinstance(layer, DenseLinear):
        x = torch.randn(ROWS, WIDTH, dtype=layer.weight_NK.dtype)
        return lambda: layer(x)
    assert isinstance(layer, Int8Linear)
    u = torch.randint(1, 256, (ROWS, WIDTH), dtype=torch.uint8)
    return lambda: layer.integer_product(u, ZERO_POINT)
