"""Tables of an evaluation: ours, real and shuffled text, and the paper's rows where they compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpeg_dlm.evaluation.continuation import continuation_table
from jpeg_dlm.evaluation.infill import infill_table
from jpeg_dlm.evaluation.paper import comparable_rows
from jpeg_dlm.results.spread import plus_minus
from jpeg_dlm.results.table import Table
from jpeg_dlm.wording import counted

COLUMNS = (
    "text", "steps", "Gen-PPL", "95% interval", "entropy (nats)", "MAUVE", "distinct-2", "repeated 4-grams", "texts/s", "",
)  # fmt: skip


def evaluation_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return what was found of the texts, and of the likelihood of held-out text where it was asked."""
    tables = [texts_table(result)] if result["entries"] else []
    tables += [continuation_table(result["continue"], result["scorer"])] if result.get("continue") else []
    tables += [infill_table(result["infill"], result["scorer"])] if result.get("infill") else []
    return tables + ([likelihood_table(result["likelihood"])] if result.get("likelihood") else [])


def texts_table(result: Mapping[str, Any]) -> Table:
    """Generated, real and shuffled text, and the paper's rows."""
    rows: list[list[str]] = []
    entries: Sequence[dict[str, Any]] = result["entries"]
    for i, entry in enumerate(entries):
        rows.append(_own_row(entry))
        following = entries[i + 1] if i + 1 < len(entries) else None
        if following is None or following["figures"]["real"] != entry["figures"]["real"]:
            rows += [_plain_row(name, entry["figures"][name]) for name in ("real", "shuffled")]
    rows += [_paper_row(row) for row in _paper_rows(result)]
    head = f"Gen-PPL by {result['scorer']}, protocol {result['protocol']['name']}."
    return Table.of(head, COLUMNS, rows, map(_sentence, entries))


def _own_row(entry: Mapping[str, Any]) -> list[str]:
    m, runs = entry["measures"], entry["runs"]
    low, high = (sum(run["figures"][k] for run in runs) / len(runs) for k in ("gen_ppl_low", "gen_ppl_high"))
    sampler = entry.get("sampler")
    return [
        _named(entry, f"{len(runs)} x {runs[0]['figures']['texts']}"),
        entry["sampler_label"] if sampler else "",
        plus_minus(m["gen_ppl"], 1),
        f"{low:.1f} to {high:.1f}",
        plus_minus(m["entropy"], 3),
        plus_minus(m.get("mauve"), 3),
        plus_minus(m["distinct_2"], 3),
        plus_minus(m["repetition_4"], 3),
        plus_minus(m.get("texts_per_second"), 2),
        "degenerate?" if entry["degenerate"] else "",
    ]


def _named(row: Mapping[str, Any], size: str) -> str:
    """A system with its method, where that is known."""
    return f"{row['name']} ({', '.join([*filter(None, [row.get('title')]), size])})"


def _plain_row(name: str, f: Mapping[str, Any]) -> list[str]:
    interval = f"{f['gen_ppl_low']:.1f} to {f['gen_ppl_high']:.1f}"
    head = [f"{name} ({f['texts']})", "", f"{f['gen_ppl']:.1f}", interval, f"{f['entropy']:.3f}"]
    return [*head, "", f"{f['distinct_2']:.3f}", f"{f['repetition_4']:.3f}", "", ""]


def _paper_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every entry those that compare, the rows of evaluated systems first."""
    found: dict[str, dict[str, Any]] = {}
    titles = [entry.get("title") for entry in result["entries"]]
    for entry in result["entries"]:
        for row in comparable_rows(result["protocol"]["name"], result["scorer"], entry.get("preset"), entry.get("title")):
            found[row["name"]] = row
    return sorted(found.values(), key=lambda row: row["method"] not in titles)


def _paper_row(row: Mapping[str, Any]) -> list[str]:
    steps = str(row.get("steps", ""))
    return [row["name"], steps, f"{row['gen_ppl']:g}", "", f"{row['entropy']:g}", f"{row['mauve']:g}", "", "", "", "paper"]


def _sentence(entry: Mapping[str, Any]) -> str:
    """Say what the table has no column for."""
    parts = []
    if entry["way_from_shuffled_to_real"] is not None:
        parts.append(f"Way from shuffled to real text, in log perplexity: {entry['way_from_shuffled_to_real']:.2f}.")
    parts.append(f"Entropy minus real text's: {entry['entropy_gap']:+.3f} nats.")
    if entry.get("reconstruction") is not None:
        rate = f" at r = {entry['rate']:g}" if entry["rate"] is not None else ""
        parts.append(f"Held-out tokens reconstructed{rate}: {100 * entry['reconstruction']:.1f}%.")
    if "length_overlap" in entry["measures"]:
        parts.append(f"Overlap of lengths with real text: {100 * entry['measures']['length_overlap']['mean']:.0f}%.")
    if entry["degenerate"]:
        parts.append(f"Look at the texts before believing the perplexity: {'; '.join(entry['degenerate'])}.")
    parts += [f"{note[0].upper() + note[1:]}." for note in entry["notes"]]
    return f"{title(entry)}: {' '.join(parts)}"


def title(entry: Mapping[str, Any]) -> str:
    """A system and its sampler."""
    return f"{entry['name']}, {entry['sampler_label']}" if "sampler" in entry else str(entry["name"])


# ---------------------------------------------------------------- held-out likelihood

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
        _named(row, size),
        f"{row['perplexity']:.2f}",
        row["kind"],
        f"{row['perplexity_low']:.2f} to {row['perplexity_high']:.2f}",
        f"{row['nats_per_token']:.4f}",
        "" if bits is None else f"{bits:.4f}",
        f"{row['unigram_perplexity']:.2f}",
    ]
