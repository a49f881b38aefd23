"""A measure over several seeds: its mean and sample deviation, and the difference between two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class Spread(TypedDict):
    """A measure over seeds, as results hold it."""

    mean: float
    sd: float | None
    values: list[float]
    kmeans_sd: NotRequired[float]  # of MAUVE: the mean deviation over its own seeds


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample deviation; one value has no deviation."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


# Quantiles 0.975 of Student's distribution by degrees of freedom; beyond the last, the normal one is within 8%.
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
NORMAL = 1.960


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None]:
    """Return the difference of two means and half of its 95% interval, with a common variance; None: one value each."""
    middle, free = statistics.fmean(ours) - statistics.fmean(theirs), len(ours) + len(theirs) - 2
    if free < 1:
        return middle, None
    squares = sum((x - statistics.fmean(values)) ** 2 for values in (ours, theirs) for x in values)
    quantile = STUDENT[free] if free < len(STUDENT) else NORMAL
    return middle, quantile * math.sqrt(squares / free * (1 / len(ours) + 1 / len(theirs)))


def plus_minus(measure: Mapping[str, Any] | None, digits: int) -> str:
    """Return mean and deviation as a table shows them; nothing for a measure that was not taken."""
    if measure is None:
        return ""
    sd = f" ± {measure['sd']:.{digits}f}" if measure["sd"] is not None else ""
    return f"{measure['mean']:.{digits}f}{sd}"
