"""A picture of systems and controls: Gen-PPL against what it does not see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from jpeg_dlm.evaluation.plots import scale_log
from jpeg_dlm.util.pictures import GENERATED_COLOR, INK, REAL_COLOR, dress, new_figure, save_png

KINDS = {"system": (GENERATED_COLOR, "o"), "control without a model": (REAL_COLOR, "s"), "real and shuffled text": (INK, "D")}
PANELS = {"mauve_42": "MAUVE", "memorized": "share of 4-grams that the training text has"}


def draw_controls(result: Mapping[str, Any], path: Path) -> Path:
    """Draw a point for each row of the distances; controls that beat all systems in Gen-PPL lie left of these."""
    entries = {entry.label: entry for entry in result["entries"]}
    stats = next(iter(entries.values())).stats
    figure, panels = new_figure(len(PANELS), "fluent text that is all alike, or copied")
    for axes, (measure, title) in zip(panels, PANELS.items(), strict=True):
        points: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in KINDS}
        for row in result["distances"]["rows"]:
            if row.get(measure) is None:
                continue
            entry = entries.get(row["text"])
            kind = "real and shuffled text" if entry is None else "system" if entry.model else "control without a model"
            floor = stats["shuffled" if "shuffled" in row["text"] else "real"].gen_ppl
            name = row["text"].removeprefix("control: ").removesuffix(" against other real text")
            points[kind][name] = (entry.measures["gen_ppl"]["mean"] if entry else floor, row[measure])
        for kind, (color, marker) in KINDS.items():
            if of_kind := points[kind]:
                axes.scatter(*zip(*of_kind.values(), strict=True), s=26, color=color, marker=marker, label=kind, zorder=3)
        scale_log(axes, "x", (1, 2, 5))
        axes.margins(x=0.35, y=0.1)
        dress(axes, title, "", f"Gen-PPL ({result['scorer']})")
        _name_points(axes, {name: place for of_kind in points.values() for name, place in of_kind.items()})
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.set_size_inches(13, 6)
    return save_png(figure, path)


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write names to the right of points, from the top down; those of points that are near each other are a list."""
    low, high = axes.get_ylim()
    line, last = 0.035 * (high - low), {}
    for name, (x, y) in sorted(points.items(), key=lambda point: -point[1][1]):
        near = [a for a, b in points.values() if max(a, x) < 4 * min(a, x) and abs(b - y) < 4 * line]
        place = 1.15 * max(near)
        above = [top for other, top in last.items() if max(other, place) < 8 * min(other, place)]
        last[place] = top = min([y, *(top - line for top in above)])
        leader = {"arrowstyle": "-", "color": INK, "lw": 0.4, "shrinkA": 1, "relpos": (0, 0.5)}
        axes.annotate(name, (x, y), (place, top), fontsize=7, color=INK, va="center", arrowprops=leader)
