"""Decodability (beyond the paper): share of tokens recovered from clean latents mixed with noise, t z + (1 - t) eps.

Shapes: S rows, T times, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from jpeg_dlm.evaluation.noisy_tokens import break_point, real_tokens, right_tokens
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.flow.path import interpolate, per_sample
from jpeg_dlm.methods.base import LatentView
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import Table
from jpeg_dlm.rng import RowNoise, derive_seed
from jpeg_dlm.studies.latents import (
    about,
    batches_of,
    check_sources,
    heldout_of,
    identity,
    label,
    linear_ratio,
    view_of,
)
from jpeg_dlm.studies.study import Asked, StudyOutcome

TIMES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
RESAMPLES = 1000  # (assumed)
DIRECT, BRANCH, PREDICTED = "decoded directly", "through the decode branch", "after one prediction"


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Measure every model with each of its ways of decoding."""
    check_sources(sources, rows=1)
    rows = [about(source) | _decoded(source, asked) for source in sources]
    result = {
        "study": "decodability", "times": list(TIMES), "seeds": list(asked.seeds), "resamples": RESAMPLES, "rows": rows,
    }  # fmt: skip
    return StudyOutcome(result, [table(result)], lambda path: draw(result, path))


def ways_of(view: LatentView) -> dict[str, Callable[[Tensor, Tensor, float], Tensor]]:
    """Return each way of decoding as a function from latents z, noise eps and time t > 0 to tokens."""

    def mixed(z: Tensor, eps: Tensor, t: float) -> Tensor:
        return interpolate(z, eps, per_sample(t, z))

    def predicted(z: Tensor, eps: Tensor, t: float) -> Tensor:
        ratio = linear_ratio(t)
        return view.decode(view.predict(view.noisy(z, eps, ratio), ratio))

    ways = {DIRECT: lambda z, eps, t: view.decode(mixed(z, eps, t))}
    if branch := view.branch:
        ways[BRANCH] = lambda z, eps, t: view.decode(branch(mixed(z, eps, t)))
    return ways | {PREDICTED: predicted}


@torch.no_grad()
def count_right(source: ModelSource, asked: Asked) -> dict[str, Any]:
    """Count correct tokens of each row at each time for each way, over all noise seeds, and the real tokens of each row."""
    ways = ways_of(view := view_of(source.model.complete_method()))
    rows = range(min(asked.n, len(heldout_of(source))))
    right: dict[str, list[list[int]]] = {way: [[] for _ in TIMES] for way in ways}
    real: list[int] = []
    with asked.console.progress(f"{source.name}: decoding noisy latents", "rows") as progress:
        for places, batch in batches_of(source, rows):
            z = view.encode(batch)
            real += (len(asked.seeds) * real_tokens(batch)).tolist()
            noises = [RowNoise(s, places, 0, z.device).normal("decodability", *z.shape[1:]) for s in asked.seeds]
            for way, tokens_of in ways.items():
                for counts, t in zip(right[way], TIMES, strict=True):
                    found = [right_tokens(tokens_of(z, eps, t), batch) for eps in noises]
                    counts += torch.stack(found).sum(0).tolist()
            progress(places.stop, len(rows))
    return {"right": right, "real": real}


def _decoded(source: ModelSource, asked: Asked) -> dict[str, Any]:
    depends = identity(source) | {"kind": "decodability", "n": asked.n, "seeds": asked.seeds, "times": TIMES}
    found = asked.parts.get_or_make(f"decodability-{source.name}", depends, lambda: count_right(source, asked))
    real = np.array(found["real"])
    return {"texts": len(real), "ways": {way: curve(np.array(right), real) for way, right in found["right"].items()}}


def curve(right_TS: np.ndarray, real_S: np.ndarray, times: Sequence[float] = TIMES) -> dict[str, Any]:
    """Return shares of correct tokens and the break point, with 95% bootstrap intervals over rows."""
    share_T = right_TS.sum(1) / real_S.sum()
    random = np.random.default_rng(derive_seed(0, "bootstrap"))
    counts_RS = random.multinomial(len(real_S), [1 / len(real_S)] * len(real_S), size=RESAMPLES)
    share_RT = (counts_RS @ right_TS.T) / (counts_RS @ real_S)[:, None]
    low_T, high_T = np.quantile(share_RT, [0.025, 0.975], axis=0)
    broken = [t for t in (break_point(times, row) for row in share_RT.tolist()) if t is not None]
    enough = len(broken) >= RESAMPLES / 2
    low, high = np.quantile(broken, [0.025, 0.975]).tolist() if enough else (None, None)
    return {
        "share": share_T.tolist(), "low": low_T.tolist(), "high": high_T.tolist(),
        "break": break_point(times, share_T.tolist()), "break_low": low, "break_high": high,
    }  # fmt: skip


def table(result: Mapping[str, Any]) -> Table:
    """Return a table with a row per model and way: the break point, then the share at each time."""
    heading = ("model", "way", "breaks at t", "95% interval", *(f"t = {t:g}" for t in result["times"]))
    rows = [
        [label(row), way, *_break_cells(found), *(f"{100 * share:.1f}%" for share in found["share"])]
        for row in result["rows"]
        for way, found in row["ways"].items()
    ]
    texts = ", ".join(sorted({str(row["texts"]) for row in result["rows"]}))
    head = (
        f"Share of held-out tokens ({texts} rows) that come back from clean latents mixed with noise, t z + (1 - t) eps; "
        "decoding breaks at the t below which less than half of the clean share is right."
    )
    return Table.of(head, heading, rows)


def _break_cells(found: Mapping[str, Any]) -> list[str]:
    interval = "" if found["break_low"] is None else f"{found['break_low']:.3f} to {found['break_high']:.3f}"
    return ["never" if found["break"] is None else f"{found['break']:.3f}", interval]


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw a panel per way, and one of break points against the rate if the models differ in it."""
    rows = result["rows"]
    ways = [way for way in (DIRECT, BRANCH, PREDICTED) if any(way in row["ways"] for row in rows)]
    against_rate = len({row["rate"] for row in rows}) > 1
    figure, panels = new_figure(len(ways) + against_rate, "tokens that come back from noisy latents")
    for axes, way in zip(panels, ways, strict=False):
        for i, row in enumerate(rows):
            if way in row["ways"]:
                _draw_curve(axes, result["times"], row["ways"][way], LINE_COLORS[i % len(LINE_COLORS)], label(row))
        dress(axes, way, "right tokens (%)", "t of the linear path (1 is clean)")
        axes.set_ylim(0, 103)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if against_rate:
        _draw_breaks(panels[-1], rows, ways)
    return save_png(figure, path)


def _draw_curve(axes: Axes, times: Sequence[float], found: Mapping[str, Any], color: str, name: str) -> None:
    share, low, high = (100 * np.array(found[key]) for key in ("share", "low", "high"))
    bars = np.maximum(0.0, [share - low, high - share])
    axes.errorbar(times, share, bars, fmt="o-", ms=3, lw=1.3, capsize=2, color=color, label=name)
    if found["break"] is not None:
        axes.axvline(found["break"], color=color, ls=":", lw=1.0)


def _draw_breaks(axes: Axes, rows: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> None:
    titles = sorted({row["title"] for row in rows})
    for way, color in zip(ways, LINE_COLORS, strict=False):
        for title, style in zip(titles, ("o-", "s--", "D:"), strict=False):
            found = [(row["rate"], row["ways"][way]) for row in rows if row["title"] == title and way in row["ways"]]
            found = sorted((one for one in found if None not in (one[1]["break"], one[1]["break_low"])), key=lambda one: one[0])
            if found:
                y, low, high = (np.array([f[key] for _, f in found]) for key in ("break", "break_low", "break_high"))
                bars = np.maximum(0.0, [y - low, high - y])
                name = f"{title}, {way.split()[-1]}"  # the full name would not fit
                axes.errorbar([rate for rate, _ in found], y, bars, fmt=style, ms=4, lw=1.3, capsize=2, color=color, label=name)
    dress(axes, "where decoding breaks (lower is sturdier)", "t of the break", "rate r = N / L")
    axes.set_ylim(0, 1)
    if axes.has_data():
        axes.legend(fontsize=7, frameon=False, labelcolor=INK, loc="upper center", ncols=2)
