"""The metrics of a run, one JSON object per line of `metrics.jsonl`.

Every line has a "step"; training terms and held-out terms of a step are separate lines. JSON cannot represent numbers that
are not finite, so they are written as the strings "NaN", "Infinity" and "-Infinity", and `read_metrics` converts them back.
A run that resumes at step S first drops every line of a later step: those steps run again and are logged again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jpeg_dlm.errors import DataError
from jpeg_dlm.files import write_atomic

DIAGNOSIS = "diag_"  # prefix of the measures of `training.diagnosis`
HELDOUT = "heldout_"  # prefix of the measures on held-out text
NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsLog:
    """An open metrics file. `resume` is the step of the loaded checkpoint, or None for a new run."""

    def __init__(self, path: Path, resume: int | None) -> None:
        self.path = path
        _rewind(path, resume)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line; values may be tensors or arrays of one element."""
        row = {"step": int(step)} | {name: _plain(value) for name, value in values.items()}
        data = (json.dumps(row, allow_nan=False) + "\n").encode()
        whole = os.fstat(self._fd).st_size
        try:
            # One system call per line: after a kill the line is whole or absent, except on a power cut or a full disk.
            if os.write(self._fd, data) == len(data):
                return
            reason = "the disk is full"
        except OSError as error:
            reason = error.strerror or str(error)
        os.ftruncate(self._fd, whole)
        raise DataError(f"Cannot write '{self.path}' ({reason}): free some space and resume the run.")

    def sync(self) -> None:
        """Make all lines durable; called before saving a checkpoint, which needs the lines up to its step."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all rows in order. Ignore a torn last line, as a power cut leaves it; raise an error for damage elsewhere."""
    rows = []
    lines = _lines(path)
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is not None:
            rows.append({name: _number(value) for name, value in row.items()})
        elif number < len(lines):
            raise DataError(f"Line {number} of '{path}' is damaged: restore the file from a copy or remove the line.")
    return rows


def _rewind(path: Path, resume: int | None) -> None:
    """Drop the lines of steps after `resume` atomically, and damaged lines if only such lines follow."""
    lines = _lines(path) if path.exists() else []
    rows = [_parse(line) for line in lines]
    keep = [resume is not None and row is not None and row["step"] <= resume for row in rows]
    last = max((i for i, kept in enumerate(keep) if kept), default=-1)
    for number, row in enumerate(rows[: last + 1], 1):
        if row is None:
            raise DataError(f"Line {number} of '{path}' is damaged: restore the file from a copy or remove the line.")
    if not all(keep):
        write_atomic(path, b"".join(line for line, kept in zip(lines, keep, strict=True) if kept))


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"Cannot read '{path}' ({error.strerror or error}): give the directory of a run.") from error


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a row; return None if the line is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool)
    return row if whole else None


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _number(value: Any) -> Any:
    return NONFINITE.get(value, value) if isinstance(value, str) else value
