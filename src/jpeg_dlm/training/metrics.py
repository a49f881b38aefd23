"""Files of a run with one JSON object per line: `metrics.jsonl`, and `invocations.jsonl`, which names every `train` in it.

Every line of metrics has a "step"; training terms and held-out terms of a step are separate lines. Numbers that are not
finite are written as NaN, Infinity and -Infinity, as Python reads them.
A run that resumes at step S first drops every line of a later step: those steps run again and are logged again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jpeg_dlm.util.errors import DataError
from jpeg_dlm.util.files import environment, write_atomic

HELDOUT = "heldout_"  # prefix of the measures on held-out text
INVOCATIONS = "invocations.jsonl"


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """An open metrics file. `resume` is the step of the loaded checkpoint, or None for a new run."""

    def __init__(self, path: Path, resume: int | None) -> None:
        self.path = path
        if path.exists():  # rewriting also drops a torn last line
            kept = [row for row in read_metrics(path) if resume is not None and row["step"] <= resume]
            write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(path, "a", encoding="utf-8")  # closed by the `with` block of the log

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line; one that a kill or a full disk tears is dropped when the run resumes."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make all lines durable; called before saving a checkpoint, which needs the lines up to its step."""
        os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all rows in order, without a torn last line, as a power cut leaves it; raise an error for damage elsewhere."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise DataError(f"Line {number} of '{path}' is damaged: restore the file from a copy or remove the line.")
        rows.append(row)
    return rows


def log_invocation(run: Path, stage: str, step: int, processes: int) -> None:
    """Append the words, options and machine of this process, which begins or goes on with `stage` at `step`."""
    config = json.loads((run / "config.json").read_text("utf-8"))
    row = {"stage": stage, "step": step, "processes": processes, **environment(), "argv": sys.argv, "config": config}
    with open(run / INVOCATIONS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_invocations(run: Path) -> list[dict[str, Any]]:
    """Return all lines as `read_metrics` does; none if there is no file."""
    return read_metrics(run / INVOCATIONS) if (run / INVOCATIONS).is_file() else []
