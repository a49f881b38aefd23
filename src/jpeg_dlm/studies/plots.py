"""Pictures of studies that train: a panel for each measure, over variants, the rate, the width, speed or training tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpeg_dlm.evaluation.plots import Line, draw_quality
from jpeg_dlm.studies.verdicts import Record, at_end, by_variant, over_trainings
from jpeg_dlm.util.pictures import REAL_COLOR

AXES = {
    "": "",
    "rate": "compression rate r (latents per token)",
    "width": "width of a latent, d",
    "speed": "texts per second",
    "tokens": "million tokens",
}
QUALITY = ("gen_ppl", "entropy", "mauve")
# Baselines that are drawn as lines: their style and color, and the measures that they are drawn for.
LEVELS = {"real": ("--", REAL_COLOR, QUALITY), "words": (":", "#718096", ("mauve",))}

Result = Mapping[str, Any]


def draw_study(result: Result, x: str, path: Path) -> Path | None:
    """Draw the last budget of a study over `x`, or with '' its variants side by side; None if nothing can be drawn."""
    speeds = {row["name"]: row["texts_per_second"] for row in result.get("speed", {"rows": []})["rows"]}
    groups = at_end(result["records"])
    points = [
        (group[0]["system"], i if not x else speeds.get(label) if x == "speed" else group[0][x], group)
        for i, (label, group) in enumerate(groups.items())
    ]
    return _draw(result, points, x, path, () if x else tuple(groups))


def draw_curves(result: Result, path: Path) -> Path | None:
    """Draw quality against training tokens; None if there is only one budget."""
    groups = by_variant(result["records"])
    labels = [label for label, _ in groups]
    points = [(label, group[0]["tokens"] / 1e6, group) for (label, _), group in groups.items() if labels.count(label) > 1]
    return _draw(result, points, "tokens", path)


def _draw(
    result: Result, points: Iterable[tuple[str, float | None, Sequence[Record]]], x: str, path: Path, names: Sequence[str] = ()
) -> Path | None:
    """Draw points, each given by the name of its line, its place, if it is known, and its records."""
    lines: dict[str, Line] = {}
    for name, place, group in points:
        if place is not None:
            measures = {key: m for key in QUALITY if (m := over_trainings(group, key))}
            lines[name] = [*lines.get(name, ()), (place, measures)]
    if not lines:
        return None
    budget = result["budgets"][-1]["text"] if result["budgets"] else "its own steps"
    heading = f"{result['title']} (preset {result['preset']}, {budget} each)"
    levels = []
    for baseline in result["baselines"]:
        if look := LEVELS.get(baseline["kind"]):
            levels.append((baseline["label"], *look[:2], {key: baseline[key] for key in look[2] if key in baseline}))
    # Systems of like speed would have ticks upon each other.
    return draw_quality(heading, lines, levels, result["scorer"], AXES[x], path, names, ticks=x != "speed")
