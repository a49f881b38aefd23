"""Pictures of the studies that train: variants side by side, curves over rate and width, and two systems with arrows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from jpeg_dlm.evaluation.anchors import ANCHORS
from jpeg_dlm.results.pictures import GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, new_figure, save_png

PAPER_COLOR, PAPER_GROUND = "#718096", "#f7fafc"
WIDE = 5.0  # a perplexity that varies by more than this factor is shown on a logarithmic axis
RATE = "compression rate r (latents per token)"
SYSTEMS = {"COSMOS": (LINE_COLORS[3], "s-"), "JPEG-DLM": (GENERATED_COLOR, "o-"), "ELF": (LINE_COLORS[2], "D")}

Result = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def _shown(result: Result, fact: str | None = None) -> list[Mapping[str, Any]]:
    """The rows that have figures, ordered by a fact."""
    rows = [row for row in result["rows"] if "measures" in row]
    return sorted(rows, key=lambda row: row["facts"][fact]) if fact else rows


def _new(result: Result, names: Mapping[str, str], more: int = 0) -> tuple[Figure, list[Axes]]:
    budget = result["budget"]["text"] if result["budget"] else "its own steps"
    return new_figure(len(names) + more, f"{result['title']} (preset {result['preset']}, {budget} each)")


def _names(result: Result) -> dict[str, str]:
    """The measures that every row has, as axes name them."""
    names = {"gen_ppl": f"Gen-PPL ({result['scorer']})", "entropy": "entropy (nats)", "mauve": "MAUVE"}
    return {key: text for key, text in names.items() if all(key in row["measures"] for row in _shown(result))}


def _scale_perplexity(axes: Axes, side: Literal["x", "y"], values: Sequence[float]) -> None:
    if max(values) > WIDE * min(values):
        axis: Axis = axes.xaxis if side == "x" else axes.yaxis
        axes.set(**{f"{side}scale": "log"})
        close = max(values) < 300 * min(values)  # further apart there is no room for more than powers of ten
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if close else (1.0,)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_locator(NullLocator())


def draw_rows(result: Result, path: Path) -> Path | None:
    """One dot per variant and measure; the paper's beside, in panels of their own."""
    rows = _shown(result)
    if not rows:
        return None
    names = _names(result)
    papers = {"gen_ppl": "Gen-PPL (gpt2-large)", "mauve": "MAUVE"} if any(row["paper"] for row in rows) else {}
    figure, panels = _new(result, names, len(papers))
    figure.set_size_inches(2.6 * len(panels) + 2.0, 1.7 + 0.32 * len(rows))
    for axes, (key, name) in zip(panels, names.items(), strict=False):
        found = [row["measures"][key] for row in rows]
        means = [m["mean"] for m in found]
        bars = [m["sd"] or 0.0 for m in found]
        axes.errorbar(means, range(len(rows)), xerr=bars, fmt="o", ms=6, capsize=3, color=GENERATED_COLOR)
        for line, look in _levels(result, key):
            axes.axvline(line, **look)
        _dress_rows(axes, "ours", key, name, rows, means)
    for axes, (key, name) in zip(panels[len(names) :], papers.items(), strict=True):
        places = [i for i, row in enumerate(rows) if key in row["paper"]]
        values = [rows[i]["paper"][key] for i in places]
        axes.plot(values, places, "D", ms=5.5, color=PAPER_COLOR)
        axes.set_facecolor(PAPER_GROUND)
        _dress_rows(axes, "paper, OWT-128", key, name, rows, values)
    panels[0].set_yticks(range(len(rows)), [row["label"] for row in rows])
    for axes in panels[: len(names)]:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)


def _levels(result: Result, key: str) -> list[tuple[float, dict[str, Any]]]:
    """Return the lines of a panel and their look: real text, and for MAUVE the level of shuffled words."""
    real, floor = result["real"].get(key), result["anchors"].get("words", {}).get(key)
    found = [] if real is None else [(real, {"color": REAL_COLOR, "ls": "--", "lw": 1.2, "label": "real text"})]
    if key == "mauve" and floor:
        found.append((floor["mean"], {"color": PAPER_COLOR, "ls": ":", "lw": 1.5, "label": ANCHORS["words"]}))
    return found


def _dress_rows(axes: Axes, heading: str, key: str, name: str, rows: Rows, values: Sequence[float]) -> None:
    dress(axes, heading, "", name)
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.margins(x=0.15)
    if key == "gen_ppl" and values:
        _scale_perplexity(axes, "x", values)


def draw_rates(result: Result, path: Path) -> Path | None:
    """Draw quality against r = N / L."""
    return _draw_curve(result, path, "rate", RATE)


def draw_widths(result: Result, path: Path) -> Path | None:
    """Draw quality against d."""
    return _draw_curve(result, path, "width", "width of a latent, d")


def _draw_curve(result: Result, path: Path, fact: str, x: str) -> Path | None:
    def draw(axes: Axes, key: str, rows: Rows) -> None:
        _line(axes, rows, fact, key, "JPEG-DLM", *SYSTEMS["JPEG-DLM"])

    return _draw_panels(result, path, fact, x, draw)


def _draw_panels(
    result: Result, path: Path, fact: str, x: str, draw: Callable[[Axes, str, Rows], None], **more: str
) -> Path | None:
    """Draw a panel for each measure, and for `more`, over a fact of the rows."""
    rows = _shown(result, fact)
    if not rows:
        return None
    names = _names(result) | more
    figure, panels = _new(result, names)
    for axes, (key, name) in zip(panels, names.items(), strict=True):
        draw(axes, key, rows)
        _dress_curve(axes, result, rows, fact, x, key, name)
    shown = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8, frameon=False)
    return save_png(figure, path)


def _line(axes: Axes, rows: Rows, fact: str, key: str, label: str, color: str, fmt: str) -> None:
    every = [(row["facts"][fact], (row["measures"] | {"reconstruction": row["reconstruction"]})[key]) for row in rows]
    found = [(place, measure["mean"], measure["sd"] or 0.0) for place, measure in every if measure]
    places, means, bars = ([point[i] for point in found] for i in range(3))
    axes.errorbar(places, means, bars, fmt=fmt, ms=5, lw=1.5, capsize=3, color=color, label=label)


def _dress_curve(axes: Axes, result: Result, rows: Rows, fact: str, x: str, key: str, name: str) -> None:
    for line, look in _levels(result, key):
        axes.axhline(line, **look)
    dress(axes, name, "", x)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["facts"][fact] for row in rows})
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks] if max(ticks) <= 1 else [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.15)
    if key == "gen_ppl":
        _scale_perplexity(axes, "y", [row["measures"][key]["mean"] for row in rows])


def draw_options(result: Result, path: Path) -> Path | None:
    """Draw quality and reconstruction against r, a line per option."""
    options = list(dict.fromkeys(row["facts"]["option"] for row in result["rows"]))

    def draw(axes: Axes, key: str, rows: Rows) -> None:
        for i, option in enumerate(options):
            own = [row for row in rows if row["facts"]["option"] == option]
            look = LINE_COLORS[i % len(LINE_COLORS)], ("o-", "s--", "D:")[i // len(LINE_COLORS) % 3]
            _line(axes, own, "rate", key, option, *look)

    return _draw_panels(result, path, "rate", RATE, draw, reconstruction="tokens reconstructed")


def draw_joint(result: Result, path: Path) -> Path | None:
    """Draw JPEG-DLM and COSMOS at each rate, arrows from the second to the first, and ELF as a diamond (Figure 4a)."""

    def draw(axes: Axes, key: str, rows: Rows) -> None:
        systems = {title: [row for row in rows if row["facts"]["option"] == title] for title in SYSTEMS}
        joint = {row["facts"]["rate"]: row for row in systems["JPEG-DLM"]}
        for title, own in systems.items():
            if own:
                _line(axes, own, "rate", key, title, *SYSTEMS[title])
        for before in systems["COSMOS"]:
            rate = before["facts"]["rate"]
            if rate in joint and key != "entropy":  # of which neither more nor less is better
                _arrow(axes, rate, before["measures"][key]["mean"], joint[rate]["measures"][key]["mean"])

    return _draw_panels(result, path, "rate", RATE, draw)


def _arrow(axes: Axes, x: float, before: float, after: float) -> None:
    """From one value to the other, with the relative change."""
    axes.annotate("", (x, after), (x, before), arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.0})
    said = f"{100 * (after / before - 1):+.0f}%" if before else ""
    axes.annotate(said, (x, (before + after) / 2), (5, 0), textcoords="offset points", fontsize=7.5, color=INK, va="center")
