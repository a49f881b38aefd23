"""Side-by-side timing: the contestants take turns, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def interleaved(contestants: dict[str, Callable[[], object]], rounds: int = 5, warmup: int = 1) -> dict[str, float]:
    """Median seconds of each after warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for r in range(warmup + rounds):
        for name, act in contestants.items():
            began = time.perf_counter()
            act()
            if r >= warmup:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}
