"""Pictures of an evaluation: lengths of generated and real text, and quality against cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from jpeg_dlm.evaluation.entry import EvaluationEntry, of_models
from jpeg_dlm.results.pictures import GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, new_figure, save_png
from jpeg_dlm.results.spread import Spread

Point = tuple[int, Mapping[str, Spread]]  # network evaluations, and measures


def draw_lengths(lengths: Mapping[str, Any], heading: str, path: Path) -> Path:
    """Share of texts per bin of equal frequency, generated and real; where the two agree is the overlap."""
    ends = [min(lengths[k]["shortest"] for k in ("generated", "real")), *lengths["edges"]]
    ends.append(max(lengths[k]["longest"] for k in ("generated", "real")) + 1)
    figure, (axes,) = new_figure(1, heading)
    for key, color in (("generated", GENERATED_COLOR), ("real", REAL_COLOR)):
        histogram, texts = lengths[key]["histogram"], lengths[key]["texts"]
        axes.stairs([n / texts for n in histogram], ends, color=color, fill=True, alpha=0.45, label=key)
    overlap = (
        f"lengths overlap by {100 * lengths['overlap']:.0f}%" if lengths["enough"] else "lengths (too few texts to compare)"
    )
    dress(axes, overlap, "share of texts", "tokens of the scorer")
    axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    return save_png(figure, path)


def draw_sweep(entries: Sequence[EvaluationEntry], scorer: str, path: Path) -> Path:
    """Gen-PPL, entropy and MAUVE against network evaluations; each system and solver is a line, real text is dashed."""
    lines: dict[str, list[Point]] = {}
    for entry, model in of_models(entries):
        name = ", ".join([entry.name, *filter(None, [model.sampler.get("solver")])])
        lines.setdefault(name, []).append((model.evaluations, entry.measures))
    real = of_models(entries)[0][0].figures["real"]

    def real_text(axes: Axes, name: str) -> None:
        if level := getattr(real, name, None):
            axes.axhline(level, color=INK, ls="--", lw=1.0, label="real text")

    return draw_against_evaluations(lines, "quality against cost", scorer, path, real_text)


def draw_against_evaluations(
    lines: Mapping[str, Sequence[Point]], heading: str, scorer: str, path: Path, mark: Callable[[Axes, str], None]
) -> Path:
    """A panel for each measure that all points of all lines have; `mark` adds to it what they are held against."""
    every = [point for line in lines.values() for point in line]
    measures = {"gen_ppl": f"Gen-PPL ({scorer})", "entropy": "entropy (nats)", "mauve": "MAUVE"}
    shown = {name: text for name, text in measures.items() if all(name in found for _, found in every)}
    figure, panels = new_figure(len(shown), heading)
    for axes, (name, text) in zip(panels, shown.items(), strict=True):
        mark(axes, name)
        for i, (label, points) in enumerate(lines.items()):
            places, found = zip(*((place, m[name]) for place, m in sorted(points, key=lambda p: p[0])), strict=True)
            axes.errorbar(
                places, [m["mean"] for m in found], [m["sd"] or 0.0 for m in found],
                fmt=("o-", "s--")[i // len(LINE_COLORS) % 2], ms=3.5, lw=1.5, capsize=2,
                color=LINE_COLORS[i % len(LINE_COLORS)], label=label,
            )  # fmt: skip
        dress(axes, text, text, "network evaluations per text")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({place for place, _ in every}))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        if name == "gen_ppl":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
    panels[0].legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)
