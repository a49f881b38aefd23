"""Sampling with every backend: torch in fp32 and under bf16 autocast, ONNX Runtime in fp32 and int8.

python benchmarks/run.py sampling            # bundled model, and one evaluation at the sizes of LM1B: about three minutes
python benchmarks/run.py sampling --short    # the bundled model alone

Whole texts of the bundled model take 32 Euler steps and one decoding. Contestants take turns; the fastest round counts. "Same
tokens" are those of torch in fp32, of 256 texts. At the sizes of LM1B weights are random, and the error is of one evaluation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timing import best_seconds
from torch import Tensor

from jpeg_dlm.api import load
from jpeg_dlm.evaluation.table import Table
from jpeg_dlm.export.onnx_model import PRECISIONS, OnnxNetworks, build_graphs
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.util.rng import RowNoise

BATCHES = {1: 9, 8: 5, 64: 3}  # rounds by batch
LM1B_BATCHES = {1: 5, 8: 3}
TEXTS = 256  # whose tokens are compared
TIME = 0.2  # t of a timed evaluation; the cost does not depend on it
PLAIN, AUTOCAST = "torch fp32", "torch bf16 autocast"


def measure(short: bool = False) -> dict[str, Any]:
    """Return the tables as Markdown, their rows, and the ratios to torch in fp32."""
    rows = bundled_rows() + ([] if short else lm1b_rows())
    heading = ["size", "backend", "batch", "ms", "ratio", "same tokens", "error"]
    cells = [
        [r["size"], r["backend"], r["batch"], f"{r['ms']:.0f}", f"{r['ratio']:.2f}x", r.get("same", ""), r.get("error", "")]
        for r in rows
    ]
    return {
        "title": "Sampling with every backend",
        "markdown": Table.of("", heading, cells).markdown() + "\n",
        "rows": rows,
        "ratios": {f"{r['size']}, batch {r['batch']}, {r['backend']}": r["ratio"] for r in rows if r["backend"] != PLAIN},
    }


def samplers(method: JpegDlm) -> dict[str, JpegDlm | OnnxNetworks]:
    """Return the samplers of a method by the names of their backends."""
    onnx = {f"ONNX Runtime {p}": OnnxNetworks(method.config, build_graphs(method, p)) for p in PRECISIONS}
    return {PLAIN: method, **({AUTOCAST: method} if torch.cpu._is_avx512_bf16_supported() else {}), **onnx}


@torch.no_grad()
def under(backend: str, act: Any, *args: Any) -> Tensor:
    """Call a function with the autocast of a backend."""
    with torch.autocast("cpu", torch.bfloat16, enabled=backend == AUTOCAST):
        return act(*args)


def bundled_rows() -> list[dict[str, Any]]:
    """Time whole texts of the bundled model."""
    model = load(device="cpu")
    assert isinstance(model.method, JpegDlm)
    options = model.sampler_options(solver="euler", steps=32)
    backends = samplers(model.method)
    tokens = {name: under(name, s.sample, options, RowNoise(0, range(TEXTS))) for name, s in backends.items()}
    same = {name: f"{(own == tokens[PLAIN]).float().mean():.1%}" for name, own in tokens.items()}
    rows = []
    for batch, rounds in BATCHES.items():
        acts = {n: partial(under, n, s.sample, options, RowNoise(0, range(batch))) for n, s in backends.items()}
        rows += timed_rows("bundled, 32 steps", batch, best_seconds(acts, rounds), "same", same)
    return rows


def lm1b_rows() -> list[dict[str, Any]]:
    """Time one denoise evaluation at the sizes of LM1B."""
    torch.manual_seed(0)
    method = trained_like(JpegDlm(preset("lm1b")).eval())
    m, w, backends, rows = method.config.model, method.config.sampler.w, samplers(method), []
    for batch, rounds in LM1B_BATCHES.items():
        z = torch.randn(batch, m.latent_len, m.latent_dim, generator=torch.Generator().manual_seed(0))
        acts = {name: partial(under, name, s.denoise, z, TIME, z, w) for name, s in backends.items()}
        x = {name: act().float() for name, act in acts.items()}
        errors = {name: f"{(y - x[PLAIN]).norm() / x[PLAIN].norm():.3f}" for name, y in x.items()}
        rows += timed_rows("LM1B, one evaluation", batch, best_seconds(acts, rounds), "error", errors)
    return rows


def timed_rows(size: str, batch: int, seconds: dict[str, float], key: str, values: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"size": size, "backend": n, "batch": batch, "ms": s * 1000, "ratio": seconds[PLAIN] / s, key: values[n]}
        for n, s in seconds.items()
    ]


@torch.no_grad()
def trained_like(method: JpegDlm) -> JpegDlm:
    """Add small noise to every weight: new heads are zero, so all contestants would trivially agree."""
    g = torch.Generator().manual_seed(0)
    for p in method.parameters():
        p.add_(0.02 * torch.randn(p.shape, generator=g))
    return method
