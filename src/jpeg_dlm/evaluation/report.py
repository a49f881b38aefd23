"""An evaluation as Markdown: ours, real and shuffled text, and the paper's rows where they compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpeg_dlm.evaluation.counts import evaluations
from jpeg_dlm.evaluation.paper import comparable_rows

COLUMNS = (
    "text", "steps", "Gen-PPL", "95% interval", "entropy (nats)", "MAUVE", "distinct-2", "repeated 4-grams", "texts/s", "",
)  # fmt: skip


def table(result: Mapping[str, Any]) -> str:
    """The whole report."""
    rows: list[list[str]] = []
    entries: Sequence[dict[str, Any]] = result["entries"]
    for i, entry in enumerate(entries):
        rows.append(_own_row(entry))
        following = entries[i + 1] if i + 1 < len(entries) else None
        if following is None or following["figures"]["real"] != entry["figures"]["real"]:
            rows += [_plain_row(name, entry["figures"][name]) for name in ("real", "shuffled")]
    rows += [_paper_row(row) for row in _paper_rows(result)]
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *map(_line, rows), ""]
    head = f"Gen-PPL by {result['scorer']}, protocol {result['protocol']['name']}."
    return "\n".join([head, "", *lines, *[_sentence(entry) for entry in entries]])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pm(measure: Mapping[str, Any] | None, digits: int) -> str:
    """Mean and sample deviation over seeds."""
    if measure is None:
        return ""
    sd = f" ± {measure['sd']:.{digits}f}" if measure["sd"] is not None else ""
    return f"{measure['mean']:.{digits}f}{sd}"


def _own_row(entry: Mapping[str, Any]) -> list[str]:
    m, runs = entry["measures"], entry["runs"]
    low, high = (sum(run["figures"][k] for run in runs) / len(runs) for k in ("gen_ppl_low", "gen_ppl_high"))
    sampler = entry.get("sampler")
    return [
        f"{entry['name']} ({len(runs)} x {runs[0]['figures']['texts']})",
        f"{sampler['steps']} {sampler['solver']}" if sampler else "",
        _pm(m["gen_ppl"], 1),
        f"{low:.1f} to {high:.1f}",
        _pm(m["entropy"], 3),
        _pm(m.get("mauve"), 3),
        _pm(m["distinct_2"], 3),
        _pm(m["repetition_4"], 3),
        _pm(m.get("texts_per_second"), 2),
        "degenerate?" if entry["degenerate"] else "",
    ]


def _plain_row(name: str, f: Mapping[str, Any]) -> list[str]:
    interval = f"{f['gen_ppl_low']:.1f} to {f['gen_ppl_high']:.1f}"
    head = [f"{name} ({f['texts']})", "", f"{f['gen_ppl']:.1f}", interval, f"{f['entropy']:.3f}"]
    return [*head, "", f"{f['distinct_2']:.3f}", f"{f['repetition_4']:.3f}", "", ""]


def _paper_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in result["entries"]:
        for row in comparable_rows(result["protocol"]["name"], result["scorer"], entry.get("preset")):
            found[row["name"]] = row
    return list(found.values())


def _paper_row(row: Mapping[str, Any]) -> list[str]:
    steps = str(row.get("steps", ""))
    return [row["name"], steps, f"{row['gen_ppl']:g}", "", f"{row['entropy']:g}", f"{row['mauve']:g}", "", "", "", "paper"]


def _sentence(entry: Mapping[str, Any]) -> str:
    """What the table has no column for."""
    parts = []
    if entry["way_from_shuffled_to_real"] is not None:
        parts.append(f"Way from shuffled to real text, in log perplexity: {entry['way_from_shuffled_to_real']:.2f}.")
    parts.append(f"Entropy minus real text's: {entry['entropy_gap']:+.3f} nats.")
    if entry.get("reconstruction") is not None:
        parts.append(f"Held-out tokens reconstructed at r = {entry['rate']:g}: {100 * entry['reconstruction']:.1f}%.")
    if "length_overlap" in entry["measures"]:
        parts.append(f"Overlap of lengths with real text: {100 * entry['measures']['length_overlap']['mean']:.0f}%.")
    if entry["degenerate"]:
        parts.append(f"Look at the texts before believing the perplexity: {'; '.join(entry['degenerate'])}.")
    parts += [f"{note[0].upper() + note[1:]}." for note in entry["notes"]]
    return f"{title(entry)}: {' '.join(parts)}\n"


def title(entry: Mapping[str, Any]) -> str:
    """A system and its sampler."""
    sampler = entry.get("sampler")
    return f"{entry['name']}, {sampler['steps']} {sampler['solver']} steps" if sampler else str(entry["name"])


def cost(entry: Mapping[str, Any]) -> int:
    """Network evaluations of a sample where they are known by formula, else steps."""
    from jpeg_dlm.config import SamplerConfig

    sampler = SamplerConfig(**entry["sampler"])
    return evaluations(sampler) if entry["method"] == "jpeg-dlm" else sampler.steps
