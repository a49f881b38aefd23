"""Claims of the paper about an option, judged by the difference between trainings with and without it.

The trainings of one variant are few, so their variance is estimated from all variants of a study together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpeg_dlm.results.spread import difference
from jpeg_dlm.results.table import Table

MEASURED = {
    "reconstruction": "tokens reconstructed", "gen_ppl": "Gen-PPL (ratio)", "mauve": "MAUVE",
    "latent_text": "variance of latents due to text", "latent_rank": "effective rank of latents",
}  # fmt: skip
RATIOS = frozenset({"gen_ppl"})  # judged by the quotient, since its deviation grows with it
COLUMNS = ("conjecture", "r", "option", "beside", "measure", "with", "without", "difference", "95% interval", "verdict")


@dataclass(frozen=True)
class Conjecture:
    """A sentence that holds if the option has more (or less) of a measure than what it is compared with."""

    text: str
    option: str
    against: str
    measure: str
    more: bool


def better_text(option: str, against: str, said: str) -> tuple[Conjecture, Conjecture]:
    """Return the conjecture that an option improves text, by each of the two measures of it."""
    return Conjecture(said, option, against, "gen_ppl", more=False), Conjecture(said, option, against, "mauve", more=True)


def judge(conjectures: Sequence[Conjecture], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a finding for each conjecture at each rate at which both were trained and measured."""
    trained = [row for row in rows if "runs" in row]
    by = {_key(row): row for row in trained}
    rates = sorted({rate for _, rate in by if rate is not None}, reverse=True)
    sound = [row for row in trained if not row["degenerate"]]  # texts without variety vary little between trainings
    found = []
    for c in conjectures:
        groups = [_values(row, c.measure) for row in sound]
        for rate in rates or [None]:
            ours, theirs = by.get((c.option, rate)), by.get((c.against, rate))
            a, b = _values(ours, c.measure), _values(theirs, c.measure)
            if ours and a and b:
                found.append(vars(c) | {"rate": rate} | _finding(c, a, b, list(filter(None, groups)), ours["degenerate"]))
    return found


def _key(row: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the option and rate of a row; variants that are not options at several rates go by their labels."""
    facts = row["facts"]
    return (facts["option"], facts["rate"]) if "option" in facts else (row["label"], None)


def _values(row: Mapping[str, Any] | None, measure: str) -> list[float]:
    """Return a measure of each training of a row, without those that lack it."""
    every = row["runs"] if row else []
    runs = [{"reconstruction": run["reconstruction"], **run["latents"]} | run["measures"] for run in every]
    values = [run.get(measure) for run in runs]
    return [value["mean"] if isinstance(value, Mapping) else value for value in values if value is not None]


def _finding(
    c: Conjecture, ours: Sequence[float], theirs: Sequence[float], groups: Sequence[Sequence[float]], degenerate: Sequence[str]
) -> dict[str, Any]:
    ratio = c.measure in RATIOS
    scale = math.log if ratio else float
    scaled = [[scale(x) for x in values] for values in (ours, theirs, *groups)]
    middle, half = difference(scaled[0], scaled[1], scaled[2:])
    ends = None if half is None else [middle - half, middle + half]
    verdict, back = "cannot be told", math.exp if ratio else float
    if ends is not None and min(ends) * max(ends) > 0:
        verdict = "holds" if (middle > 0) == c.more else "does not hold"
    if verdict == "holds" and c.measure == "gen_ppl" and degenerate:
        verdict = "cannot be told"  # repeated text has a low perplexity
    return {
        "with": sum(ours) / len(ours), "without": sum(theirs) / len(theirs), "difference": back(middle),
        "interval": None if ends is None else [back(x) for x in ends], "trainings": [len(ours), len(theirs)],
        "verdict": verdict,
    }  # fmt: skip


def conjecture_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row per conjecture and rate, with the interval that decides."""
    rows = []
    for f in found:
        low_high = "one training" if f["interval"] is None else "{:.3f} to {:.3f}".format(*f["interval"])
        digits = 1 if f["measure"] == "gen_ppl" else 3
        values = [f"{f[name]:.{digits}f}" for name in ("with", "without")]
        about = [f["text"], "" if f["rate"] is None else f"{f['rate']:g}", f["option"], f["against"], MEASURED[f["measure"]]]
        rows.append([*about, *values, f"{f['difference']:.3f}", low_high, f["verdict"]])
    head = (
        "What the paper claims or expects. A verdict needs a 95% interval (Student, over trainings, with one variance for all "
        "variants that are not degenerate) without a difference of 0, or a ratio of 1; a lower Gen-PPL of degenerate texts "
        "proves nothing."
    )
    return Table.of(head, COLUMNS, rows)
