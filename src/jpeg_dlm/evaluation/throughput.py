"""Generation throughput by the paper's rule: fp32, a given batch, the median after warm-up, without detokenization.

Systems are measured in turns, so that a busy machine slows all of them equally, and compared with the first one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from jpeg_dlm import __version__
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.evaluation.paper import paper_figures
from jpeg_dlm.flow.latent_sampler import Writer
from jpeg_dlm.machine.cpu import make_safe, with_limit
from jpeg_dlm.results.table import Table
from jpeg_dlm.rng import RowNoise

Dtype = Literal["fp32", "bf16"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16 autocast"}
COLUMNS = (
    "model", "sampler", "evaluations", "texts/s", "tokens/s", "ratio", "range of ratios", "paper (AR without KV cache = 1)",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A writer and the sampler to time; `origin` names the source of its weights."""

    name: str
    method: Writer
    sampler: Any
    token_len: int
    preset: str
    origin: str


def measure(
    subjects: Sequence[Subject],
    batch: int,
    repeats: int = 5,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    dtype: Dtype = "fp32",
    progress: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    """Return median texts and tokens per second of each subject, and its speed ratio to the first; bf16 means autocast."""
    name = DTYPES[dtype]
    if dtype == "bf16" and subjects[0].method.device.type == "cpu":
        make_safe()
        name = with_limit(name)
    for subject in subjects:
        if isinstance(subject.method, nn.Module):  # exported networks are what they are
            subject.method.float().eval()
    seconds: list[list[float]] = [[] for _ in subjects]
    for round_ in range(warmup + repeats):
        for i, subject in enumerate(subjects):
            spent = _seconds(subject, batch, round_, clock, dtype)
            if round_ >= warmup:
                seconds[i].append(spent)
            if progress is not None:
                progress(round_ * len(subjects) + i + 1, (warmup + repeats) * len(subjects))
    rows = []
    for subject, times in zip(subjects, seconds, strict=True):
        ratios = [own / other for own, other in zip(seconds[0], times, strict=True)]
        median = statistics.median(times)
        rows.append({
            "name": subject.name, "title": subject.method.title, "preset": subject.preset, "origin": subject.origin,
            "sampler": to_dict(subject.sampler), "sampler_label": subject.sampler.label(),
            "evaluations": subject.sampler.evaluations(subject.token_len),
            "token_len": subject.token_len, "seconds": times, "texts_per_second": batch / median,
            "tokens_per_second": batch * subject.token_len / median, "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)], "paper_speed": _paper_speed(subject),
        })  # fmt: skip
    return {
        "version": __version__, "torch": torch.__version__, "dtype": name, "batch": batch, "repeats": repeats,
        "warmup": warmup, "threads": torch.get_num_threads(), "device": _device_name(subjects[0]), "rows": rows,
    }  # fmt: skip


def _paper_speed(subject: Subject) -> float | None:
    figures = paper_figures(subject.preset, subject.method.title)
    return figures.get("speed_kv_cache" if getattr(subject.sampler, "kv_cache", False) else "speed")


@torch.no_grad()
def _seconds(subject: Subject, batch: int, round_: int, clock: Callable[[], float], dtype: Dtype) -> float:
    """Time one batch from noise to token ids; drawing the noise is included, as in generation."""
    device = subject.method.device
    noise = RowNoise(0, range(round_ * batch, (round_ + 1) * batch), 0, device)
    _wait(device)
    began = clock()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
        subject.method.sample(subject.sampler, noise)
    _wait(device)
    return clock() - began


def _wait(device: torch.device) -> None:
    """Wait for a GPU, which runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(subject: Subject) -> str:
    device = subject.method.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def throughput_table(result: dict[str, Any]) -> Table:
    """Format the result as Markdown."""
    head = (
        f"{result['dtype']}, batch {result['batch']}, median of {result['repeats']} on {result['device']}; "
        "model loading and detokenization excluded."
    )
    return Table.of(head, COLUMNS, map(_cells, result["rows"]))


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["ratio_range"]
    return [
        row["name"], row["sampler_label"], str(row["evaluations"]), f"{row['texts_per_second']:.3g}",
        f"{row['tokens_per_second']:.4g}", f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}",
        f"{row['paper_speed']:g}" if row["paper_speed"] else "",
    ]  # fmt: skip
