"""Generation throughput by the paper's rule: fp32, a given batch, the median after warm-up, without detokenization.

Systems are measured in turns, so that a busy machine slows all of them equally, and compared with the first one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from jpeg_dlm import __version__
from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.paper import paper_figures
from jpeg_dlm.evaluation.table import Column, Table
from jpeg_dlm.flow.sampler import TextSampler
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.sources import sample
from jpeg_dlm.options import to_dict
from jpeg_dlm.util.rng import RowNoise, generator


@dataclass(frozen=True)
class Subject:
    """A writer to time with the sampler of its config; `origin` names the source of its weights."""

    name: str
    method: TextSampler
    config: Config
    origin: str
    source: Batch | None = None  # of pairs, one for each text of a batch


def any_sources(config: Config, batch: int, device: torch.device) -> Batch | None:
    """Return sources of random tokens for a model of pairs: reading them takes as long as reading text."""
    g = generator(0, "sources")
    tokens_BS = torch.randint(config.data.vocab_size, (batch, config.data.source_len), generator=g).to(device)
    return Batch(tokens_BS, torch.ones_like(tokens_BS, dtype=torch.bool)) if config.data.source_len else None


def measure(
    subjects: Sequence[Subject],
    batch: int,
    repeats: int = 5,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int | None], None] | None = None,
) -> dict[str, Any]:
    """Return median texts and tokens per second of each subject, and its speed ratio to the first."""
    for subject in subjects:
        if isinstance(subject.method, nn.Module):  # exported networks are what they are
            subject.method.float().eval()
    seconds: list[list[float]] = [[] for _ in subjects]
    turns = [(round_, i) for round_ in range(warmup + repeats) for i in range(len(subjects))]
    for done, (round_, i) in enumerate(turns, 1):
        spent = _seconds(subjects[i], batch, round_, clock)
        if round_ >= warmup:
            seconds[i].append(spent)
        if progress is not None:
            progress(done, len(turns))
    device = subjects[0].method.device
    return {
        "version": __version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "batch": batch,
        "repeats": repeats,
        "warmup": warmup,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "rows": [_row(subject, batch, times, seconds[0]) for subject, times in zip(subjects, seconds, strict=True)],
    }


def _row(subject: Subject, batch: int, seconds: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    ratios, median = [other / own for own, other in zip(seconds, others, strict=True)], statistics.median(seconds)
    config, sampler, token_len = subject.config, subject.config.sampler, subject.config.data.token_len
    figures = paper_figures(config.preset, subject.method.title)
    return {
        "name": subject.name,
        "title": subject.method.title,
        "preset": config.preset,
        "origin": subject.origin,
        "sampler": to_dict(sampler),
        "sampler_label": sampler.label(),
        "evaluations": sampler.evaluations(token_len),
        "token_len": token_len,
        "seconds": seconds,
        "texts_per_second": batch / median,
        "tokens_per_second": batch * token_len / median,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "paper_speed": figures.get("speed_kv_cache" if getattr(sampler, "kv_cache", False) else "speed"),
    }


@torch.no_grad()
def _seconds(subject: Subject, batch: int, round_: int, clock: Callable[[], float]) -> float:
    """Time one batch from noise to token ids; drawing the noise is included, as in generation."""
    device = subject.method.device
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None  # a GPU is asynchronous
    noise = RowNoise(0, range(round_ * batch, (round_ + 1) * batch), 0, device)
    wait()
    began = clock()
    sample(subject.method, subject.config.sampler, noise, source=subject.source)
    wait()
    return clock() - began


def throughput_table(result: dict[str, Any]) -> Table:
    """Return a row for each subject."""
    head = (
        f"{result['dtype']}, batch {result['batch']}, median of {result['repeats']} on {result['device']}; "
        "model loading and detokenization excluded."
    )
    ratios, paper = (Column("ratio", 2), Column("range of ratios", 2)), "paper (AR without KV cache = 1)"
    columns = ("model", "sampler", "evaluations", "texts/s", "tokens/s", *ratios, paper)
    keys = ("name", "sampler_label", "evaluations", "texts_per_second", "tokens_per_second", "ratio")
    rows = ([*(row[key] for key in keys), tuple(row["ratio_range"]), row["paper_speed"]] for row in result["rows"])
    return Table.of(head, columns, rows)
