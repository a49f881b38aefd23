"""A study of variants as a table: ours with deviations, floors and ceiling, and the paper's figures in columns of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpeg_dlm.evaluation.summary import scorer_said
from jpeg_dlm.results.spread import plus_minus, spread
from jpeg_dlm.results.table import Cell, Table
from jpeg_dlm.studies.scored import HEADINGS, anchor_rows, cells

OURS = ("variant", "parameters", "training", *HEADINGS, "tokens reconstructed", "texts/s")
PAPER = ("paper: Gen-PPL", "paper: entropy", "paper: MAUVE")
# Columns of the diagnosis: heading and digits of each measure of `training.diagnosis`.
DIAGNOSED = {f"ratio_{t:g}": (f"error / linear, t = {t:g}", 2) for t in (0.2, 0.3, 0.5, 0.7)} | {
    "accuracy_0.3": ("tokens right from t = 0.3", 3), "accuracy_0.5": ("from t = 0.5", 3), "rank": ("rank of a latent", 0),
    "rank_joint": ("rank of all", 0), "trigram": ("trigram perplexity", 0),
}  # fmt: skip


def study_table(result: Mapping[str, Any]) -> Table:
    """The conditions, the rows, and a sentence for whatever is missing or suspicious."""
    rows: list[Sequence[Cell]] = [_own(row) + _papers(row["paper"]) for row in result["rows"]]
    rows += anchor_rows(result["anchors"], 2, 2 + len(PAPER))
    notes = list(result["left_out"])
    for row in result["rows"]:
        if "error" in row:
            notes.append(f"{row['label']} failed: {row['error']}")
        if row.get("degenerate"):
            said = "; ".join(row["degenerate"])
            notes.append(f"{row['label']}: look at the texts before believing the perplexity: {said}.")
    return Table.of(_conditions(result), [*OURS, *PAPER], rows, notes)


def diagnosis_table(result: Mapping[str, Any]) -> list[Table]:
    """Return a table of the diagnostic measures at the end of training, or none if no run was diagnosed."""
    rows = []
    for row in result["rows"]:
        found = [run["diagnosis"] for run in row.get("runs", []) if run["diagnosis"]]
        if found:
            shared = {name: [f[name] for f in found] for name in DIAGNOSED if all(name in f for f in found)}
            cells = [plus_minus(spread(shared[n]), digits) if n in shared else "" for n, (_, digits) in DIAGNOSED.items()]
            rows.append([row["label"], *cells])
    head = "Diagnosis on held-out text at the end of training (trigram perplexity is of 64 texts)."
    return [Table.of(head, ["variant", *(heading for heading, _ in DIAGNOSED.values())], rows)] if rows else []


def _conditions(result: Mapping[str, Any]) -> str:
    budget = result["budget"]["text"] if result["budget"] else "the preset's steps"
    trained = result["train_seeds"]
    texts = f"{result['seeds']} x {result['texts']} texts"
    over = f"{trained} trainings, each the mean over {texts}" if trained > 1 else f"sampling seeds of one training, {texts}"
    return (
        f"{result['title'][0].upper()}{result['title'][1:]}. Preset {result['preset']}, equal budget of {budget} per training; "
        f"Gen-PPL and MAUVE by {scorer_said(result)}, protocol {result['protocol']['name']}; ± is the deviation over {over}. "
        "The paper's columns are of gpt2-large, OWT-128 and models of 105 M; where it shows only a picture they are empty."
    )


def _own(row: Mapping[str, Any]) -> list[str]:
    if "measures" not in row:
        return [row["label"], "failed", *[""] * (len(OURS) - 2)]
    m, kept = row["measures"], row["reconstruction"]
    return [
        row["label"] + (" (degenerate?)" if row["degenerate"] else ""),
        f"{row['parameters'] / 1e6:.2f} M",
        f"{row['training_seconds'] / 60:.1f} min",
        *cells(m),
        plus_minus(kept, 3),
        plus_minus(m.get("texts_per_second"), 1),
    ]


def _papers(paper: Mapping[str, float]) -> list[str]:
    return [f"{paper[key]:g}" if key in paper else "" for key in ("gen_ppl", "entropy", "mauve")]
