"""Finished pieces of a long evaluation on disk: each is a file named after a hash of everything that it depends on.

An evaluation that was stopped, or that is asked again with one option changed, takes from here what is already done.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpeg_dlm.files import write_atomic
from jpeg_dlm.machine.collectives import on_main


def key_of(values: Mapping[str, Any]) -> str:
    """sha256 of JSON values in canonical form."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Parts:
    """A folder of parts; without one nothing is kept."""

    folder: Path | None = None

    def get_or_make(self, label: str, depends_on: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `make` gives, from the disk if it was made before of the same; `label` only makes the name readable.

        All processes call `make` together; the main one reads and writes, and all return what it made.
        """
        key = key_of(depends_on)
        path = self.folder and self.folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', label)[:80]}-{key[:16]}.json"
        found = on_main(lambda: self._read(path, key)) if path else None
        if found is None:
            made = make()
            found = on_main(lambda: self._write(path, key, depends_on, made) if path else made)
        return found

    @staticmethod
    def _write(path: Path, key: str, depends_on: Mapping[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"key": key, "depends_on": dict(depends_on), "value": made}
        write_atomic(path, json.dumps(content, ensure_ascii=False, default=str) + "\n")
        return json.loads(json.dumps(made))  # the same types as when it is read again

    @staticmethod
    def _read(path: Path, key: str) -> dict[str, Any] | None:
        """A part with this very key; one that is damaged is made again."""
        try:
            content = json.loads(path.read_text("utf-8"))
            return content["value"] if content["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
