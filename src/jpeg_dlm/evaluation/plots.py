"""Pictures of an evaluation: quality over cost or over what a study varies, lengths of texts, and controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from jpeg_dlm.evaluation.frontier import Curve
from jpeg_dlm.evaluation.results import MeanStd, SystemResult, of_models
from jpeg_dlm.util.pictures import GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, new_figure, save_png

MARKERS = "os^DvPX*<>"  # beside colors, for readers who cannot tell these apart
WIDE = 5.0  # a perplexity that varies by more than this factor is shown on a logarithmic axis

# Of the picture of controls: colors and markers, and what is drawn against Gen-PPL.
KINDS = {"system": (GENERATED_COLOR, "o"), "control without a model": (REAL_COLOR, "s"), "real and shuffled text": (INK, "D")}
PANELS = {"mauve_42": "MAUVE", "memorized": "share of 4-grams that the training text has"}

Line = Sequence[tuple[float, Mapping[str, MeanStd]]]  # places on the axis, and the measures there
Level = tuple[str, str, str, Mapping[str, float]]  # label, line style and color of values that are drawn as horizontal lines


def draw_lengths(lengths: Mapping[str, Mapping[str, Any]], scorer: str, path: Path) -> Path:
    """Draw, for each system, the share of texts per bin of length, generated and real; where both agree is the overlap."""
    figure, panels = new_figure(len(lengths), "lengths of generated and real texts", columns=3)
    for axes, (label, system) in zip(panels, lengths.items(), strict=True):
        sides = {key: system[key] for key in ("generated", "real")}
        ends = [min(side["shortest"] for side in sides.values()), *system["edges"]]
        ends.append(max(side["longest"] for side in sides.values()) + 1)
        for (key, side), color in zip(sides.items(), (GENERATED_COLOR, REAL_COLOR), strict=True):
            shares = [n / side["texts"] for n in side["histogram"]]
            axes.stairs(shares, ends, color=color, fill=True, alpha=0.45, label=f"{key}, median {side['median']:.0f}")
        overlap = f"overlap {system['overlap']:.0%}" if system["enough"] else "too few texts to compare"
        dress(axes, f"{label}: {overlap}", "share of texts", f"tokens of {scorer}")
        axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)


def draw_sweep(entries: Sequence[SystemResult], scorer: str, path: Path) -> Path:
    """Draw quality against network evaluations; each system and solver is a line, and real text is dashed."""
    lines: dict[str, list[tuple[float, Mapping[str, MeanStd]]]] = {}
    for entry, model in of_models(entries):
        name = ", ".join([entry.name, *filter(None, [model.sampler.get("solver")])])
        lines.setdefault(name, []).append((model.evaluations, entry.measures))
    real = vars(of_models(entries)[0][0].stats["real"])
    levels = [("real text", "--", INK, real)]
    return draw_quality("quality against cost", lines, levels, scorer, "network evaluations per text", path)


def draw_frontier(curves: Sequence[Curve], scorer: str, path: Path) -> Path:
    """Draw Gen-PPL and MAUVE against entropy with 95% intervals over texts; real text is a star, and its MAUVE is 1."""
    measures = {"gen_ppl": f"Gen-PPL ({scorer})", "mauve": "MAUVE"}
    measures = {key: text for key, text in measures.items() if all(getattr(curve, key) for curve in curves)}
    figure, panels = new_figure(len(measures), "frontiers: quality against entropy")
    for axes, (key, text) in zip(panels, measures.items(), strict=True):
        for i, curve in enumerate(curves):
            x, y = (np.array([getattr(point, name) for point in curve.points]).T for name in ("entropy", key))
            fmt, color = MARKERS[i % len(MARKERS)] + "-", LINE_COLORS[i % len(LINE_COLORS)]
            look = {"fmt": fmt, "ms": 5, "capsize": 2, "lw": 1.3, "elinewidth": 0.8, "color": color}
            label = f"{curve.name}, {curve.knob.replace('_', ' ')}" if curve.knob else curve.name
            # The estimate may lie outside of a percentile interval by rounding.
            yerr, xerr = ([np.maximum(0, z[0] - z[1]), np.maximum(0, z[2] - z[0])] for z in (y, x))
            axes.errorbar(x[0], y[0], yerr=yerr, xerr=xerr, label=label, **look)
            for end in {0, len(curve.points) - 1} if curve.knob else ():
                place = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": 7, "color": color}
                axes.annotate(str(curve.points[end].value), (x[0][end], y[0][end]), **place)
        for entropy, ppl in dict.fromkeys((curve.real_entropy, curve.real_gen_ppl) for curve in curves):
            axes.axvline(entropy, color=REAL_COLOR, ls="--", lw=0.9)
            axes.plot(entropy, ppl if key == "gen_ppl" else 1.0, "*", ms=11, color=REAL_COLOR, label="real text")
        dress(axes, text, "", "entropy (nats)")
        if key == "gen_ppl":
            scale_log(axes, "y", (1, 2, 5))
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8, frameon=False)
    return save_png(figure, path)


def draw_quality(
    heading: str,
    lines: Mapping[str, Line],
    levels: Iterable[Level],
    scorer: str,
    x: str,
    path: Path,
    names: Sequence[str] = (),
    ticks: bool = True,
) -> Path:
    """Draw a panel for each measure that every point has; each system is a line over `x`, or dots above `names`.

    Without `ticks`, places are not marked by their numbers.
    """
    points = [point for line in lines.values() for point in line]
    measures = {"gen_ppl": f"Gen-PPL ({scorer})", "entropy": "entropy (nats)", "mauve": "MAUVE"}
    measures = {key: text for key, text in measures.items() if all(key in measured for _, measured in points)}
    figure, panels = new_figure(len(measures), heading)
    for axes, (key, text) in zip(panels, measures.items(), strict=True):
        for i, (label, line) in enumerate(lines.items()):
            places, values = zip(*((p, measured[key]) for p, measured in sorted(line, key=lambda p: p[0])), strict=True)
            fmt = MARKERS[i % len(MARKERS)] + ("-" if len(line) > 1 and not names else "")
            look = {"fmt": fmt, "ms": 6, "capsize": 3, "lw": 1.3, "color": LINE_COLORS[i % len(LINE_COLORS)], "label": label}
            axes.errorbar(places, [m["mean"] for m in values], [m["sd"] or 0.0 for m in values], **look)
        for label, style, color, values in levels:
            if key in values:
                axes.axhline(values[key], color=color, ls=style, lw=1.2, label=label)
        dress(axes, text, "", x)
        places = sorted({place for place, _ in points})
        if names:
            axes.set_xticks(places, names, rotation=30, ha="right")
        else:
            scale_log(axes, "x", (1, 2, 5))
            if ticks:
                axes.set_xticks(places, [f"{place:.3g}" for place in places])
        axes.margins(x=0.12, y=0.15)
        means = [measured[key]["mean"] for _, measured in points]
        if key == "gen_ppl" and max(means) > WIDE * min(means):
            scale_log(axes, "y", (1, 2, 5) if max(means) < 300 * min(means) else (1,))  # further apart there is little room
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8, frameon=False)
    return save_png(figure, path)


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


def scale_log(axes: Axes, side: Literal["x", "y"], subs: Sequence[float]) -> None:
    """Make an axis logarithmic, with plain numbers at these multiples of powers of ten."""
    axis = axes.xaxis if side == "x" else axes.yaxis
    axes.set(**{f"{side}scale": "log"})
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_locator(NullLocator())
