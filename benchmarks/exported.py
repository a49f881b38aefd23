"""Sampling with torch's engine, onnxruntime and OpenVINO at the paper's LM1B sizes: the same weights, in turns.

python benchmarks/run.py exported            # under five minutes on two cores, half of it for the export
python benchmarks/run.py exported --short
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sampling import trained_like
from timing import interleaved

from jpeg_dlm.allocator import keep_freed_memory
from jpeg_dlm.evaluation.report import markdown_table
from jpeg_dlm.export.folder import FORMATS, read_exported, write_exported
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.model_folder import ModelParts
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine import Engine
from jpeg_dlm.sampling.sampler import Writer

STEPS = 4  # of Euler; with the decode evaluation five passes, of which the solver's are what sampling repeats
PLAIN, ENGINE = "torch, plain", "torch, engine fp32"
CLEARLY = 1.1  # a runtime is recommended from here on (assumed: rounds differ by up to a tenth)


def measure(short: bool = False) -> dict[str, Any]:
    """Texts per second of each, as ratios to torch's engine, and the share of tokens that equal the plain method's."""
    keep_freed_memory()  # as `jpeg-dlm generate` does
    torch.manual_seed(0)
    config = preset("lm1b")
    method = trained_like(JpegDlm(config).eval())
    options = replace(config.sampler, steps=STEPS)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        contestants = opened(method, Path(scratch))
        for batch in (1, 8) if short else (1, 8, 64):
            rows += compare(contestants, options, batch)
    ratios = {f"{row['runtime']}, batch {row['batch']}": row["ratio"] for row in rows if row["runtime"] not in (PLAIN, ENGINE)}
    title = f"Exported networks, LM1B sizes, random weights, {STEPS} Euler steps, {torch.get_num_threads()} threads"
    return {"title": title, "markdown": f"{table(rows)}\n\n{recommendation(ratios)}\n", "rows": rows, "ratios": ratios}


def compare(contestants: Mapping[str, Writer], options: Any, batch: int) -> list[dict[str, Any]]:
    """A row for each; the first run of all, which is not timed, is the one whose tokens are compared."""
    noise = RowNoise(0, range(batch))
    acts = {name: partial(sampler.sample, options, noise) for name, sampler in contestants.items()}
    tokens = {name: act() for name, act in acts.items()}
    seconds = interleaved(acts, rounds=1 if batch == 64 else 3, warmup=0)
    return [
        {
            "batch": batch,
            "runtime": name,
            "texts/s": batch / s,
            "ratio": seconds[ENGINE] / s,
            "tokens": float((tokens[name] == tokens[PLAIN]).float().mean()),
        }
        for name, s in seconds.items()
    ]


def opened(method: JpegDlm, place: Path) -> dict[str, Writer]:
    """The same weights in each runtime."""
    parts = ModelParts(method, method.config, place, None, None)
    found: dict[str, Writer] = {PLAIN: method, ENGINE: Engine(method)}
    for kind in FORMATS:
        found[FORMATS[kind].runtime] = read_exported(write_exported(parts, kind, place / kind, print)).method
    return found


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [str(row["batch"]), row["runtime"], f"{row['texts/s']:.2f}", f"{row['ratio']:.2f}x", f"{100 * row['tokens']:.2f}%"]
        for row in rows
    ]
    return markdown_table(("batch", "runtime", "texts/s", "against the engine", "tokens equal to plain torch's"), cells)


def recommended_backend(ratios: Mapping[str, float]) -> str:
    """The runtime that is clearly faster than torch's engine at every measured batch, else torch."""
    least: dict[str, float] = {}
    for key, ratio in ratios.items():
        name = key.split(",")[0]
        least[name] = min(ratio, least.get(name, ratio))
    best = max(least, key=lambda name: least[name])
    return best if least[best] >= CLEARLY else "torch"


def recommendation(ratios: Mapping[str, float]) -> str:
    best = recommended_backend(ratios)
    if best == "torch":
        return f"No exported form is at least {CLEARLY}x as fast as torch's engine at every batch: stay with torch."
    kind = next(kind for kind, form in FORMATS.items() if form.runtime == best)
    return f"On this CPU {best} is faster than torch: jpeg-dlm export MODEL --format {kind} --out FOLDER."
