"""Pictures of an evaluation: lengths of generated and real text, and quality against cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from jpeg_dlm.evaluation.entry_tables import title
from jpeg_dlm.results.pictures import GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, new_figure, save_png


def draw_lengths(entry: Mapping[str, Any], path: Path) -> Path:
    """Share of texts per bin of equal frequency, generated and real; where the two agree is the overlap."""
    lengths = entry["runs"][0]["lengths"]
    ends = [min(lengths[k]["shortest"] for k in ("generated", "real")), *lengths["edges"]]
    ends.append(max(lengths[k]["longest"] for k in ("generated", "real")) + 1)
    figure, (axes,) = new_figure(1, title(entry))
    for key, color in (("generated", GENERATED_COLOR), ("real", REAL_COLOR)):
        histogram, texts = lengths[key]["histogram"], lengths[key]["texts"]
        axes.stairs([n / texts for n in histogram], ends, color=color, fill=True, alpha=0.45, label=key)
    heading = (
        f"lengths overlap by {100 * lengths['overlap']:.0f}%" if lengths["enough"] else "lengths (too few texts to compare)"
    )
    dress(axes, heading, "share of texts", "tokens of the scorer")
    axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    return save_png(figure, path)


def draw_sweep(entries: Sequence[Mapping[str, Any]], scorer: str, path: Path) -> Path:
    """Gen-PPL, entropy and MAUVE against network evaluations; each system and solver is a line, real text is dashed."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        lines.setdefault(", ".join([entry["name"], *filter(None, [entry["sampler"].get("solver")])]), []).append(entry)

    def real_text(axes: Axes, name: str) -> None:
        if name in entries[0]["figures"]["real"]:
            axes.axhline(entries[0]["figures"]["real"][name], color=INK, ls="--", lw=1.0, label="real text")

    return draw_against_evaluations(lines, "quality against cost", scorer, path, real_text)


def draw_against_evaluations(
    lines: Mapping[str, Sequence[Mapping[str, Any]]], heading: str, scorer: str, path: Path, mark: Callable[[Axes, str], None]
) -> Path:
    """A panel for each measure that all entries of all lines have; `mark` adds to it what they are held against."""
    entries = [entry for line in lines.values() for entry in line]
    measures = {"gen_ppl": f"Gen-PPL ({scorer})", "entropy": "entropy (nats)", "mauve": "MAUVE"}
    shown = {name: text for name, text in measures.items() if all(name in e["measures"] for e in entries)}
    figure, panels = new_figure(len(shown), heading)
    for axes, (name, text) in zip(panels, shown.items(), strict=True):
        mark(axes, name)
        for i, (label, points) in enumerate(lines.items()):
            points = sorted(points, key=lambda e: e["evaluations"])
            found = [e["measures"][name] for e in points]
            axes.errorbar(
                [e["evaluations"] for e in points], [m["mean"] for m in found], [m["sd"] or 0.0 for m in found],
                fmt=("o-", "s--")[i // len(LINE_COLORS) % 2], ms=3.5, lw=1.5, capsize=2,
                color=LINE_COLORS[i % len(LINE_COLORS)], label=label,
            )  # fmt: skip
        dress(axes, text, text, "network evaluations per text")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({e["evaluations"] for e in entries}))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        if name == "gen_ppl":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
    panels[0].legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)
