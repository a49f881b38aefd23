"""Profile of sampling: the time of an evaluation by kind of operation, in every mode.

python benchmarks/run.py shares
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sampling import ENGINES, REFERENCE, contestant_of, trained_like
from torch.profiler import ProfilerActivity, profile
from workers import clock

from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.sampling.linear import computes_in_bf16

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
REST = "moving and elementwise"


def kind_of(operation: str) -> str:
    return next((kind for kind, starts in KINDS.items() if operation.startswith(starts)), REST)


def profiled(act: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of each kind of operation: its share in a profile, without operations it calls, of the whole time."""
    act()
    began = clock()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        act()
    seconds = clock() - began
    spent: dict[str, float] = {}
    for event in found.key_averages():
        kind = kind_of(event.key)
        spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: seconds * value / total for kind, value in spent.items()}


def measure(short: bool = False) -> dict[str, Any]:
    """Profile one denoise evaluation at the sizes of LM1B in every mode."""
    method = trained_like(JpegDlm(preset("lm1b")).eval())
    m = method.config.model
    z = torch.randn(8 if short else BATCH, m.latent_len, m.latent_dim, generator=torch.Generator().manual_seed(0))
    rows = []
    for name in (REFERENCE, *ENGINES):
        if name == "engine bf16" and not computes_in_bf16(torch.device("cpu")):
            continue  # fp32 with rounded weights
        contestant = contestant_of(method, name)
        seconds = profiled(lambda c=contestant: c.evaluate(z))
        total = sum(seconds.values())
        rows.append({"sampler": name, "seconds": total, **{kind: value / total for kind, value in seconds.items()}})
    kinds = [*KINDS, REST]
    cells = [[row["sampler"], f"{row['seconds']:.2f}", *(f"{row.get(kind, 0.0):.1%}" for kind in kinds)] for row in rows]
    products = {row["sampler"]: row["matrix products"] for row in rows if row["sampler"] != REFERENCE}
    return {
        "title": f"Where the time of an evaluation goes, LM1B, batch {len(z)}",
        "markdown": markdown_table(["sampler", "seconds", *kinds], cells) + "\n",
        "rows": rows,
        "ratios": {f"products in {name}": share for name, share in products.items()},
    }


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw a bar of seconds for each mode, divided by kind of operation."""
    figure, (axes,) = new_figure(1, result["title"])
    rows, left = result["rows"], [0.0] * len(result["rows"])
    for color, kind in zip(LINE_COLORS, [*KINDS, REST], strict=False):
        widths = [row["seconds"] * row.get(kind, 0.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [row["sampler"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    dress(axes, "", "", "seconds of an evaluation")
    axes.legend(fontsize=6.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)
