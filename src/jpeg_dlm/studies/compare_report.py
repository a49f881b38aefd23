"""The comparison as tables: all systems beside the paper's figures, their curves, equal time, and how recipes differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from jpeg_dlm.config_io import from_dict
from jpeg_dlm.evaluation.anchors import ANCHORS
from jpeg_dlm.evaluation.entry import EvaluationEntry
from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.evaluation.summary import scorer_said
from jpeg_dlm.results.spread import plus_minus
from jpeg_dlm.results.table import Cell, Table
from jpeg_dlm.studies.compare import CACHED, ScoredPoint
from jpeg_dlm.studies.compare_claims import claims_table
from jpeg_dlm.studies.compare_tasks import real_cells, task_cells, task_columns, task_notes
from jpeg_dlm.studies.recipes import recipe_table
from jpeg_dlm.studies.scored import HEADINGS, MEASURES, anchor_rows, cells

BEFORE, AFTER = ("parameters", "tokens seen", "training"), ("tokens reconstructed", "evaluations", "speed")
OURS = ("system", *BEFORE, *HEADINGS, *AFTER)
PAPER = ("Gen-PPL", "entropy", "MAUVE", "speed")


def compare_tables(result: Mapping[str, Any], paper_set: str = "lm1b") -> list[Table]:
    """Return all tables of a comparison; curves and equal time if there are several budgets, verdicts if several trainings."""
    configs = {row["method"]: from_dict(row["config"]) for row in result["rows"] if "config" in row}
    tables = [compare_table(result, paper_set)]
    if len(result["budgets"]) > 1:
        tables += [curve_table(result), time_table(result)]
    claims = claims_table(scored_rows(result))
    tables += [claims] if claims else []
    return tables + ([recipe_table(configs, paper_set)] if configs else [])


def scored_rows(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of systems that were scored."""
    return [row for row in result["rows"] if row.get("points")]


def compare_table(result: Mapping[str, Any], paper_set: str = "lm1b") -> Table:
    """Our columns, then the paper's for the same system, which are of another scorer, text and size."""
    speeds = {row["name"]: row["ratio"] for row in result["speed"]["rows"]}
    paper = {row["method"]: row for row in paper_tables()["main"][paper_set]}
    tasks = task_columns(result)
    none = [""] * len(tasks)
    rows: list[Sequence[Cell]] = []
    for row in result["rows"]:
        title, beside = row["title"], paper.get(row["title"])
        rows.append(_own(row, speeds) + task_cells(row, tasks) + _papers(beside))
        if (cached := title + CACHED) in speeds:
            papers = f"{beside['speed_kv_cache']:g}" if beside else ""
            rows.append([cached, *[""] * (len(OURS) - 2), f"{speeds[cached]:.2f}", *none, "", "", "", papers])
    for anchor in anchor_rows(result["anchors"], len(BEFORE), len(AFTER)):
        real = str(anchor[0]) == ANCHORS["real"]
        rows.append([*anchor, *(real_cells(result["rows"], tasks) if real else none), *[""] * len(PAPER)])
    heading = [*OURS, *(column.heading for column in tasks), *(f"paper, {paper_set}: {name}" for name in PAPER)]
    of_paper = [f"{row['method']} in the paper: {row['note']}." for row in paper.values() if "note" in row]
    return Table.of(_conditions(result), heading, rows, _notes(result["rows"]) + of_paper + task_notes(result))


def _conditions(result: Mapping[str, Any]) -> str:
    budget = result["budgets"][-1]["text"] if result["budgets"] else "the preset's steps"
    names = [row["name"] for row in result["speed"]["rows"]]
    unit = names[0] + (" without KV cache" if names[0] + CACHED in names else "")
    speed = f" Speed at batch {result['speed']['batch']}, fp32, relative to {unit}."
    return (
        f"Preset {result['preset']}, equal budget of {budget} per system; Gen-PPL and MAUVE by {scorer_said(result)}; "
        f"{_spread(result)} Words that exist and copied texts are by the training text; floors have the lengths of real "
        f"texts.{speed} The paper's columns are of gpt2-large, 1,024 texts and models of 105 to 179 M."
    )


def _spread(result: Mapping[str, Any]) -> str:
    entry: EvaluationEntry | None = next((row["entry"] for row in result["rows"] if "entry" in row), None)
    texts = f"{len(entry.runs)} x {entry.runs[0].figures.texts} texts" if entry else "no text"
    trained = result["train_seeds"]
    if trained > 1:
        return f"± is the deviation over {trained} trainings, each the mean over {texts}."
    return f"± is the deviation over the sampling seeds of one training, {texts}."


def _own(row: Mapping[str, Any], speeds: Mapping[str, float]) -> list[str]:
    if not row.get("points"):
        return [row["title"], "failed", *[""] * (len(OURS) - 2)]
    point: ScoredPoint = row["points"][-1]
    return [
        row["title"] + (" (degenerate?)" if point.scores.degenerate else ""),
        f"{row['parameters'] / 1e6:.2f} M",
        *_along(point),
        str(row["evaluations"]),
        f"{speeds[row['title']]:.2f}" if row["title"] in speeds else "",
    ]


def _along(point: ScoredPoint) -> list[str]:
    """The cells from the tokens seen to those reconstructed."""
    training = [f"{point.tokens_seen / 1e6:.2f} M", f"{point.scores.training_seconds / 60:.1f} min"]
    return [*training, *cells(point.scores.measures), plus_minus(point.scores.reconstruction, 3)]


def _papers(row: Mapping[str, Any] | None) -> list[str]:
    return [f"{row[key]:g}" if row else "" for key in ("gen_ppl", "entropy", "mauve", "speed")]


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{row['title']} failed: {row['error']}" for row in rows if "error" in row]


def curve_table(result: Mapping[str, Any]) -> Table:
    """Return a row for each system and budget."""
    rows: list[Sequence[Cell]] = [[row["title"], *_along(point)] for row in scored_rows(result) for point in row["points"]]
    rows += anchor_rows(result["anchors"], 2, 1)
    head = (
        f"The same systems after each budget: one training per system and seed at a constant learning rate, scored on the way "
        f"with averaged weights (systems with stages or phases: one training per budget). {_spread(result)}"
    )
    return Table.of(head, ("system", *BEFORE[1:], *HEADINGS, AFTER[0]), rows)


def at_time(points: Sequence[ScoredPoint], seconds: float) -> dict[str, float] | None:
    """Return tokens and measures after so much training, linear in log time between two points; None outside of them."""
    for a, b in pairwise(points):
        low, high = a.scores.training_seconds, b.scores.training_seconds
        if low <= seconds <= high and low < high:
            share = math.log(seconds / low) / math.log(high / low)
            x, y = a.scores.measures, b.scores.measures
            found = {name: x[name]["mean"] + share * (y[name]["mean"] - x[name]["mean"]) for name in x if name in y}
            return found | {"tokens": math.exp(math.log(a.tokens_seen) * (1 - share) + math.log(b.tokens_seen) * share)}
    return None


def time_table(result: Mapping[str, Any]) -> Table:
    """Return the systems after equal training time: the longest that all of them reached."""
    scored = scored_rows(result)
    seconds = min(row["points"][-1].scores.training_seconds for row in scored)
    rows: list[Sequence[Cell]] = []
    for row in scored:
        found = at_time(row["points"], seconds)
        if found is None:
            first = row["points"][0].scores.training_seconds / 60
            rows.append([row["title"], f"the first budget took {first:.1f} min", *[""] * len(HEADINGS)])
            continue
        values = {name: {"mean": found[name], "sd": None} for name in MEASURES if name in found}
        rows.append([row["title"], f"{found['tokens'] / 1e6:.2f} M", *cells(values)])
    rows += anchor_rows(result["anchors"], 1, 0)
    head = (
        f"Equal time: after {seconds / 60:.1f} minutes of optimizer steps on this machine, between two budgets linear in the "
        "logarithm of time."
    )
    return Table.of(head, ("system", "tokens seen", *HEADINGS), rows)
