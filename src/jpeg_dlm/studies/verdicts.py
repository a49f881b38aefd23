"""Records of trainings by variant, and verdicts on claims about two variants, corrected for their number (Holm).

The trainings of one variant are few, so their variance is estimated from all variants of a study together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpeg_dlm.evaluation.results import MeanStd, difference, mean_std, student
from jpeg_dlm.studies.catalog import Claim

LEVEL = 0.05
RATIOS = frozenset({"gen_ppl"})  # judged by the quotient, since its deviation grows with it
PAIRS = ("bleu", "exact")  # of models of pairs
OVERLAP = ("words", "distinct", "copied")  # by the training text
MEASURES = ("gen_ppl", "entropy", "mauve", *OVERLAP, "texts_per_second")
CACHED = ", KV cache"  # after the label of a system that is timed with its cache too
Record = Mapping[str, Any]

# ---------------------------------------------------------------- records


def over_trainings(records: Sequence[Record], name: str) -> MeanStd | None:
    """Return a measure of the trainings of one variant: the deviation is over several of them, else over sampling seeds."""
    values = [record[name] for record in records if record.get(name) is not None]
    if len(values) != len(records) or not values:
        return None
    seeds = records[0].get("by_seed", {}).get(name)
    return mean_std(seeds if len(values) == 1 and seeds else values)


def by_variant(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group records by label and budget, in their order."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["label"], record["budget"]), []).append(record)
    return groups


def at_end(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of the last budget that each variant reached, by label."""
    return {label: group for (label, _), group in by_variant(records).items()}  # budgets increase, so later ones replace


def degenerate(records: Iterable[Record]) -> list[str]:
    """Return the signs that some training of a variant writes degenerate text."""
    return sorted({sign for record in records for sign in record["degenerate"]})


def unmatched(records: Iterable[Record]) -> bool:
    """Return True if the frontier of some training of a variant does not reach the entropy of real text."""
    return any("frontier" in record and not record["frontier"]["reached"] for record in records)


# ---------------------------------------------------------------- verdicts


def p_value(t: float, free: int) -> float:
    """Return the two-sided p-value of Student's t: the share of cos(a)^(free - 1) beyond a = atan(|t| / sqrt(free))."""
    below, all_ = (np.linspace(0.0, end, 4001) for end in (math.atan(abs(t) / math.sqrt(free)), math.pi / 2))
    mass = [float(np.trapezoid(np.cos(angle) ** (free - 1), angle)) for angle in (below, all_)]
    return max(0.0, 1.0 - mass[0] / mass[1])


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979): the k-th smallest of m times m - k + 1, never decreasing."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def judge(claims: Iterable[Claim], records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return a verdict for each claim about two variants that were both measured, at the last budget."""
    groups = at_end(records)
    sound = [group for group in groups.values() if not degenerate(group)]  # texts without variety vary little
    verdicts = []
    for claim in claims:
        to, back = (math.log, math.exp) if claim.measure in RATIOS else (float, float)
        values = lambda group, of=claim.measure: [r[of] for r in group if r.get(of) is not None]  # noqa: E731
        pair = [groups.get(label, []) for label in (claim.label, claim.against)]
        ours, theirs = map(values, pair)
        if not ours or not theirs:
            continue
        a, b, *within = [[to(x) for x in some] for some in (ours, theirs, *map(values, sound)) if some]
        middle, half = difference(a, b, within)
        verdict = {
            "with": sum(ours) / len(ours),
            "without": sum(theirs) / len(theirs),
            "difference": back(middle),
            "interval": None if half is None else [back(middle - half), back(middle + half)],
            "free": sum(len(some) - 1 for some in within or (a, b)),
            "trainings": [len(ours), len(theirs)],
            "untrusted": any(map(unmatched, pair))
            or (claim.measure == "gen_ppl" and any(map(degenerate, pair))),  # repeated text has a low perplexity
        }
        verdicts.append(vars(claim) | verdict)
    return decide(verdicts)


def decide(verdicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the corrected p-value and the verdict to the differences of one table; those without an interval do not count."""
    tested = [v for v in verdicts if v["interval"] is not None]
    corrected = iter(holm([_p_of(v) for v in tested]))
    decided = []
    for v in verdicts:
        p = next(corrected) if v["interval"] is not None else None
        verdict = "cannot be told"
        if p is not None and p < LEVEL and not v.get("untrusted"):
            direction = v["difference"] > (1 if v["measure"] in RATIOS else 0)
            verdict = "holds" if direction == v["more"] else "does not hold"
        decided.append({**v, "p": p, "verdict": verdict})
    return decided


def _p_of(verdict: Mapping[str, Any]) -> float:
    """Return the p-value that belongs to a difference and its 95% interval."""
    to = math.log if verdict["measure"] in RATIOS else float
    low, high = map(to, verdict["interval"])
    half = (high - low) / 2 or 1e-12
    return p_value(student(verdict["free"]) * to(verdict["difference"]) / half, verdict["free"])
