"""Strict JSON: reading refuses NaN, repeated keys, deep nesting and huge files; writing refuses NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpeg_dlm.util.errors import CheckpointError, JpegDlmError


def parse_json(raw: bytes | str) -> Any:
    """Parse a JSON text: UTF-8, finite numbers, unique keys; raise ValueError for any other."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {name[:80]!r} is repeated")
        values[name] = value
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def dump_json(values: Mapping[str, Any]) -> str:
    """Return standard JSON; raise `CheckpointError` for values that JSON cannot represent, such as NaN."""
    try:
        return json.dumps(values, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The values cannot be saved as JSON ({error}): use finite numbers and strings.") from error


def load_json(
    path: Path, max_bytes: int, error: type[JpegDlmError] = CheckpointError, remedy: str = "restore it from a copy"
) -> dict[str, Any]:
    """Load a JSON object of bounded size; raise `error` with a remedy if there is none."""
    try:
        with open(path, "rb") as handle:
            raw = handle.read(max_bytes + 1)
        values = parse_json(raw) if len(raw) <= max_bytes else None
    except OSError as cause:
        raise error(f"Cannot read '{path}' ({cause.strerror or cause}): {remedy}.") from cause
    except ValueError as cause:
        raise error(f"'{path}' is not valid JSON ({cause}): {remedy}.") from cause
    if not isinstance(values, dict):
        raise error(f"'{path}' is not a JSON object of at most {max_bytes} bytes: {remedy}.")
    return values
