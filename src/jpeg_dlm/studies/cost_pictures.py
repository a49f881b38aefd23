"""Pictures of the cost of a text as the rate falls and as texts grow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from jpeg_dlm.evaluation.paper import OWN
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.studies.cost_points import FULL, SYSTEMS

COLORS = dict(zip(SYSTEMS, LINE_COLORS, strict=False))
STYLES = {FULL: "--"}  # where it needs the same as another system both lines are seen


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Lines are counted, points are measured."""
    measured = bool(result["repeats"])
    points = "lines are counted, points measured" if measured else "counted"
    figure, panels = new_figure(3 + measured, f"cost of one text, {result['preset']}: {points}")
    _draw_rates(panels[0], result)
    _draw_lengths(panels[1], result, lambda row: row["macs"] / 1e12, None)
    dress(panels[1], f"operations as texts grow, r = {result['rate']:g}", "multiply-accumulates (T)", "tokens L")
    _draw_lengths(
        panels[2], result, lambda row: (row["memory"]["activations"] + row["memory"]["kv_cache"]) / 1e9,
        lambda found: found["peak_bytes"] / result["batch"] / 1e9,
    )  # fmt: skip
    dress(panels[2], "memory beyond the weights", "GB for each text", "tokens L")
    if measured:
        speed = typical_speed(result)
        seconds = (lambda row: row["macs"] / speed) if speed else None
        _draw_lengths(panels[3], result, seconds, lambda found: found["seconds"] / result["batch"])
        dress(panels[3], f"time, lines at {speed / 1e9:.3g} G operations a second", "seconds for each text", "tokens L")
    panels[1].legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)


def typical_speed(result: Mapping[str, Any]) -> float:
    """Median operations a second over all measured points; 0 without any."""
    rows = [row for row in result["by_rate"] + result["by_length"] if "seconds" in row.get("measured", {})]
    return statistics.median([row["macs"] * result["batch"] / row["measured"]["seconds"] for row in rows] or [0.0])


def _draw_rates(axes: Axes, result: Mapping[str, Any]) -> None:
    rows = sorted(result["by_rate"], key=lambda row: row["rate"])
    axes.plot([row["rate"] for row in rows], [row["macs"] / 1e12 for row in rows], ".-", color=COLORS[OWN], label=OWN)
    stated = [row for row in rows if row["paper_macs_T"]]
    if stated:
        axes.plot([row["rate"] for row in stated], [row["paper_macs_T"] for row in stated], "x", color=INK, ms=8, label="paper")
    full = next((r for r in result["by_length"] if (r["system"], r["token_len"]) == (FULL, result["token_len"])), None)
    if full:
        axes.axhline(full["macs"] / 1e12, color=COLORS[FULL], ls="--", lw=1.2, label=FULL)
    dress(axes, f"operations as r falls, L = {result['token_len']:,}", "multiply-accumulates (T)", "rate r")
    _log_scales(axes, [row["rate"] for row in rows])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # the span is too short for powers of ten alone
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)


def _draw_lengths(
    axes: Axes,
    result: Mapping[str, Any],
    line: Callable[[Mapping[str, Any]], float] | None,
    point: Callable[[Mapping[str, Any]], float] | None,
) -> None:
    lengths = sorted({row["token_len"] for row in result["by_length"]})
    for system in SYSTEMS:
        rows = sorted((r for r in result["by_length"] if r["system"] == system), key=lambda row: row["token_len"])
        if line is not None:
            lengths_of = [r["token_len"] for r in rows]
            axes.plot(lengths_of, [line(r) for r in rows], STYLES.get(system, "-"), lw=1.5, color=COLORS[system], label=system)
        tried = [r for r in rows if "seconds" in r.get("measured", {})] if point is not None else []
        if point is not None and tried:
            values = [point(r["measured"]) for r in tried]
            axes.plot([r["token_len"] for r in tried], values, "o", ms=4.5, color=COLORS[system])
    _log_scales(axes, lengths)


def _log_scales(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
