"""Tables of an evaluation: ours, real and shuffled text, and the paper's rows where they compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from jpeg_dlm.evaluation.continuation import continuation_table
from jpeg_dlm.evaluation.entry import EvaluationEntry, EvaluationResult, of_models
from jpeg_dlm.evaluation.figures import TextFigures
from jpeg_dlm.evaluation.infill import infill_table
from jpeg_dlm.evaluation.paper import comparable_rows
from jpeg_dlm.evaluation.summary import scorer_said
from jpeg_dlm.results.spread import plus_minus
from jpeg_dlm.results.table import Table
from jpeg_dlm.wording import counted

COLUMNS = (
    "text", "steps", "Gen-PPL", "95% interval", "entropy (nats)", "MAUVE", "distinct-2", "repeated 4-grams", "texts/s", "",
)  # fmt: skip


def evaluation_tables(result: EvaluationResult) -> list[Table]:
    """Return what was found of the texts, and of the likelihood of held-out text where it was asked."""
    tables, tasks = [texts_table(result)] if result.entries else [], result.tasks
    tables += [continuation_table(tasks["continue"], result.conditions["scorer"])] if tasks.get("continue") else []
    tables += [infill_table(tasks["infill"], result.conditions["scorer"])] if tasks.get("infill") else []
    return tables + ([likelihood_table(tasks["likelihood"])] if tasks.get("likelihood") else [])


def texts_table(result: EvaluationResult) -> Table:
    """Generated, real and shuffled text, and the paper's rows."""
    rows: list[list[str]] = []
    for entry, following in zip_longest(result.entries, result.entries[1:]):
        rows.append(_own_row(entry))
        if following is None or following.figures["real"] != entry.figures["real"]:
            rows += [_plain_row(name, entry.figures[name]) for name in ("real", "shuffled")]
    rows += [_paper_row(row) for row in _paper_rows(result)]
    head = f"Gen-PPL by {scorer_said(result.conditions)}, protocol {result.conditions['protocol']['name']}."
    return Table.of(head, COLUMNS, rows, map(_sentence, result.entries))


def _own_row(entry: EvaluationEntry) -> list[str]:
    m, model, found = entry.measures, entry.model, [run.figures for run in entry.runs]
    return [
        _named(entry.name, model and model.title, f"{len(found)} x {found[0].texts}"),
        model.sampler_label if model else "",
        plus_minus(m["gen_ppl"], 1),
        f"{fmean(f.gen_ppl_low for f in found):.1f} to {fmean(f.gen_ppl_high for f in found):.1f}",
        plus_minus(m["entropy"], 3),
        _mauve(m.get("mauve")),
        plus_minus(m["distinct_2"], 3),
        plus_minus(m["repetition_4"], 3),
        plus_minus(m.get("texts_per_second"), 2),
        "degenerate?" if entry.degenerate else "",
    ]


def _named(name: str, title: str | None, size: str) -> str:
    """A system with its method, where that is known."""
    return f"{name} ({', '.join([*filter(None, [title]), size])})"


def _mauve(measure: Mapping[str, Any] | None) -> str:
    """Return MAUVE with its deviation over sampling seeds and, in brackets, over k-means seeds."""
    return "" if measure is None else f"{plus_minus(measure, 3)} (k-means ± {measure['kmeans_sd']:.3f})"


def _plain_row(name: str, f: TextFigures) -> list[str]:
    interval = f"{f.gen_ppl_low:.1f} to {f.gen_ppl_high:.1f}"
    head = [f"{name} ({f.texts})", "", f"{f.gen_ppl:.1f}", interval, f"{f.entropy:.3f}"]
    return [*head, "", f"{f.distinct_2:.3f}", f"{f.repetition_4:.3f}", "", ""]


def _paper_rows(result: EvaluationResult) -> list[dict[str, Any]]:
    """Of every entry those that compare, the rows of evaluated systems first."""
    found: dict[str, dict[str, Any]] = {}
    protocol, scorer = result.conditions["protocol"]["name"], result.conditions["scorer"]
    titles = [model.title for _, model in of_models(result.entries)]
    for model in (entry.model for entry in result.entries):
        rows = comparable_rows(protocol, scorer, model.preset, model.title) if model else comparable_rows(protocol, scorer)
        found |= {row["name"]: row for row in rows}
    return sorted(found.values(), key=lambda row: row["method"] not in titles)


def _paper_row(row: Mapping[str, Any]) -> list[str]:
    steps, origin = str(row.get("steps", "")), f"paper; {row['note']}" if "note" in row else "paper"
    return [row["name"], steps, f"{row['gen_ppl']:g}", "", f"{row['entropy']:g}", f"{row['mauve']:g}", "", "", "", origin]


def _sentence(entry: EvaluationEntry) -> str:
    """Say what the table has no column for."""
    parts, model = [], entry.model
    if entry.way_from_shuffled_to_real is not None:
        parts.append(f"Way from shuffled to real text, in log perplexity: {entry.way_from_shuffled_to_real:.2f}.")
    parts.append(f"Entropy minus real text's: {entry.entropy_gap:+.3f} nats.")
    if model and model.reconstruction is not None:
        rate = f" at r = {model.rate:g}" if model.rate is not None else ""
        parts.append(f"Held-out tokens reconstructed{rate}: {100 * model.reconstruction:.1f}%.")
    if overlap := entry.measures.get("length_overlap"):
        parts.append(f"Overlap of lengths with real text: {100 * overlap['mean']:.0f}%.")
    if entry.degenerate:
        parts.append(f"Look at the texts before believing the perplexity: {'; '.join(entry.degenerate)}.")
    parts += [f"{note[0].upper() + note[1:]}." for note in entry.notes]
    return f"{entry.label}: {' '.join(parts)}"


LIKELIHOOD_COLUMNS = ("model", "perplexity", "", "95% interval", "nats/token", "bits/character", "unigram perplexity")


def likelihood_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the likelihood of held-out text under each model; a sentence for those that cannot say."""
    found = [row for row in rows if row["kind"]]
    notes = tuple(f"{row['name']}: {row['reason']}" for row in rows if not row["kind"])
    if not found:
        return Table("", notes=notes)
    head = "Likelihood of held-out text. Perplexity and nats compare between models of one tokenizer, bits between all."
    return Table.of(head, LIKELIHOOD_COLUMNS, map(_likelihood_row, found), notes)


def _likelihood_row(row: Mapping[str, Any]) -> list[str]:
    size = counted(row["rows"], "row") + ("" if row["kind"] == "exact" else f" x {counted(row['draws'], 'time')}")
    bits = row["bits_per_character"]
    return [
        _named(row["name"], row.get("title"), size),
        f"{row['perplexity']:.2f}",
        row["kind"],
        f"{row['perplexity_low']:.2f} to {row['perplexity_high']:.2f}",
        f"{row['nats_per_token']:.4f}",
        "" if bits is None else f"{bits:.4f}",
        f"{row['unigram_perplexity']:.2f}",
    ]
