"""Pictures of studies that train: a panel for each measure, over variants, the rate, the width, speed or training tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from jpeg_dlm.studies.verdicts import Record, at_end, by_variant, over_trainings
from jpeg_dlm.util.pictures import LINE_COLORS, REAL_COLOR, dress, new_figure, save_png

MARKERS = "os^DvPX*<>"  # beside colors, for readers who cannot tell these apart
WIDE = 5.0  # a perplexity that varies by more than this factor is shown on a logarithmic axis
AXES = {
    "": "",
    "rate": "compression rate r (latents per token)",
    "width": "width of a latent, d",
    "speed": "texts per second",
    "tokens": "million tokens",
}
LEVELS = {"real": ("--", REAL_COLOR), "words": (":", "#718096")}  # baselines that are drawn as lines

Result = Mapping[str, Any]
Line = list[tuple[float, Sequence[Record]]]  # places on the axis, and the records there


def draw_study(result: Result, x: str, path: Path) -> Path | None:
    """Draw the last budget of a study over `x`, or with '' its variants side by side; None if nothing can be drawn."""
    speeds = {row["name"]: row["texts_per_second"] for row in result.get("speed", {"rows": []})["rows"]}
    lines: dict[str, Line] = {}
    for i, (label, group) in enumerate(at_end(result["records"]).items()):
        place = i if not x else speeds.get(label) if x == "speed" else group[0][x]
        if place is not None:
            lines.setdefault(group[0]["system"], []).append((place, group))
    return _draw(result, {name: sorted(line, key=lambda p: p[0]) for name, line in lines.items()}, x, path)


def draw_curves(result: Result, path: Path) -> Path | None:
    """Draw quality against training tokens; None if there is only one budget."""
    lines: dict[str, Line] = {}
    for (label, _), group in by_variant(result["records"]).items():
        lines.setdefault(label, []).append((group[0]["tokens"] / 1e6, group))
    return _draw(result, {label: line for label, line in lines.items() if len(line) > 1}, "tokens", path)


def scale_log(axes: Axes, side: Literal["x", "y"], subs: Sequence[float]) -> None:
    """Make an axis logarithmic, with plain numbers at these multiples of powers of ten."""
    axis = axes.xaxis if side == "x" else axes.yaxis
    axes.set(**{f"{side}scale": "log"})
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_locator(NullLocator())


def _draw(result: Result, lines: Mapping[str, Line], x: str, path: Path) -> Path | None:
    """Draw a panel for each measure that every point has; each system is a line over `x`, or dots if `x` is ''."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return None
    names = {"gen_ppl": f"Gen-PPL ({result['scorer']})", "entropy": "entropy (nats)", "mauve": "MAUVE"}
    names = {key: text for key, text in names.items() if all(over_trainings(group, key) for _, group in points)}
    budget = result["budgets"][-1]["text"] if result["budgets"] else "its own steps"
    figure, panels = new_figure(len(names), f"{result['title']} (preset {result['preset']}, {budget} each)")
    for axes, (key, name) in zip(panels, names.items(), strict=True):
        means = []
        for i, (label, line) in enumerate(lines.items()):
            values = [m for _, group in line if (m := over_trainings(group, key))]
            means += [m["mean"] for m in values]
            fmt = MARKERS[i % len(MARKERS)] + ("-" if x and len(line) > 1 else "")
            look = {"fmt": fmt, "ms": 6, "capsize": 3, "lw": 1.3, "color": LINE_COLORS[i % len(LINE_COLORS)], "label": label}
            axes.errorbar([p for p, _ in line], [m["mean"] for m in values], [m["sd"] or 0.0 for m in values], **look)
        for baseline in result["baselines"]:
            if baseline["kind"] in LEVELS and key in baseline and (baseline["kind"] == "real" or key == "mauve"):
                style, color = LEVELS[baseline["kind"]]
                axes.axhline(baseline[key], color=color, ls=style, lw=1.2, label=baseline["label"])
        dress(axes, name, "", AXES[x])
        _set_ticks(axes, x, points)
        axes.margins(x=0.12, y=0.15)
        if key == "gen_ppl" and max(means) > WIDE * min(means):
            scale_log(axes, "y", (1, 2, 5) if max(means) < 300 * min(means) else (1,))  # further apart there is little room
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8, frameon=False)
    return save_png(figure, path)


def _set_ticks(axes: Axes, x: str, points: Line) -> None:
    """Mark every place by its number, or by the name of the variant there."""
    if not x:
        names = [group[0]["label"] for _, group in points]
        axes.set_xticks([place for place, _ in points], names, rotation=30, ha="right")
        return
    scale_log(axes, "x", (1, 2, 5))
    if x != "speed":  # systems of like speed would have ticks upon each other
        ticks = sorted({place for place, _ in points})
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
