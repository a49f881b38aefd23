"""Tables of an evaluation: ours, real and shuffled text, the paper's rows where they compare, and the other tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, TypeVar

from jpeg_dlm.evaluation.frontier import Curve
from jpeg_dlm.evaluation.paper import comparable_rows
from jpeg_dlm.evaluation.results import SystemResult, TextStats, of_models, scorer_label
from jpeg_dlm.evaluation.suite import distances_table
from jpeg_dlm.evaluation.table import Cell, Column, Span, Table
from jpeg_dlm.util.errors import counted

Row = TypeVar("Row")

PERPLEXITY = (Column("perplexity", 1), Column("95% interval", 1))
MAUVE, REPEATED = Column("MAUVE", 3), Column("repeated 4-grams", 3)
BRIER = Column("BrierLM", 2)
GEN_PPL = (Column("Gen-PPL", 1), Column("95% interval", 1), Column("entropy (nats)", 3))
DIVERSITY = (MAUVE, Column("± of k-means", 3), Column("distinct-2", 3), REPEATED)
TEXTS = ("text", "steps", *GEN_PPL, *DIVERSITY, Column("texts/s", 2), "")
MATCHED = ("system", "knob", Column("at", 3), *GEN_PPL[:2], MAUVE, Column("95% interval", 3), "")
SHARES = ("given tokens kept", "decoded by the latents", "hidden tokens recovered")
INFILL = ("model", "sampler", "seed", *(Column(name, 1, percent=True) for name in SHARES), *PERPLEXITY)
AFTER_PROMPT = (Column("perplexity given its prompt", 1), Column("95% interval", 1), Column("given another prompt", 1))
CONTINUATION = ("text", "sampler", "seed", *AFTER_PROMPT, MAUVE, REPEATED, BRIER)
RATES = (Column("nats/token", 4), Column("bits/character", 4), Column("unigram perplexity", 2))
BLEU = (Column("BLEU", 1), Column("95% interval", 1), Column("chrF", 1), Column("ROUGE-L", 1), Column("exact", 1, percent=True))
CONTROLS = (Column("BLEU against another source's references", 1), Column("BLEU between seeds", 1))
PAIRS = ("model", "sampler", *BLEU, *CONTROLS, BRIER, "evaluations", Column("texts/s", 2))
LIKELIHOOD = ("model", Column("perplexity", 2), "", Column("95% interval", 2), *RATES)


def evaluation_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the table of the texts, and one of each other task."""
    tables = [texts_table(result)] if result["entries"] else []
    tables += [distances_table(rows)] if (rows := result.get("distances")) else []
    tables += [frontier_table(result["frontier"], scorer_label(result))] if result.get("frontier") else []
    tables += [continuation_table(rows, result["scorer"])] if (rows := result.get("continue")) else []
    tables += [infill_table(rows, result["scorer"])] if (rows := result.get("infill")) else []
    tables += [pairs_table(rows)] if (rows := result.get("pairs")) else []
    return tables + ([likelihood_table(rows)] if (rows := result.get("likelihood")) else [])


# ---------------------------------------------------------------- texts


def texts_table(result: Mapping[str, Any]) -> Table:
    """Return generated, real and shuffled text, and the paper's rows."""
    rows: list[list[Cell]] = []
    for entry, last in _with_last(result["entries"], lambda entry: entry.stats["real"]):
        rows.append(_system_row(entry))
        if last:
            rows += [_baseline_row(name, entry.stats[name]) for name in ("real", "shuffled")]
    rows += [_paper_row(row) for row in _paper_rows(result)]
    head = f"Gen-PPL by {scorer_label(result)}, protocol {result['protocol']['name']}."
    return Table.of(head, TEXTS, rows, map(_sentence, result["entries"]))


def _with_last(rows: Sequence[Row], real: Callable[[Row], Any]) -> Iterable[tuple[Row, bool]]:
    """Yield rows, each with True if it is the last one that is compared with its real text."""
    for row, following in zip_longest(rows, rows[1:]):
        yield row, following is None or real(following) != real(row)


def _system_row(entry: SystemResult) -> list[Cell]:
    m, model, stats = entry.measures, entry.model, [run.stats for run in entry.runs]
    mauve = m.get("mauve")
    return [
        _named(entry.name, model and model.title, f"{len(stats)} x {stats[0].texts}"),
        model.sampler_label if model else None,
        m["gen_ppl"],
        (fmean(s.gen_ppl_low for s in stats), fmean(s.gen_ppl_high for s in stats)),
        m["entropy"],
        mauve,
        mauve and mauve.get("kmeans_sd"),
        m["distinct_2"],
        m["repetition_4"],
        m.get("texts_per_second"),
        "degenerate?" if entry.degenerate else None,
    ]


def _named(name: str, title: str | None, size: str) -> str:
    """Return a system with its method, where that is known."""
    return f"{name} ({', '.join([*filter(None, [title]), size])})"


def _baseline_row(name: str, s: TextStats) -> list[Cell]:
    interval = s.gen_ppl_low, s.gen_ppl_high
    head = [f"{name} ({s.texts})", None, s.gen_ppl, interval, s.entropy]
    return [*head, None, None, s.distinct_2, s.repetition_4, None, None]


def _paper_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the paper's rows that compare with any entry, those of evaluated systems first."""
    rows: dict[str, dict[str, Any]] = {}
    protocol, scorer = result["protocol"]["name"], result["scorer"]
    titles = [model.title for _, model in of_models(result["entries"])]
    for model in (entry.model for entry in result["entries"]):
        of_model = (model.preset, model.title) if model else ()
        rows |= {row["name"]: row for row in comparable_rows(protocol, scorer, *of_model)}
    return sorted(rows.values(), key=lambda row: row["method"] not in titles)


def _paper_row(row: Mapping[str, Any]) -> list[Cell]:
    origin = f"paper; {row['note']}" if "note" in row else "paper"
    steps = str(row["steps"]) if "steps" in row else None
    head = [Span(row["name"]), steps, Span(row["gen_ppl"]), None, Span(row["entropy"]), Span(row["mauve"])]
    return [*head, None, None, None, None, origin]


def _sentence(entry: SystemResult) -> str:
    """Say what the table has no column for."""
    parts, model = [], entry.model
    if entry.log_ppl_position is not None:
        parts.append(f"Way from shuffled to real text, in log perplexity: {entry.log_ppl_position:.2f}.")
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


def frontier_table(curves: Sequence[Curve], scorer: str) -> Table:
    """Return each system at the entropy of real text, or at the nearest end of its frontier."""
    rows: list[list[Cell]] = []
    for curve, last in _with_last(curves, lambda curve: curve.real_entropy):
        mauve, mark = curve.mauve, None if curve.reached else f"not reached: entropy {curve.entropy:.3f}"
        name = f"{curve.name} ({curve.title})" if curve.title else curve.name
        figures = [curve.gen_ppl.value, curve.gen_ppl[1:], *((mauve.value, mauve[1:]) if mauve else (None, None))]
        rows.append([name, curve.knob, curve.knob_value, *figures, mark])
        if last:
            rows.append([f"real text, entropy {curve.real_entropy:.3f}", None, None, curve.real_gen_ppl, *[None] * 4])
    head = (
        f"At matched entropy, that of real text: Gen-PPL by {scorer} and MAUVE between the two neighboring points of each "
        "frontier (linear, Gen-PPL in its logarithm), or at the nearest end of one that does not reach it."
    )
    return Table.of(head, MATCHED, rows, ["Intervals are over texts; MAUVE's is over texts in the same clusters."])


# ---------------------------------------------------------------- other tasks


def infill_table(rows: Sequence[Mapping[str, Any]], scorer: str) -> Table:
    """Return a row for each model, and rows for real text and for holes filled from other texts where these change."""
    cells: list[list[Cell]] = []
    for row, last in _with_last(rows, lambda row: row["scores"]["real"]):
        name = f"{row['name']} ({row['title']}, {row['n']:,} texts)"
        shares = [row["kept"], row["decoded"], row["recovered"]]
        cells.append([name, row["sampler_label"], row["seed"], *shares, *_perplexity(row["scores"]["filled"])])
        if last:
            others = {"real text": "real", "holes filled from other texts": "other"}
            cells += [[label, *[None] * 5, *_perplexity(row["scores"][key])] for label, key in others.items()]
    share = sum(row["given"] for row in rows) / sum(row["given"] + row["hidden"] for row in rows)
    head = f"Infilling of held-out text, of which {100 * share:.0f}% is given; perplexity of whole texts by {scorer}."
    return Table.of(head, INFILL, cells)


def continuation_table(rows: Sequence[Mapping[str, Any]], scorer: str) -> Table:
    """Return a row for each model, and rows for real text where it changes."""
    cells: list[list[Cell]] = []
    for row, last in _with_last(rows, lambda row: row["scores"]["real"]):
        name = f"{row['name']} ({row['title']}, {counted(row['n'], 'prompt')})"
        heads = {"written": [name, row["sampler_label"], row["seed"]]} | ({"real": ["real text", None, None]} if last else {})
        for kind, head in heads.items():
            elsewhere = row["scores"][f"{kind}_elsewhere"]["perplexity"]
            mauve, brier = (row["mauve"].get("mauve"), row["brier"]["brier_lm"]) if kind == "written" else (None, None)
            cells.append([*head, *_perplexity(row["scores"][kind]), elsewhere, mauve, row["repetition"][kind], brier])
    return Table.of(f"Continuation of held-out text, scored by {scorer}.", CONTINUATION, cells)


def pairs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each model and sampler."""
    figures = ("chrf", "rouge_l", "exact", "bleu_other_references", "self_bleu", "brier_lm", "evaluations", "texts_per_second")
    cells = []
    for row in rows:
        sampler = row["sampler_label"] + (f", best of {row['candidates']}" if row["candidates"] > 1 else "")
        name = _named(row["name"], row["title"], f"{len(row['seeds'])} x {counted(row['n'], 'source')}")
        cells.append([name, sampler, row["bleu"], (row["bleu_low"], row["bleu_high"]), *map(row.get, figures)])
    head = "Targets of held-out sources against all references of these; the interval is over sources, evaluations per target."
    return Table.of(head, PAIRS, cells)


def _perplexity(score: Mapping[str, float]) -> list[Cell]:
    return [score["perplexity"], (score["low"], score["high"])]


def likelihood_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the likelihood of a text under each model; a sentence on its rows, or for those that cannot say."""
    measured = [row for row in rows if row["kind"]]
    notes = [f"{row['name']}: {row['reason']}" for row in rows if not row["kind"]]
    notes = (*notes, *(_sizes(row) for row in measured if row.get("documents")))
    if not measured:
        return Table("", notes=notes)
    head = f"Likelihood of {measured[0]['text']}. Perplexity and nats compare models of one tokenizer, bits all models."
    return Table.of(head, LIKELIHOOD, map(_likelihood_row, measured), notes)


def _sizes(row: Mapping[str, Any]) -> str:
    """Say how the documents of a file became rows."""
    cut = f"; {counted(row['cut'], 'document')} longer than a row became several" if row["cut"] else ""
    unknown = f"; {counted(row['unknown'], 'token')} outside the vocabulary" if row["unknown"] else ""
    return f"{row['name']}: {counted(row['documents'], 'document')}, {counted(row['tokens'], 'token')} in all{cut}{unknown}."


def _likelihood_row(row: Mapping[str, Any]) -> list[Cell]:
    size = counted(row["rows"], "row") + ("" if row["kind"] == "exact" else f" x {counted(row['draws'], 'time')}")
    name, interval = _named(row["name"], row.get("title"), size), (row["perplexity_low"], row["perplexity_high"])
    values = [row["nats_per_token"], row["bits_per_character"], row.get("unigram_perplexity")]
    return [name, row["perplexity"], row["kind"], interval, *values]
