"""A measure over several seeds: its mean and sample deviation."""

from __future__ import annotations

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


def plus_minus(measure: Mapping[str, Any] | None, digits: int) -> str:
    """Return mean and deviation as a table shows them; nothing for a measure that was not taken."""
    if measure is None:
        return ""
    sd = f" ± {measure['sd']:.{digits}f}" if measure["sd"] is not None else ""
    return f"{measure['mean']:.{digits}f}{sd}"
