"""What a run wrote and how it was called: two files that only grow, one JSON object with a digest of itself per line.

    RUN/files.jsonl         every version of a file that the run wrote, with size and SHA-256; `verify` compares
    RUN/invocations.jsonl   every `train` that worked in the run: the step at which it began, its options and its machine

Checkpoints, prepared text, encoder and cached features have manifests of their own, because they are used elsewhere too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.files import RESTORE, compare_file, write_atomic, writer
from jpeg_dlm.strict_json import parse_json

FILES, INVOCATIONS = "files.jsonl", "invocations.jsonl"


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a durable line with a digest of itself; what a power cut left of an unfinished one goes first."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "r+b", closefd=False) as handle:
            handle.truncate(handle.read().rfind(b"\n") + 1)
            handle.seek(0, os.SEEK_END)
            handle.write(_sealed(row) + b"\n")
            handle.flush()
            os.fsync(fd)
    finally:
        os.close(fd)


def _sealed(row: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(row, allow_nan=False).encode()).hexdigest()
    return json.dumps({**row, "digest": digest}).encode()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All lines but a torn last one, each proved by its digest; none where there is no such file."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise CheckpointError(f"Cannot read '{path}' ({error.strerror or error}): restore it from a copy.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = {name: value for name, value in parse_json(line).items() if name != "digest"}
        except (ValueError, AttributeError):
            row = {}
        if _sealed(row) != line:
            raise CheckpointError(f"Line {number} of '{path}' is damaged: restore the file from a copy.")
        rows.append(row)
    return rows


# ---------------------------------------------------------------- files


def write_recorded(run: Path, name: str, content: bytes | str) -> None:
    """Write a file of a run, and its size and hash into the record.

    A kill in between must not look like damage: a new file comes before its record, because what is recorded has to be
    there, and a new version of a file after it, because any recorded version is whole.
    """
    raw = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    row = {"file": name, "sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}
    new = not (run / name).exists()
    if new:
        write_atomic(run / name, raw)
    if row not in recorded(run).get(name, []):
        append_row(run / FILES, row)
    if not new:
        write_atomic(run / name, raw)


def recorded(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Every version of each file that a run recorded; nothing for a run of an earlier version."""
    files: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(run / FILES):
        files.setdefault(str(row.get("file")), []).append(row)
    return files


def check_recorded(run: Path, name: str, remedy: str = RESTORE) -> bool:
    """Refuse a file that is no version that the run wrote; False where nothing is recorded of it."""
    versions = recorded(run).get(name)
    if versions:
        compare_file(run, name, versions, remedy)
    return bool(versions)


# ---------------------------------------------------------------- invocations


class Invocation:
    """One `train`, recorded once it is known at which step of which stage it begins."""

    def __init__(self, run: Path, config: Config, processes: int) -> None:
        self.run, self.begun = run, False
        self.row = {"processes": processes, **writer(), "config": to_dict(config)}

    def begin(self, stage: str, step: int) -> None:
        """Record it; stages that follow in the same `train` are not its beginning."""
        if not self.begun:
            append_row(self.run / INVOCATIONS, {"stage": stage, "step": step, **self.row})
            self.begun = True
