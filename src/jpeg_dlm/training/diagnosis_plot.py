"""Draws `RUN/diagnosis.png`: the measures of the denoiser and the samples over the evaluations of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, png_bytes
from jpeg_dlm.training.metrics import DIAGNOSIS, read_metrics
from jpeg_dlm.training.plots import collected
from jpeg_dlm.training.record import write_recorded

Values = Mapping[str, float]
DECISIVE = (0.2, 0.3, 0.4, 0.5)  # times at which the text is determined
AGES = ("#a0aec0", "#4299e1", "#1a365d")  # first, middle and last evaluation


def diagnoses(path: Path) -> dict[int, dict[str, float]]:
    """Read the measures of each evaluation from a `metrics.jsonl`, by step and without their common prefix."""
    rows = {row["step"]: row for row in read_metrics(path) if f"{DIAGNOSIS}trigram" in row}
    return {
        step: {name.removeprefix(DIAGNOSIS): value for name, value in row.items() if name.startswith(DIAGNOSIS)}
        for step, row in rows.items()
    }


def plot_diagnosis(run: Path) -> Path | None:
    """Draw the picture of a run and return its path, or None if the run has no diagnosis."""
    found = diagnoses(run / "metrics.jsonl")
    if not found:
        return None
    with collected():
        write_recorded(run, "diagnosis.png", png_bytes(_drawn(found, run.resolve().name)))
    return run / "diagnosis.png"


def _drawn(found: Mapping[int, Values], name: str) -> Figure:
    latents = any("rank" in values for values in found.values())
    figure, panels = new_figure(6 if latents else 2, f"{name}: denoiser and samples", columns=3)
    if latents:
        _of_latents(panels, found)
    trigram, words = panels[-2:]
    draw_over_steps(trigram, found, {"trigram": "samples"})
    for key, style in (("trigram_real", "--"), ("trigram_shuffled", ":")):
        draw_level(trigram, list(found.values())[-1].get(key), style, key.removeprefix("trigram_"))
    dress(trigram, "trigram perplexity", "perplexity (real text is best)", "optimizer step")
    readable_log(trigram)
    shares = {"words": "words that exist", "distinct": "different pairs of words", "copied": "copied from training"}
    draw_over_steps(words, found, shares)
    dress(words, "words of samples", "share", "optimizer step")
    words.set_ylim(-0.03, 1.03)
    for axes in panels:
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return figure


def _of_latents(panels: Sequence[Axes], found: Mapping[int, Values]) -> None:
    ratio, over_steps, accuracy, rank = panels[:4]
    steps = sorted(found)
    chosen = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    for step, color in zip(chosen, AGES[-len(chosen) :], strict=True):
        draw_over_times(ratio, found[step], "ratio", color, f"step {step:,}")
        draw_over_times(accuracy, found[step], "accuracy", color, f"step {step:,}")
    dress(ratio, "one prediction against the best linear one", "error / linear error", "t (1 is clean)")
    draw_over_steps(over_steps, found, {f"ratio_{t:g}": f"t = {t:g}" for t in DECISIVE})
    dress(over_steps, "where text is decided", "error / linear error", "optimizer step")
    for axes in (ratio, over_steps):
        draw_level(axes, 1.0, "--", "no better than a matrix")
        readable_log(axes)
    dress(accuracy, "tokens of the decoded prediction", "share that is right", "t (1 is clean)")
    accuracy.set_ylim(-0.03, 1.03)
    draw_over_steps(rank, found, {"rank": "of a vector", "rank_joint": "of a whole text"})
    dress(rank, "effective rank of the latents", "directions", "optimizer step")
    rank.set_ylim(bottom=0)


def draw_over_times(axes: Axes, values: Values, name: str, color: str, label: str) -> None:
    """Plot one measure against t."""
    points = sorted((float(key.rpartition("_")[2]), y) for key, y in values.items() if key.startswith(f"{name}_0"))
    axes.plot([t for t, _ in points], [y for _, y in points], "o-", color=color, ms=3.5, lw=1.5, label=label)


def draw_over_steps(
    axes: Axes, found: Mapping[int, Values], names: Mapping[str, str], colors: Sequence[str] = LINE_COLORS
) -> None:
    """Plot measures against the optimizer step."""
    for (name, label), color in zip(names.items(), colors, strict=False):
        points = [(step, values[name]) for step, values in sorted(found.items()) if name in values]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, ms=3.5, lw=1.5, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_level(axes: Axes, level: Any, style: str, label: str) -> None:
    """Draw a horizontal reference line, if its level is known."""
    if level is not None:
        axes.axhline(level, color=INK, ls=style, lw=1.0, label=label)


def readable_log(axes: Axes) -> None:
    """Set a logarithmic axis with several plain tick labels, even over a short range."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high > 20 * low else (0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
