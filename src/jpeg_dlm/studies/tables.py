"""A study as tables: all variants beside the paper's figures, their curves, equal time, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpeg_dlm.evaluation.results import scorer_label
from jpeg_dlm.evaluation.table import Cell, Column, Span, Table
from jpeg_dlm.methods.registry import method_class
from jpeg_dlm.studies.verdicts import CACHED, MEASURES, Record, at_end, by_variant, degenerate, over_trainings, unmatched

Result = Mapping[str, Any]
Row = dict[str, Cell]  # by the keys of COLUMNS; those that no row has are left out
MEASURED = {
    "bleu": Column("BLEU", 1),
    "exact": Column("exact", 1, percent=True),
    "gen_ppl": Column("Gen-PPL", 1),
    "entropy": Column("entropy (nats)", 3),
    "mauve": Column("MAUVE", 3),
    "words": Column("words that exist", 3),
    "distinct": Column("distinct-2 (words)", 3),
    "copied": Column("copied", 3),
    "reconstruction": Column("tokens reconstructed", 3),
    "texts_per_second": Column("texts/s", 1),
}
COLUMNS = {
    "variant": Column("variant"),
    "parameters": Column("parameters (M)", 2),
    "tokens": Column("tokens seen (M)", 2),
    "minutes": Column("training (min)", 1),
    "encoder_minutes": Column("encoder's training (min)", 1),
    **MEASURED,
    "evaluations": Column("evaluations"),
    "speed": Column("speed", 2),
    "paper_gen_ppl": Column("paper: Gen-PPL", 2),
    "paper_entropy": Column("paper: entropy", 3),
    "paper_mauve": Column("paper: MAUVE", 3),
    "paper_speed": Column("paper: speed", 2),
}


def study_tables(result: Result) -> list[Table]:
    """Return all tables of a study; curves and equal time if there are several budgets, verdicts if there are claims."""
    tables = [main_table(result)]
    if len(result["budgets"]) > 1:
        tables += [curve_table(result), time_table(result)]
    return tables + ([verdict_table(result["verdicts"])] if result["verdicts"] else [])


def _table(title: str, rows: Iterable[Row], notes: Iterable[str] = ()) -> Table:
    return Table.of(title, COLUMNS.values(), [[row.get(key) for key in COLUMNS] for row in rows], notes)


def _measured(group: Sequence[Record]) -> Row:
    """Return the cells of the trainings of a variant."""
    row: Row = {key: over_trainings(group, key) for key in MEASURED}
    row["tokens"] = group[0]["tokens"] / 1e6
    for key, seconds in (("minutes", "seconds"), ("encoder_minutes", "encoder_seconds")):
        if spent := over_trainings(group, seconds):
            row[key] = spent["mean"] / 60
    return row


def _baselines(result: Result) -> list[Row]:
    """Return the rows of floors and ceiling, which were not sampled, so that they have no speed."""
    rows = []
    for baseline in result["baselines"]:
        cells: Row = {key: over_trainings([baseline], key) for key in MEASURED if key != "texts_per_second"}
        rows.append(cells | {"variant": Span(baseline["label"])})
    return rows


def main_table(result: Result) -> Table:
    """Return a row for each variant at its last budget, then floors and ceiling."""
    groups = at_end(result["records"])
    speeds = {row["name"]: row["ratio"] for row in result.get("speed", {"rows": []})["rows"]}
    rows: list[Row] = []
    for label, paper in result["paper"].items():
        row: Row = {"variant": label, "speed": speeds.get(label)}
        row |= {f"paper_{key}": paper.get(key) for key in ("gen_ppl", "entropy", "mauve", "speed")}
        if group := groups.get(label):
            row |= _measured(group) | {"parameters": group[0]["parameters"] / 1e6}
            row["evaluations"] = group[0]["evaluations"] if speeds else None
            row["variant"] = label + (" (degenerate?)" if degenerate(group) else "")
        elif label in result["errors"]:
            row["parameters"] = "failed"
        else:
            continue
        rows.append(row)
        if (cached := label + CACHED) in speeds:
            rows.append({"variant": cached, "speed": speeds[cached], "paper_speed": paper.get("speed_kv_cache")})
    return _table(_conditions(result), rows + _baselines(result), _notes(result))


def _conditions(result: Result) -> str:
    budget = result["budgets"][-1]["text"] if result["budgets"] else "the preset's steps"
    trained, texts = result["train_seeds"], f"{result['seeds']} x {result['texts']} texts"
    over = f"{trained} trainings, each the mean over {texts}" if trained > 1 else f"sampling seeds of one training, {texts}"
    speed = ""
    if "speed" in result:
        names = [row["name"] for row in result["speed"]["rows"]]
        unit = names[0] + (" without KV cache" if names[0] + CACHED in names else "")
        speed = f" Speed at batch {result['speed']['batch']}, fp32, relative to {unit}."
    matched = "Gen-PPL and MAUVE at the entropy of real text, along each model's frontier. " if result.get("frontier") else ""
    return (
        f"{result['title'][0].upper()}{result['title'][1:]}. {matched}Preset {result['preset']}, equal budget of {budget} "
        f"per training, beside that of the text encoder; Gen-PPL, MAUVE by {scorer_label(result)}, protocol "
        f"{result['protocol']['name']}; ± is the deviation over {over}. Words that exist and copied texts are by the "
        f"training text.{speed} The paper's columns are of gpt2-large and models of 105 to 179 M."
    )


def _notes(result: Result) -> list[str]:
    notes = list(result["left_out"]) + [f"{label} failed: {error}" for label, error in result["errors"].items()]
    for label, group in at_end(result["records"]).items():
        if signs := degenerate(group):
            notes.append(f"{label}: look at the texts before believing the perplexity: {'; '.join(signs)}.")
        if unmatched(group):
            notes.append(f"{label}: a frontier does not reach the entropy of real text, so that its nearest end stands here.")
    reading = [r for r in result["records"] if method_class(r["method"]).uses_encoder and not r.get("encoder_seconds")]
    given = {r["label"]: r["options"].get("encoder.name") for r in reading}
    for name in sorted(set(filter(None, given.values()))):
        whose = ", ".join(label for label in given if given[label] == name)
        notes.append(f"The text encoder '{name}' of {whose} was trained before, at a cost that no column counts.")
    return notes + [f"{label} in the paper: {paper['note']}." for label, paper in result["paper"].items() if "note" in paper]


def curve_table(result: Result) -> Table:
    """Return a row for each variant and budget."""
    rows: list[Row] = [{"variant": label} | _measured(group) for (label, _), group in by_variant(result["records"]).items()]
    head = (
        "The same after each budget: one training per variant and seed at a constant learning rate, scored on the way with "
        "averaged weights (systems with stages or phases: one training per budget)."
    )
    return _table(head, rows + _baselines(result))


def at_time(points: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float] | None:
    """Return tokens and measures after so much training, linear in log time between two points; None outside of them."""
    times = [point["seconds"] for point in points]
    if not times[0] <= seconds <= times[-1] or len(times) == 1:
        return None
    shared = set.intersection(*(set(point) for point in points)) - {"seconds", "tokens"}
    at = lambda values: float(np.interp(math.log(seconds), np.log(times), values))  # noqa: E731
    tokens = math.exp(at([math.log(point["tokens"]) for point in points]))
    return {name: at([point[name] for point in points]) for name in shared} | {"tokens": tokens}


def time_table(result: Result) -> Table:
    """Return the variants after equal training time: the longest that all of them reached."""
    points: dict[str, list[dict[str, float]]] = {}
    for (label, _), group in by_variant(result["records"]).items():
        means = {name: m["mean"] for name in ("seconds", "tokens", *MEASURES[:-1]) if (m := over_trainings(group, name))}
        points.setdefault(label, []).append(means)
    seconds = min(of[-1]["seconds"] for of in points.values())
    rows: list[Row] = []
    for label, of in points.items():
        values = at_time(of, seconds) or {}
        tokens = values["tokens"] / 1e6 if values else f"the first budget took {of[0]['seconds'] / 60:.1f} min"
        rows.append({**values, "variant": label, "tokens": tokens})
    head = (
        f"Equal time: after {seconds / 60:.1f} minutes of optimizer steps on this machine, between two budgets linear in the "
        "logarithm of time."
    )
    return _table(head, rows)


def verdict_table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each claim, with the interval and the corrected p-value that decide."""
    rows = []
    for v in verdicts:
        interval = "one training" if v["interval"] is None else tuple(v["interval"])
        measure = {"gen_ppl": "Gen-PPL (ratio)", "mauve": "MAUVE"}[v["measure"]]
        values = [v["with"], v["without"], v["difference"], interval, v["p"]]
        rows.append([v["text"], v["label"], v["against"], measure, *values, v["verdict"]])
    trainings = sorted({n for v in verdicts for n in v["trainings"]})
    head = (
        f"What the paper claims: {len(verdicts)} verdicts over {' to '.join(map(str, trainings))} trainings of each variant. "
        "A verdict needs a p-value below 0.05 (Student, one variance for all variants that are not degenerate) after Holm's "
        "correction for their number; the intervals are not corrected. Gen-PPL decides nothing where texts are degenerate, "
        "and nothing is decided where a frontier does not reach the entropy of real text."
    )
    numbers = [Column(name, 3) for name in ("difference", "95% interval", "p (Holm)")]
    return Table.of(head, ("claim", "variant", "against", "measure", "with", "without", *numbers, "verdict"), rows)
