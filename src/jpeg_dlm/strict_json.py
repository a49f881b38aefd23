"""Strict parsing of untrusted JSON: NaN, repeated keys and deep nesting are a ValueError, unlike in `json.loads`."""

from __future__ import annotations

import json
import math
from typing import Any

DEPTH = 32  # our own files have at most five levels, configs of published checkpoints seven


def parse_json(raw: bytes | str, depth: int = DEPTH) -> Any:
    """Parse a JSON text: UTF-8, finite numbers, unique keys, at most `depth` levels."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if deeper_than(value, depth):
        raise ValueError("it is nested too deeply")
    return value


def deeper_than(value: Any, depth: int) -> bool:
    """Return True if lists and objects nest more than `depth` levels; iterative, as Python limits recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, (dict, list))]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {name[:80]!r} is repeated")
        values[name] = value
    return values


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number
