"""Draws `RUN/metrics.png` from `metrics.jsonl`: a small panel for each measure."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from jpeg_dlm.training.metrics import HELDOUT, read_metrics
from jpeg_dlm.util.pictures import GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, new_figure, save_png

COLUMNS = 4
LOG_RANGE = 30.0  # a loss whose values span more than this factor gets a logarithmic axis
# Measures that share a panel, by the prefix of their names: its title and the label of its axis.
TOGETHER = {
    "latent_": ("latent geometry", "N(0, I): 1, distance 0"),
    "decode_": ("decoding noisy latents", "share of tokens"),
    "lr_": ("learning rates", "learning rate"),
}
UNITS = {"accuracy": "share of tokens", "grad_norm": "L2 norm", "rows_per_s": "rows per second"}  # of others than losses

Series = dict[str, list[tuple[int, float]]]  # steps and values of each measure


def plot_metrics(run: Path) -> Path | None:
    """Draw `RUN/metrics.png` and return its path, or None if nothing was measured yet."""
    path = run / "metrics.jsonl"
    panels: dict[str, Series] = {}
    for row in read_metrics(path) if path.is_file() else []:
        for name in row.keys() - {"step"}:
            panel = next((prefix for prefix in TOGETHER if name.startswith(prefix)), name.removeprefix(HELDOUT))
            panels.setdefault(panel, {}).setdefault(name, []).append((row["step"], row[name]))
    if not panels:
        return None
    figure, axes = new_figure(len(panels), run.resolve().name, COLUMNS)
    ordered = sorted(panels, key=lambda panel: (panel != "loss", panel in UNITS, panel in TOGETHER, panel))
    for place, panel in zip(axes, ordered, strict=True):
        _draw(place, panels[panel], panel if panel in TOGETHER else "")
        dress(place, *TOGETHER.get(panel, (panel, UNITS.get(panel, "loss"))), "optimizer step")
        place.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        place.xaxis.set_major_formatter(EngFormatter(sep=""))
    picture = save_png(figure, run / "metrics.png")
    del figure, axes, place
    gc.collect()  # figures have reference cycles, and training rarely triggers a collection
    return picture


def _draw(axes: Axes, series: Series, prefix: str) -> None:
    """Draw the measures of a panel: those of a group by name, or one in training, smoothed, and on held-out text."""
    for i, (name, points) in enumerate(sorted(series.items())):
        x, y = np.array(points).T
        if prefix:
            axes.plot(x, y, "o-", color=LINE_COLORS[i % len(LINE_COLORS)], ms=2.5, lw=1.2, label=name.removeprefix(prefix))
        elif name.startswith(HELDOUT):
            axes.plot(x, y, "o-", color=REAL_COLOR, ms=3.5, lw=1.0, label="held out", zorder=4)
        else:
            reach = len(y) // 100  # of the centered mean to each side; it has a gap where a value is not finite
            smooth = np.convolve(y, np.full(2 * reach + 1, 1 / (2 * reach + 1)), mode="valid")
            axes.plot(x, y, color=GENERATED_COLOR, lw=0.7, alpha=0.3)
            axes.plot(x[reach : len(x) - reach], smooth, color=GENERATED_COLOR, lw=1.6, label="train", zorder=3)
            finite = y[np.isfinite(y)]
            if len(finite) and 0 < finite.min() * LOG_RANGE < finite.max():
                axes.set_yscale("log")
    if prefix or len(series) > 1:
        axes.legend(fontsize=7.5, frameon=False, handlelength=1.4, labelcolor=INK)
