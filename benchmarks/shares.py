"""Time of sampling by kind of operation, which explains the distance of each mode from the machine's peak.

python benchmarks/run.py shares
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sampling import ENGINES, REFERENCE, contestant_of, trained_like
from torch.profiler import ProfilerActivity, profile

from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.results.table import markdown_table

BATCH = 64
# Prefixes of the profiler's names of operations; all others move data or are elementwise.
KINDS = {
    "matrix products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::linear", "onednn::qlinear", "aten::_mkl", "mkldnn::"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "norms": ("aten::linalg_vector_norm", "aten::rms_norm", "aten::_fused_rms_norm", "aten::native_layer_norm", "aten::rsqrt",
              "aten::pow", "aten::mean"),
    "activations": ("aten::silu", "aten::gelu"),
    "quantization": ("aten::amax", "aten::amin", "aten::addcdiv", "aten::addcmul", "aten::_to_copy", "aten::maximum"),
}  # fmt: skip


def kind_of(operation: str) -> str:
    return next((kind for kind, starts in KINDS.items() if operation.startswith(starts)), "moving and elementwise")


def shares(act: Callable[[], object]) -> dict[str, float]:
    """Return the share of time spent in each kind of operation itself, without the operations it calls."""
    act()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        act()
    spent: dict[str, float] = {}
    for event in found.key_averages():
        kind = kind_of(event.key)
        spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: value / total for kind, value in spent.items()}


def measure(short: bool = False) -> dict[str, Any]:
    """Profile one denoise evaluation at the sizes of LM1B in every mode."""
    method = trained_like(JpegDlm(preset("lm1b")).eval())
    m = method.config.model
    z = torch.randn(8 if short else BATCH, m.latent_len, m.latent_dim, generator=torch.Generator().manual_seed(0))
    rows = []
    for name in (REFERENCE, *ENGINES):
        contestant = contestant_of(method, name)
        rows.append({"sampler": name, **shares(lambda c=contestant: c.evaluate(z))})
    kinds = [*KINDS, "moving and elementwise"]
    cells = [[row["sampler"], *(f"{row.get(kind, 0.0):.1%}" for kind in kinds)] for row in rows]
    products = {row["sampler"]: row["matrix products"] for row in rows if row["sampler"] != REFERENCE}
    return {
        "title": f"Where the time of an evaluation goes, LM1B, batch {len(z)}",
        "markdown": markdown_table(["sampler", *kinds], cells) + "\n",
        "rows": rows,
        "ratios": {f"products in {name}": share for name, share in products.items()},
    }
