"""Draws `RUN/metrics.png` from `metrics.jsonl`: a small panel for each measure."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogFormatter, MaxNLocator

from jpeg_dlm.errors import DataError
from jpeg_dlm.results.pictures import BAD_COLOR, GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, png_bytes
from jpeg_dlm.training.metrics import DIAGNOSIS, HELDOUT, read_metrics
from jpeg_dlm.training.record import write_recorded

LR = "lr_"
TRAIN_COLOR, HELDOUT_COLOR = GENERATED_COLOR, REAL_COLOR
PANEL_SIZE = (4.1, 2.7)  # inches; four fit a wide screen at 110 dots per inch
LOG_RANGE = 30.0  # a panel whose values span more than this factor gets a logarithmic axis
# Titles and units of measures that are not losses; any measure without an entry is a loss term.
SPEED = {"grad_norm": ("gradient norm", "L2 norm"), "rows_per_s": ("speed", "rows per second")}
SHARE = "accuracy"  # between 0 and 1, so always on a linear axis
LATENT = {
    "latent_rank": "effective rank / D",
    "latent_isotropy": "isotropy",
    "latent_std_min": "least channel std",
    "latent_text": "variance due to text",
    "latent_sigreg": "SIGReg distance",
}
DECODE = "decode_t"  # followed by the share of clean latent in the mixture
HIDDEN = ("step", "elapsed_s")


Points = list[tuple[int, float]]  # steps and values of a measure


def plot_metrics(run: Path) -> Path:
    """Draw `RUN/metrics.png` and return its path."""
    with collected():
        return _draw_run(run)


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Free the objects made within the block: figures have reference cycles, and training rarely triggers a collection.

    Objects made while collection is off stay in the youngest generation, so collecting them costs almost nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.collect(0)


def _draw_run(run: Path) -> Path:
    series = _collect(read_metrics(run / "metrics.jsonl"))
    if not series:
        raise DataError(f"'{run / 'metrics.jsonl'}' holds no measurements yet: train for some steps first.")
    panels = _panels(list(series))
    columns = min(4, len(panels)) if len(panels) != 4 else 2
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(PANEL_SIZE[0] * columns, PANEL_SIZE[1] * rows + 0.5), facecolor="white")
    _set_margins(figure, rows, columns)
    FigureCanvasAgg(figure)
    figure.suptitle(run.resolve().name, fontsize=12, color=INK, fontweight="bold")
    steps = [step for points in series.values() for step, _ in points]
    for i, (title, unit, names) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        _draw_panel(axes, {name: series[name] for name in names})
        lowest = i + columns >= len(panels)
        dress(axes, title, unit, "optimizer step" if lowest else "")
        _scale(axes, min(steps), max(steps))
    write_recorded(run, "metrics.png", png_bytes(figure))
    return run / "metrics.png"


def _set_margins(figure: Figure, rows: int, columns: int) -> None:
    """Set fixed margins in inches: a layout engine would draw everything twice (measured: half the time)."""
    width, height = figure.get_size_inches()
    left, bottom, between_x, between_y = 0.75, 0.55, 0.95, 0.75
    figure.subplots_adjust(
        left=left / width, right=1 - 0.2 / width, bottom=bottom / height, top=1 - 0.7 / height,
        wspace=between_x / ((width - left - 0.2 - (columns - 1) * between_x) / columns),
        hspace=between_y / ((height - bottom - 0.7 - (rows - 1) * between_y) / rows),
    )  # fmt: skip


def _collect(rows: Sequence[dict[str, Any]]) -> dict[str, Points]:
    """Collect the points of each numeric measure, in order of first appearance."""
    series: dict[str, Points] = {}
    for row in rows:
        for name, value in row.items():
            shown = name not in HIDDEN and not name.startswith(DIAGNOSIS)
            if shown and isinstance(value, (int, float)) and not isinstance(value, bool):
                series.setdefault(name, []).append((row["step"], float(value)))
    return series


def _panels(names: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Return (title, unit, measures) of each panel: total loss, loss terms (train and held out), then the rest."""
    rates = [name for name in names if name.startswith(LR)]
    latent, decode = [name for name in LATENT if name in names], [name for name in names if name.startswith(DECODE)]
    terms: dict[str, list[str]] = {}
    for name in names:
        if name not in (*rates, *latent, *decode, *SPEED):
            terms.setdefault(name.removeprefix(HELDOUT), []).append(name)
    panels = [
        ("total loss" if term == "loss" else term, "share of tokens" if term == SHARE else "loss", members)
        for term, members in terms.items()
    ]
    panels.sort(key=lambda panel: panel[0] != "total loss")
    panels += [("latent geometry", "N(0, I): 1, distance 0", latent)] if latent else []
    panels += [("decoding noisy latents", "share of tokens", decode)] if decode else []
    panels += [(*SPEED[name], [name]) for name in SPEED if name in names]
    return panels + ([("learning rates", "learning rate", rates)] if rates else [])


def _label(name: str) -> str | None:
    """Return the legend label of a measure in a shared panel, or None if it has its own panel."""
    if name.startswith(DECODE):
        return f"t = {name.removeprefix(DECODE)}"
    return name.removeprefix(LR) if name.startswith(LR) else LATENT.get(name)


def _draw_panel(axes: Axes, series: Mapping[str, Points]) -> None:
    linear = all(_label(name) or name.removeprefix(HELDOUT) == SHARE for name in series)
    for i, (name, points) in enumerate(series.items()):
        x, y = np.array(sorted(points, key=lambda point: point[0])).T
        bad = ~np.isfinite(y)
        if label := _label(name):
            marks = "-" if name.startswith(LR) else "o-"  # evaluations are few
            axes.plot(x, y, marks, color=LINE_COLORS[i % len(LINE_COLORS)], ms=3.5, lw=1.4, label=label)
        elif name.startswith(HELDOUT):
            axes.plot(x, y, "o-", color=HELDOUT_COLOR, ms=3.5, lw=1.0, label="held out", zorder=4)
        else:
            _draw_train(axes, x, y)
        if bad.any():
            full_height = axes.get_xaxis_transform()
            axes.vlines(x[bad], 0, 1, transform=full_height, color=BAD_COLOR, lw=1.0, alpha=0.7, label="not finite")
    finite = np.array([value for points in series.values() for _, value in points])
    finite = finite[np.isfinite(finite)]
    if not linear and len(finite) and finite.min() > 0 and finite.max() > LOG_RANGE * finite.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # plain text: formulas are slow to set
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    if axes.get_legend_handles_labels()[1] not in ([], ["train"]):
        axes.legend(fontsize=7.5, frameon=False, handlelength=1.4, labelcolor=INK)


def _draw_train(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Draw the values faintly and their moving average over a fiftieth of the run clearly."""
    reach = len(y) // 100
    if reach == 0:
        axes.plot(x, y, ".-", color=TRAIN_COLOR, lw=1.4, ms=3.5, label="train")
        return
    axes.plot(x, y, color=TRAIN_COLOR, lw=0.7, alpha=0.28)
    axes.plot(x, _smooth(y, reach), color=TRAIN_COLOR, lw=1.7, label="train", zorder=3)


def _smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Return the mean of the finite values up to `reach` places to either side; being centered, it does not lag."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(len(values))
    # Near an end both sides shrink equally, or the mean would be biased toward the middle of the run; the last few points,
    # which would hardly be smoothed, are left out.
    half = np.minimum(np.minimum(place, len(values) - 1 - place), reach)
    low, high = place - half, place + half + 1
    number = count[high] - count[low]
    return np.where((number > 0) & (half >= reach // 2), (total[high] - total[low]) / np.maximum(number, 1), np.nan)


def _scale(axes: Axes, first: int, last: int) -> None:
    if last > first:
        pad = 0.02 * (last - first)
        axes.set_xlim(first - pad, last + pad)  # one span for all panels, so that they can be compared by eye
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(which="minor", labelsize=8, colors=INK, length=3)
    if axes.get_yscale() == "linear":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
        axes.yaxis.get_offset_text().set_fontsize(8)
