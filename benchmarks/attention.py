"""Attention in a training step in bf16: the kernel for bf16 against ours, which computes in fp32 on a CPU.

python benchmarks/run.py attention
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import clock
from torch import Tensor

from jpeg_dlm.evaluation.table import Table
from jpeg_dlm.nn.layers import attend

HEADS, HEAD_DIM = 4, 48  # of the preset `captions`
TOKENS = 1024  # in a batch
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"bf16": F.scaled_dot_product_attention, "ours": attend}


def measure(short: bool = False) -> dict:
    """Measure milliseconds of forward and backward, the forms in turns; medians of all rounds."""
    rows = []
    for length in (16, 128) if short else (16, 32, 64, 128, 256):
        spent = {name: [] for name in FORMS}
        for _ in range(5 if short else 30):
            for name, form in FORMS.items():
                spent[name].append(step(form, length))
        rows.append({"length": length} | {name: 1e3 * statistics.median(times) for name, times in spent.items()})
    cells = [[str(r["length"]), f"{r['bf16']:.2f}", f"{r['ours']:.2f}", f"{r['bf16'] / r['ours']:.2f}x"] for r in rows]
    return {
        "title": "Attention forward and backward in bf16",
        "markdown": Table.of("", ["tokens of a row", "kernel for bf16, ms", "ours, ms", "ratio"], cells).markdown() + "\n",
        "rows": rows,
        "ratios": {f"attention, rows of {r['length']} tokens": r["bf16"] / r["ours"] for r in rows},
    }


def step(form: Callable[[Tensor, Tensor, Tensor], Tensor], length: int) -> float:
    """Return the seconds of one forward and backward pass."""
    shape = (TOKENS // length, HEADS, length, HEAD_DIM)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, dtype=torch.bfloat16)
    began = clock()
    form(q, k, v).backward(gradient)
    return clock() - began
