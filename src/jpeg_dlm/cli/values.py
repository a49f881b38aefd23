"""Types of option values for argparse, which reject wrong values before torch is imported."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from jpeg_dlm.config import LARGEST_INT
from jpeg_dlm.methods.registry import METHODS

SOLVERS = {name: entry.solvers for name, entry in METHODS.items() if entry.solvers and entry.kind == "system"}
EVERY_SOLVER = tuple(dict.fromkeys(name for names in SOLVERS.values() for name in names))
SOLVERS_SAID = "; ".join(f"{system}: {', '.join(names)}" for system, names in SOLVERS.items())


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of integers of at least `least`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= LARGEST_INT:
            bound = "below 2^63" if value > LARGEST_INT else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"must be a whole number {bound}, not '{text}'")
        return value

    return read


def number(rule: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of finite numbers for which `holds` is true; `rule` describes them, such as "above 0"."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not holds(value):
            raise argparse.ArgumentTypeError(f"must be a number {rule}, not '{text}'")
        return value

    return read


positive = number("above 0", lambda value: value > 0)
from_zero = number("of at least 0", lambda value: value >= 0)
share = number("above 0 and at most 1", lambda value: 0 < value <= 1)
unit = number("between 0 and 1", lambda value: 0 <= value <= 1)


def words(text: str) -> list[str]:
    """Read comma-separated words."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be words with commas between them, not '{text}'")
    return found


def scorer(text: str) -> str:
    """Check the name of a scorer for `scorers.language_models.build_scorer`."""
    kind, _, rest = text.partition(":")
    if text not in ("smollm2", "smollm2-135m", "stories15m") and not (kind in ("hf", "gguf", "ar") and rest):
        raise argparse.ArgumentTypeError(
            f"must be smollm2, stories15m, hf:NAME (hf:gpt2-large is the paper's), gguf:FILE or ar:CHECKPOINT, not '{text}'"
        )
    return text


def several(read: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Return a parser of one or several comma-separated values."""
    return lambda text: [read(part) for part in text.split(",")]


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of one or several comma-separated names out of `known`."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, not '{name}'")
        return names

    return read
