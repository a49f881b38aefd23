"""Distinguishing generated from real text by length alone, before and after cutting both to one budget (paper, appendix).

MAUVE uses the hidden state after a text's last token, so texts of different lengths score low whatever their content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.figures import mauve_or_reason
from jpeg_dlm.evaluation.length_overlap import chance_overlap, length_accuracy, length_overlap
from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.results.pictures import GENERATED_COLOR, INK, LINE_COLORS, REAL_COLOR, dress, new_figure, save_png
from jpeg_dlm.results.spread import plus_minus, spread
from jpeg_dlm.results.table import Table
from jpeg_dlm.studies.steps import common_protocol
from jpeg_dlm.studies.study import Asked, StudyOutcome

FORMAT = 1  # of the partial results
BARS = 40  # most bars of a histogram; a bar is at least one token wide
COLUMNS = (
    "text", "cut to", "overlap of lengths", "if they were alike", "told apart by length", "median, generated",
    "deviation", "median, real", "deviation", "MAUVE",
)  # fmt: skip


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Compare every model with its own held-out text."""
    rules = common_protocol(sources)
    request = EvaluationRequest(rules, asked.seeds, asked.n, mauve=asked.mauve)  # type: ignore[arg-type]
    evaluation = Evaluation(asked.scorer(), request, asked.parts, asked.console)
    systems = [compare_lengths(source, evaluation, asked) for source in sources]
    result = {
        "scorer": evaluation.scorer.name, "protocol": rules.name, "paper": paper_tables()["mauve_lengths"], "systems": systems,
    }  # fmt: skip
    return StudyOutcome(result, [table(result)], lambda path: draw(result, path))


def compare_lengths(source: ModelSource, evaluation: Evaluation, asked: Asked) -> dict[str, Any]:
    """Compare whole and cut lengths of every seed, in tokens of the scorer."""
    first = evaluation.texts(source, asked.seeds[0], {})
    real = source.real(len(first.texts))
    budget = evaluation.frame(source, first, real).budget
    runs = []
    for seed in asked.seeds:
        texts = evaluation.texts(source, seed, {})
        depends = evaluation.conditions | {
            "kind": "lengths", "format": FORMAT, "texts": texts.sha256, "real": real.texts.sha256, "budget": budget,
            "mauve": asked.mauve,
        }  # fmt: skip

        def make(texts: Any = texts, seed: int = seed) -> dict[str, Any]:
            ours, theirs = evaluation.lengths(texts), evaluation.lengths(real.texts)
            longest = min(max([*ours, *theirs, 1]), evaluation.scorer.context)
            return {"seed": seed, "generated": ours, "real": theirs} | {
                name: figures_of(ours, theirs, limit)
                | {
                    "mauve": mauve_or_reason(
                        asked.mauve, len(ours), len(theirs),
                        lambda at=at: (evaluation.features(texts, at), evaluation.features(real.texts, at)),
                    )
                }
                for name, limit, at in (("whole", None, longest), ("cut", budget, budget))
            }  # fmt: skip

        runs.append(asked.parts.get_or_make(f"lengths-{source.name}-seed{seed}", depends, make))
    return {"name": source.name, "title": source.model.method.title, "reference": real.origin, "budget": budget, "runs": runs}


def figures_of(generated: Sequence[int], real: Sequence[int], limit: int | None) -> dict[str, Any]:
    """Compare the lengths of two sets of texts, cut to `limit` tokens if it is given."""
    a, b = ([n if limit is None else min(n, limit) for n in lengths] for lengths in (generated, real))
    found = length_overlap(a, b)
    return {
        "overlap": found["overlap"], "chance": chance_overlap(a, b), "accuracy": length_accuracy(a, b), "bins": found["bins"],
        "enough": found["enough"],
        "generated": {k: found["generated"][k] for k in ("texts", "median", "std")},
        "real": {k: found["real"][k] for k in ("texts", "median", "std")},
    }  # fmt: skip


def over_seeds(system: Mapping[str, Any], kind: str, *keys: str) -> Mapping[str, Any] | None:
    """Return mean and deviation of a figure over seeds, or None if a run lacks it."""
    values: list[Any] = [run[kind] for run in system["runs"]]
    for key in keys:
        values = [value.get(key) for value in values if value is not None]
    return spread(values) if values and None not in values else None


def table(result: Mapping[str, Any]) -> Table:
    rows = [_row(system, kind) for system in result["systems"] for kind in ("whole", "cut")]
    paper = result["paper"]
    rows.append([
        "paper: ELF, OWT-1024", "", f"{100 * paper['intersection']:.1f}%", "", "", f"{paper['generated']['median']:g}",
        f"{paper['generated']['std']:g}", f"{paper['reference']['median']:g}", f"{paper['reference']['std']:g}", "",
    ])  # fmt: skip
    texts = result["systems"][0]["runs"][0]["whole"]["generated"]["texts"]
    head = (
        f"Lengths in tokens of {result['scorer']}, {texts} texts a seed, in bins of equal frequency; ± is the deviation over "
        "seeds. 'If they were alike' is the mean overlap when the labels are shuffled; 'told apart' is the share of texts that "
        "a rule knowing only the length assigns rightly on the half it was not learned from, 50% by guessing. The paper's row "
        f"is in tokens of {paper_tables()['scorer']}, with {paper['bins']} bins."
    )
    return Table.of(head, COLUMNS, rows, _sentences(result["systems"]))


def _row(system: Mapping[str, Any], kind: str) -> list[str]:
    def percent(key: str) -> str:
        found = over_seeds(system, kind, key)
        return (
            plus_minus({k: 100 * v if v is not None else None for k, v in found.items() if k != "values"}, 1) + "%"
            if found
            else ""
        )

    return [
        f"{system['name']} ({system['title']})", f"{system['budget']} tokens" if kind == "cut" else "whole",
        percent("overlap"), percent("chance"), percent("accuracy"),
        *(plus_minus(over_seeds(system, kind, who, what), 1) for who in ("generated", "real") for what in ("median", "std")),
        plus_minus(over_seeds(system, kind, "mauve", "mauve"), 3),
    ]  # fmt: skip


def _sentences(systems: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for system in systems:
        if not system["runs"][0]["whole"]["enough"]:
            found.append(f"{system['name']}: too few texts to compare lengths; ask for more with -n.")
        found += sorted({
            f"{system['name']}: {run[kind]['mauve']['skipped']}."
            for run in system["runs"] for kind in ("whole", "cut") if "skipped" in run[kind]["mauve"]
        })  # fmt: skip
    return found


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw the lengths of each model's first seed, and the overlaps before and after cutting."""
    systems = result["systems"]
    figure, panels = new_figure(len(systems) + 1, "what the length of a text gives away")
    for axes, system in zip(panels, systems, strict=False):
        run = system["runs"][0]
        low, high = (end([*run["generated"], *run["real"]]) for end in (min, max))
        width = max(1, int(np.ceil((high + 1 - low) / BARS)))
        edges = np.arange(low, high + 1 + width, width) - 0.5
        for key, color in (("generated", GENERATED_COLOR), ("real", REAL_COLOR)):
            shares = np.histogram(run[key], edges)[0] / len(run[key])
            axes.stairs(shares, edges, color=color, fill=True, alpha=0.45, label=key)
        axes.axvline(system["budget"], color=INK, ls="--", lw=1.0, label=f"budget, {system['budget']} tokens")
        dress(axes, f"{system['name']} ({system['title']})", "share of texts", f"tokens of {result['scorer']}")
        axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)
    _draw_overlaps(panels[-1], systems)
    return save_png(figure, path)


def _draw_overlaps(axes: Any, systems: Sequence[Mapping[str, Any]]) -> None:
    for shift, kind, color in ((-0.2, "whole", LINE_COLORS[2]), (0.2, "cut", LINE_COLORS[1])):
        found = [over_seeds(system, kind, "overlap") or spread([0.0]) for system in systems]
        chance = [over_seeds(system, kind, "chance") or spread([0.0]) for system in systems]
        places = np.arange(len(systems)) + shift
        means, deviations = [m["mean"] for m in found], [m["sd"] or 0.0 for m in found]
        axes.bar(places, means, 0.36, yerr=deviations, color=color, alpha=0.75, capsize=3, label=kind)
        label = "if lengths were alike" if kind == "cut" else None
        axes.plot(places, [m["mean"] for m in chance], "_", ms=22, mew=1.8, color=INK, label=label)
    dress(axes, "overlap with real text", "shared part of the histograms", "")
    axes.set_xticks(range(len(systems)), [system["name"] for system in systems])
    axes.set_ylim(0, 1.25)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.legend(fontsize=7.5, frameon=False, labelcolor=INK, ncols=3, loc="upper left", columnspacing=1.0)
