"""Records of the files and invocations of a run: two append-only files, each line a JSON object with its own digest.

    RUN/files.jsonl         every version of each file that the run wrote, with size and SHA-256, checked by `verify`
    RUN/invocations.jsonl   every `train` in the run: first step, options and machine

Checkpoints, prepared text, encoder and cached features have their own manifests, because they are also used elsewhere.
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
    """Append a durable line with its own digest; first remove a torn last line, as a power cut leaves it."""
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
    """Read all lines except a torn last one, each verified by its digest; an absent file has none."""
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
    """Write a file of a run and record its size and hash.

    A kill in between must not look like damage: recorded files must exist, and any recorded version is valid.
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
    """Return every recorded version of each file; runs of earlier versions have none."""
    files: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(run / FILES):
        files.setdefault(str(row.get("file")), []).append(row)
    return files


def check_recorded(run: Path, name: str, remedy: str = RESTORE) -> bool:
    """Raise an error if a file is not a version that the run wrote; return False if the file is not recorded."""
    versions = recorded(run).get(name)
    if versions:
        compare_file(run, name, versions, remedy)
    return bool(versions)


# ---------------------------------------------------------------- invocations


class Invocation:
    """One call of `train`, recorded once its first stage and step are known."""

    def __init__(self, run: Path, config: Config, processes: int) -> None:
        self.run, self.begun = run, False
        self.row = {"processes": processes, **writer(), "config": to_dict(config)}

    def begin(self, stage: str, step: int) -> None:
        """Record the invocation; do nothing for later stages of the same `train`."""
        if not self.begun:
            append_row(self.run / INVOCATIONS, {"stage": stage, "step": step, **self.row})
            self.begun = True
