"""The clock of the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock() -> float:
    """Return seconds: those of this process if it has one thread, so that other processes do not matter, else of the wall."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best_seconds(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the seconds of the fastest of several calls of each contestant, which take turns after a first call."""
    seconds = dict.fromkeys(contestants, float("inf"))
    for act in contestants.values():
        act()
    for _ in range(rounds):
        for name, act in contestants.items():
            began = clock()
            act()
            seconds[name] = min(seconds[name], clock() - began)
    return seconds
