"""Translations per second: the packaged translator with every backend, beside AR with a KV cache, MDLM and ELF of its size.

python benchmarks/run.py translation            # batch 1, 8 and 64: about two minutes
python benchmarks/run.py translation --short    # batch 1

AR stops when all texts of a batch have ended, after as many tokens as targets have; the other systems always write whole rows.
All but the translator have random weights, which are equally fast. docs/translator.md has the BLEU of the translator and of AR.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sampling import under
from timing import best_seconds
from torch import Tensor, nn

from jpeg_dlm.api import load
from jpeg_dlm.checkpoints.model_folder import named_folder
from jpeg_dlm.encoders.frozen import build_encoder
from jpeg_dlm.evaluation.table import Table
from jpeg_dlm.evaluation.throughput import any_sources
from jpeg_dlm.export.onnx_model import PRECISIONS, OnnxNetworks, build_graphs
from jpeg_dlm.methods.base import FREE, Method
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.methods.sources import sample
from jpeg_dlm.presets import preset
from jpeg_dlm.util.rng import RowNoise

ROUNDS = {1: 15, 8: 9, 64: 5}  # by batch
# Tokens until the last text of a batch has ended: means of 5,000 batches of training targets (measured).
WRITTEN = {1: 9, 8: 12, 64: 15}
STEPS = (32, 4, 1)
AR = "AR, KV cache"


def measure(short: bool = False) -> dict[str, Any]:
    """Return the table as Markdown, its rows, and the ratios to the fastest AR of the same batch."""
    rows = [row for batch in list(ROUNDS)[: 1 if short else None] for row in rows_of(batch)]
    batches = sorted({row["batch"] for row in rows})
    cells = [
        [name, of[0]["evaluations"], *(f"{r['texts_per_s']:.0f} ({r['ratio']:.2f}x)" for r in of)]
        for name in dict.fromkeys(row["system"] for row in rows)
        for of in [[row for row in rows if row["system"] == name]]
    ]
    heading = ["system", "evaluations", *(f"batch {batch}" for batch in batches)]
    note = f"Translations per second, and the ratio to the fastest {AR}."
    return {
        "title": "French to English",
        "markdown": Table.of(note, heading, cells).markdown() + "\n",
        "rows": rows,
        "ratios": {f"{r['system']}, batch {r['batch']}": r["ratio"] for r in rows if not r["system"].startswith(AR)},
    }


def rows_of(batch: int) -> list[dict[str, Any]]:
    contestants = {**baselines(batch), **translators(batch)}
    seconds = best_seconds({name: act for name, (_, act) in contestants.items()}, ROUNDS[batch])
    fastest = min(spent for name, spent in seconds.items() if name.startswith(AR))
    return [
        {"system": name, "evaluations": evaluations, "batch": batch, "texts_per_s": batch / spent, "ratio": fastest / spent}
        for (name, (evaluations, _)), spent in zip(contestants.items(), seconds.values(), strict=True)
    ]


Contestant = tuple[int | str, Callable[[], Tensor]]  # network evaluations, and what writes a batch


def translators(batch: int) -> dict[str, Contestant]:
    """Return the packaged translator with several numbers of steps, in torch and in ONNX Runtime."""
    model = load(named_folder("translator"), "cpu")
    method = model.complete_method()
    assert isinstance(method, JpegDlm)
    writers = {"torch fp32": method}
    writers |= {f"ONNX Runtime {p}": OnnxNetworks(model.config, build_graphs(method, p)) for p in PRECISIONS}
    return {
        f"JPEG-DLM, {steps} step{'s' * (steps > 1)}, {backend}": (
            steps + 1,
            partial(written, writer, sampler, model.config, batch),
        )
        for backend, writer in writers.items()
        for steps in STEPS
        for sampler in [replace(model.config.sampler, steps=steps)]
    }


def baselines(batch: int) -> dict[str, Contestant]:
    """Return AR in three types, MDLM and ELF."""
    contestants: dict[str, Contestant] = {}
    ar = random_system("ar")
    free_BL = torch.full((batch, ar.config.data.token_len), FREE)
    free_BL[:, WRITTEN[batch] :] = 0  # given, so that nothing is computed
    plain = partial(written, ar, ar.config.sampler, ar.config, batch, free_BL)
    contestants[f"{AR}, fp32"] = "a token", plain
    contestants[f"{AR}, bf16"] = "a token", partial(under, "torch bf16 autocast", plain)
    with warnings.catch_warnings(action="ignore"):  # torch has moved it to another package, which is not installed here
        int8 = torch.ao.quantization.quantize_dynamic(random_system("ar"), {nn.Linear}, torch.qint8)
    contestants[f"{AR}, int8"] = "a token", partial(written, int8, ar.config.sampler, ar.config, batch, free_BL)
    for name in ("mdlm", "elf"):
        method = random_system(name)
        evaluations = method.config.sampler.evaluations(method.config.data.token_len)
        contestants[method.title] = evaluations, partial(written, method, method.config.sampler, method.config, batch)
    return contestants


def random_system(name: str) -> Method:
    """Return a system of the preset `translate` with random weights."""
    torch.manual_seed(0)
    config = for_method(preset("translate"), name)
    encoder = build_encoder(replace(config.encoder, kind="random"), config.data.vocab_size)
    method = build_method(config, encoder if name == "elf" else None)
    assert isinstance(method, Method)
    return method.eval()


@torch.no_grad()
def written(writer: Any, sampler: Any, config: Any, batch: int, fixed_BL: Tensor | None = None) -> Tensor:
    source = any_sources(config, batch, torch.device("cpu"))
    return sample(writer, sampler, RowNoise(0, range(batch)), fixed_BL=fixed_BL, source=source)
