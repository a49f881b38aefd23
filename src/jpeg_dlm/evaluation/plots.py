"""Pictures of an evaluation: lengths of generated and real text, and quality against cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from jpeg_dlm.evaluation.results import MeanStd, SystemResult, of_models
from jpeg_dlm.util.pictures import GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, new_figure, save_png


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
    """Draw Gen-PPL, entropy and, if all have it, MAUVE against network evaluations.

    Each system and solver is a line, and real text is dashed.
    """
    lines: dict[str, list[tuple[int, Mapping[str, MeanStd]]]] = {}
    for entry, model in of_models(entries):
        name = ", ".join([entry.name, *filter(None, [model.sampler.get("solver")])])
        lines.setdefault(name, []).append((model.evaluations, entry.measures))
    points = [point for line in lines.values() for point in line]
    real = of_models(entries)[0][0].stats["real"]
    measures = {"gen_ppl": f"Gen-PPL ({scorer})", "entropy": "entropy (nats)", "mauve": "MAUVE"}
    measures = {name: text for name, text in measures.items() if all(name in measured for _, measured in points)}
    figure, panels = new_figure(len(measures), "quality against cost")
    for axes, (name, text) in zip(panels, measures.items(), strict=True):
        if level := getattr(real, name, None):
            axes.axhline(level, color=INK, ls="--", lw=1.0, label="real text")
        for i, (label, line) in enumerate(lines.items()):
            places, measured = zip(*((place, m[name]) for place, m in sorted(line, key=lambda p: p[0])), strict=True)
            axes.errorbar(
                places,
                [m["mean"] for m in measured],
                [m["sd"] or 0.0 for m in measured],
                fmt=("o-", "s--")[i // len(LINE_COLORS) % 2],
                ms=3.5,
                lw=1.5,
                capsize=2,
                color=LINE_COLORS[i % len(LINE_COLORS)],
                label=label,
            )
        dress(axes, text, text, "network evaluations per text")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({place for place, _ in points}))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        if name == "gen_ppl":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
    panels[0].legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)
