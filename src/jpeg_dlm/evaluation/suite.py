"""Distances between the texts of an evaluation and real text, on the features of MAUVE, beside real and shuffled text."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from jpeg_dlm.evaluation import metrics
from jpeg_dlm.evaluation.table import Cell, Column, Table
from jpeg_dlm.evaluation.texts import FileSource, SourceTexts, TextBaseline
from jpeg_dlm.util.rng import generator

if TYPE_CHECKING:
    from jpeg_dlm.evaluation.evaluate import ComparedTexts, Evaluation

LEAST_TEXTS = 100  # of both kinds, as for MAUVE
MOST_TEXTS = 2000  # of each kind: all pairs of them take 64 MB
LEVEL = 0.05
NUMBERS = {"mauve_42": 3, "kmeans_sd": 3, "frechet": 2, "energy": 3, "p": 3, "precision": 3, "recall": 3, "auc": 3}
NAMES = ("MAUVE, seed 42", "± of k-means", "Fréchet", "energy distance", "p", "precision", "recall", "AUC")
WORDS = (Column("diversity", 3), Column("4-grams of training text", 1, percent=True), Column("copied", 1, percent=True))
COLUMNS = ("text", "texts", *map(Column, NAMES, NUMBERS.values()), Column("95% interval", 3), *WORDS)


def suite_installed() -> bool:
    """Return True if the optional packages are installed, without importing them."""
    return all(importlib.util.find_spec(name) for name in ("scipy", "sklearn"))


def distance_results(evaluation: Evaluation) -> dict[str, Any] | None:
    """Return the rows of all compared texts with those of real and shuffled text, and sentences; None: nothing to compare."""
    groups: dict[tuple[str, int], list[ComparedTexts]] = {}
    missing: dict[str, list[str]] = {}
    for each in evaluation.compared:
        if reason := _missing(each):
            missing.setdefault(reason, []).append(each.label)
        else:
            groups.setdefault((each.real.texts.sha256, each.tokens), []).append(each)
    rows, notes = [], [f"{', '.join(labels)}: distances need {reason}." for reason, labels in missing.items()]
    for group in groups.values():
        for each in group:
            runs = zip(each.runs, each.mauve, strict=True)
            figures = [_figures(evaluation, each, texts, each.real.texts, mauve) for texts, mauve in runs]
            rows.append(_row(each.label, figures))
        rows += [_row(label, [_figures(evaluation, group[0], *sets)]) for label, sets in _floors(evaluation, group[0]).items()]
        notes += _verdict(evaluation, [each for each in group if not isinstance(each.source, TextBaseline)])
    return {"rows": rows, "notes": notes} if rows or notes else None


def _missing(each: ComparedTexts) -> str | None:
    """Return what is missing for the distances of some texts."""
    fewest = min(_count(texts) for texts in (*each.runs, each.real.texts))
    if fewest < LEAST_TEXTS:
        return f"at least {LEAST_TEXTS} texts of both kinds, not {fewest}"
    return None if suite_installed() else "the package 'scikit-learn': install it with  pip install 'jpeg-dlm[eval]'"


def _count(texts: SourceTexts) -> int:
    return sum(bool(text.strip()) for text in texts.texts)


def _floors(evaluation: Evaluation, each: ComparedTexts) -> dict[str, tuple[SourceTexts, SourceTexts, None]]:
    """Return what real text is compared with: as many other real texts, or its own second half; and its shuffled words."""
    real, n = each.real.texts, len(each.real.texts.texts)
    others = evaluation.cased(each.source.real(n, evaluation.protocol.text == "specials", first=n).texts)
    floor = others, real
    if _count(others) < _count(real):
        floor = SourceTexts(real.texts[n // 2 :]), SourceTexts(real.texts[: n // 2])
    g = generator(0, "shuffle")
    shuffled = SourceTexts([metrics.shuffle_words(text, g) for text in real.texts])
    return {"real text against other real text": (*floor, None), "words shuffled": (shuffled, real, None)}


def _figures(
    evaluation: Evaluation, each: ComparedTexts, texts: SourceTexts, real: SourceTexts, mauve: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return all figures of one set of texts; both sets count with as many texts, because most figures depend on that."""
    heldout = None if isinstance(each.source, FileSource) else each.source.heldout

    def compute() -> dict[str, Any]:
        from jpeg_dlm.evaluation import distances as d

        x, y = (evaluation.features(some, each.tokens) for some in (texts, real))
        n = min(len(x), len(y), MOST_TEXTS)
        x, y = d.standardized(y[:n], x[:n])
        near = d.reduced(x, y)
        energy, p = d.energy_test(x, y)
        precision, recall = d.precision_recall(x, y)
        auc = d.classifier_auc(*near)
        clusters = evaluation.mauve(texts, real, each.tokens) if mauve is None else mauve
        figures = {"texts": n, "mauve_42": clusters.get("values", [None])[0], "kmeans_sd": clusters.get("kmeans_sd")}
        figures |= {"frechet": d.frechet(*near), "energy": energy, "p": p, "precision": precision, "recall": recall}
        figures |= {"auc": auc.value, "auc_low": auc.low, "auc_high": auc.high}
        training = metrics.training_text(heldout.folder) if heldout else None
        words = [metrics.words_of(text, training is None or training.padded) for text in texts.texts]
        figures |= {"diversity": metrics.diversity(words)}
        if training:
            figures["memorized"] = training.memorized(words)
            figures["copied"] = training.measure(rows)["copied"] if (rows := training.rows_of(texts.ids or [])) else None
        return figures

    depends = evaluation.conditions | {"kind": "distances", "tokens": each.tokens, "mauve": evaluation.request.mauve}
    depends |= {"texts": texts.sha256, "real": real.sha256, "data": heldout and heldout.fingerprint}
    return evaluation.cache.get_or_compute(f"distances-{each.label}", depends, compute)


def _row(label: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over runs, but the largest p-value; what was not measured in every run is left out."""
    shared = [name for name in runs[0] if all(run.get(name) is not None for run in runs)]
    row = {name: max(run[name] for run in runs) if name == "p" else fmean(run[name] for run in runs) for name in shared}
    return {"text": label, "runs": len(runs), **row, "texts": runs[0]["texts"]}


def _verdict(evaluation: Evaluation, group: Sequence[ComparedTexts]) -> list[str]:
    """Say which texts are nearest to real text, and whether that can be told; nothing about one system."""
    if len(group) < 2:
        return []

    def compute() -> dict[str, Any]:
        from jpeg_dlm.evaluation import distances as d

        sets = [np.concatenate([evaluation.features(run, each.tokens) for run in each.runs])[:MOST_TEXTS] for each in group]
        *sets, real = d.standardized(evaluation.features(group[0].real.texts, group[0].tokens)[:MOST_TEXTS], *sets)
        first = min(range(len(sets)), key=lambda i: d.nearer(sets[i], sets[0], real)[0])
        tests = [[group[i].label, *d.nearer(sets[i], sets[first], real)] for i in range(len(sets)) if i != first]
        return {"first": group[first].label, "tests": tests}

    depends = evaluation.conditions | {"kind": "nearest", "tokens": group[0].tokens, "real": group[0].real.texts.sha256}
    depends |= {"texts": [[each.label, *(run.sha256 for run in each.runs)] for each in group]}
    nearest = evaluation.cache.get_or_compute("nearest", depends, compute)
    tests = [(label, min(1.0, p * len(nearest["tests"]))) for label, _, p in nearest["tests"]]  # Bonferroni
    apart = all(p < LEVEL for _, p in tests)
    against = "; ".join(f"than {label}: p = {p:.2g}" for label, p in tests)
    sentence = "is nearest to real text" if apart else "is nearest to real text in this sample, which may be chance"
    return [f"Verdict: {nearest['first']} {sentence} (energy distance; {against})."]


def distances_table(result: Mapping[str, Any]) -> Table:
    """Return a row for each set of texts."""
    rows: list[list[Cell]] = []
    for row in result["rows"]:
        interval = (row["auc_low"], row["auc_high"])
        size = f"{row['runs']} x {row['texts']}" if row["runs"] > 1 else row["texts"]
        words = [row.get(name) for name in ("diversity", "memorized", "copied")]
        rows.append([row["text"], size, *map(row.get, NUMBERS), interval, *words])
    head = "Distances from real text in the features of MAUVE. A text that cannot be told from real text has an AUC of 0.5."
    return Table.of(head, COLUMNS, rows, result["notes"]) if rows else Table("", notes=tuple(result["notes"]))
