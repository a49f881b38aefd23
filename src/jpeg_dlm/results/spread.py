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


# Quantiles 0.975 of Student's distribution by degrees of freedom; beyond the last, `student` expands around the normal one.
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL = 1.959964


def student(free: int) -> float:
    """Return the quantile 0.975 of Student's distribution, within 0.1%."""
    if free < len(STUDENT):
        return STUDENT[free]
    z = NORMAL
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)  # Cornish-Fisher


def difference(
    ours: Sequence[float], theirs: Sequence[float], groups: Sequence[Sequence[float]] = ()
) -> tuple[float, float | None]:
    """Return the difference of two means and half of its 95% interval; None: no group has two values.

    The variance within a group is taken to be common to all `groups`, or to the two alone if none are given.
    """
    middle, groups = statistics.fmean(ours) - statistics.fmean(theirs), groups or (ours, theirs)
    free = sum(len(values) - 1 for values in groups)
    if free < 1:
        return middle, None
    squares = sum((x - statistics.fmean(values)) ** 2 for values in groups for x in values)
    return middle, student(free) * math.sqrt(squares / free * (1 / len(ours) + 1 / len(theirs)))


def plus_minus(measure: Mapping[str, Any] | None, digits: int) -> str:
    """Return mean and deviation as a table shows them; nothing for a measure that was not taken."""
    if measure is None:
        return ""
    sd = f" ± {measure['sd']:.{digits}f}" if measure["sd"] is not None else ""
    return f"{measure['mean']:.{digits}f}{sd}"
