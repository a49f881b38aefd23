"""Pictures of a comparison: quality against speed, and quality against training tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.studies.compare import ScoredPoint
from jpeg_dlm.studies.compare_report import scored_rows

MARKERS = "os^DvPX*<>"  # beside colors, for readers who cannot tell these apart
LEVELS = {"real": ("--", "real text"), "words": (":", "words shuffled"), "unigram": ("-.", "tokens by frequency")}


def draw_comparison(result: Mapping[str, Any], path: Path) -> Path | None:
    """Draw quality against throughput at the largest budget; None if nothing can be drawn."""
    speeds = {row["name"]: row["texts_per_second"] for row in result["speed"]["rows"]}
    shown = [row for row in scored_rows(result) if row["title"] in speeds]
    points = [(row["title"], [speeds[row["title"]]], [row["points"][-1]]) for row in shown]
    return _draw(result, points, "quality against speed, equal training budget", "texts per second", path)


def draw_curves(result: Mapping[str, Any], path: Path) -> Path | None:
    """Draw quality against training tokens; None if there is only one budget."""
    shown = [row for row in scored_rows(result) if len(row["points"]) > 1]
    points = [(row["title"], [p.tokens_seen / 1e6 for p in row["points"]], row["points"]) for row in shown]
    return _draw(result, points, "quality against training", "million tokens", path)


def _draw(
    result: Mapping[str, Any], lines: list[tuple[str, list[float], list[ScoredPoint]]], heading: str, x: str, path: Path
) -> Path | None:
    if not lines:
        return None
    names = {
        "gen_ppl": f"Gen-PPL ({result['scorer']})", "entropy": "entropy (nats)", "mauve": "MAUVE", "words": "words that exist",
    }  # fmt: skip
    taken = [point.scores.measures for _, _, points in lines for point in points]
    names = {key: text for key, text in names.items() if all(key in measures for measures in taken)}
    figure, panels = new_figure(len(names), heading, columns=2)
    for axes, (key, text) in zip(panels, names.items(), strict=True):
        for i, (title, places, points) in enumerate(lines):
            measures = [point.scores.measures[key] for point in points]
            axes.errorbar(
                places, [m["mean"] for m in measures], [m["sd"] or 0.0 for m in measures],
                fmt=MARKERS[i % len(MARKERS)] + ("-" if len(places) > 1 else ""), ms=6, lw=1.2, capsize=3,
                color=LINE_COLORS[i % len(LINE_COLORS)], label=title,
            )  # fmt: skip
        for kind, (style, label) in LEVELS.items():
            level = result["anchors"].get(kind, {}).get(key)
            if level:
                axes.axhline(level["mean"], color=INK, ls=style, lw=1.0, label=label)
        dress(axes, text, text, x)
        _log_places(axes)
        if key == "gen_ppl":
            axes.set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return save_png(figure, path)


def _log_places(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.25, y=0.15)
