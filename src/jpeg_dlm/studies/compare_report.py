"""The comparison as a table beside the paper's, and as a picture of quality against speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.spread import plus_minus
from jpeg_dlm.results.table import Cell, Table, emphasis
from jpeg_dlm.studies.compare import CACHED

OURS = ("system", "parameters", "tokens seen", "training", "Gen-PPL", "entropy (nats)", "MAUVE", "speed")
MARKERS = "os^DvPX*<>"  # beside the colors, which are fewer than the systems
PAPER = ("Gen-PPL", "entropy", "MAUVE", "speed")


def compare_table(result: Mapping[str, Any], paper_set: str = "lm1b") -> Table:
    """Our columns, then the paper's for the same system, which are of another scorer, text and size."""
    speeds = {row["name"]: row["ratio"] for row in result["speed"]["rows"]}
    paper = {row["method"]: row for row in paper_tables()["main"][paper_set]}
    rows: list[Sequence[Cell]] = []
    for row in result["rows"]:
        title, beside = row["title"], paper.get(row["title"])
        rows.append(_own(row, speeds) + _papers(beside))
        if (cached := title + CACHED) in speeds:
            papers = f"{beside['speed_kv_cache']:g}" if beside else ""
            rows.append([cached, *[""] * 6, f"{speeds[cached]:.2f}", "", "", "", papers])
    entry = next((row["entry"] for row in result["rows"] if "entry" in row), None)
    for name in ("real", "shuffled") if entry else ():
        figures = entry["figures"][name] if entry else {}
        rows.append([emphasis(f"{name} text"), "", "", "", f"{figures['gen_ppl']:.1f}", f"{figures['entropy']:.3f}", *[""] * 6])
    heading = [*OURS, *(f"paper, {paper_set}: {name}" for name in PAPER)]
    return Table.of(_conditions(result), heading, rows, _failures(result["rows"]))


def _conditions(result: Mapping[str, Any]) -> str:
    budget = result["budget"]["text"] if result["budget"] else "the preset's steps"
    entry = next((row["entry"] for row in result["rows"] if "entry" in row), None)
    runs = f", {len(entry['runs'])} x {entry['runs'][0]['figures']['texts']} texts" if entry else ""
    names = [row["name"] for row in result["speed"]["rows"]]
    unit = names[0] + (" without KV cache" if names[0] + CACHED in names else "")
    speed = f" Speed at batch {result['speed']['batch']}, fp32, relative to {unit}."
    return (
        f"Preset {result['preset']}, equal budget of {budget} per system; Gen-PPL and MAUVE by {result['scorer']}{runs}; "
        f"± is the deviation over seeds.{speed} The paper's columns are of gpt2-large, 1,024 texts and models of 105 to 179 M."
    )


def _own(row: Mapping[str, Any], speeds: Mapping[str, float]) -> list[str]:
    if "entry" not in row:
        return [row["title"], "failed", *[""] * 6]
    m = row["entry"]["measures"]
    return [
        row["title"] + (" (degenerate?)" if row["entry"]["degenerate"] else ""),
        f"{row['parameters'] / 1e6:.2f} M",
        f"{row['tokens_seen'] / 1e6:.2f} M",
        f"{row['training_seconds'] / 60:.1f} min",
        plus_minus(m["gen_ppl"], 1),
        plus_minus(m["entropy"], 3),
        plus_minus(m.get("mauve"), 3),
        f"{speeds[row['title']]:.2f}" if row["title"] in speeds else "",
    ]


def _papers(row: Mapping[str, Any] | None) -> list[str]:
    return [f"{row[key]:g}" if row else "" for key in ("gen_ppl", "entropy", "mauve", "speed")]


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{row['title']} failed: {row['error']}" for row in rows if "error" in row]


def draw_comparison(result: Mapping[str, Any], path: Path) -> Path | None:
    """Gen-PPL and entropy against throughput; the dashed line is real text. None if nothing can be drawn."""
    speeds = {row["name"]: row["texts_per_second"] for row in result["speed"]["rows"]}
    shown = [row for row in result["rows"] if "entry" in row and row["title"] in speeds]
    if not shown:
        return None
    names = {"gen_ppl": f"Gen-PPL ({result['scorer']})", "entropy": "entropy (nats)", "mauve": "MAUVE"}
    names = {key: text for key, text in names.items() if all(key in row["entry"]["measures"] for row in shown)}
    figure, panels = new_figure(len(names), "quality against speed, equal training budget")
    for axes, (key, text) in zip(panels, names.items(), strict=True):
        for i, row in enumerate(shown):
            measure = row["entry"]["measures"][key]
            axes.errorbar(
                speeds[row["title"]], measure["mean"], measure["sd"] or 0.0, fmt=MARKERS[i % len(MARKERS)], ms=7, capsize=3,
                color=LINE_COLORS[i % len(LINE_COLORS)], label=row["title"],
            )  # fmt: skip
        real = shown[0]["entry"]["figures"]["real"]
        if key in real:
            axes.axhline(real[key], color=INK, ls="--", lw=1.0, label="real text")
        dress(axes, text, text, "texts per second")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.25, y=0.15)
        if key == "gen_ppl":
            axes.set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return save_png(figure, path)
