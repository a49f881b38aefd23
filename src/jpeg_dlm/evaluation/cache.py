"""Finished pieces of a long evaluation on disk, each a file named after a hash of everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpeg_dlm.util.distributed import on_main
from jpeg_dlm.util.files import write_atomic


def key_of(values: Mapping[str, Any]) -> str:
    """sha256 of JSON values in canonical form."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


@dataclass(frozen=True)
class DiskCache:
    """A folder of parts; without one nothing is kept."""

    folder: Path | None = None

    def get_or_compute(
        self, label: str, depends_on: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return what `compute` gives, from the disk if it was computed before; `label` only makes the name readable.

        All processes call `compute` together; the main one reads and writes, and all return what it computed.
        """
        key = key_of(depends_on)
        path = self.folder and self.folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', label)[:80]}-{key[:16]}.json"
        value = on_main(lambda: self._read(path, key)) if path else None
        if value is None:
            computed = compute()
            value = on_main(lambda: self._write(path, key, depends_on, computed) if path else computed)
        return value

    @staticmethod
    def _write(path: Path, key: str, depends_on: Mapping[str, Any], computed: dict[str, Any]) -> dict[str, Any]:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"key": key, "depends_on": dict(depends_on), "value": computed}
        write_atomic(path, json.dumps(content, ensure_ascii=False, default=str) + "\n")
        return json.loads(json.dumps(computed))  # the same types as when it is read again

    @staticmethod
    def _read(path: Path, key: str) -> dict[str, Any] | None:
        """A part with this very key; one that is damaged is computed again."""
        try:
            content = json.loads(path.read_text("utf-8"))
            return content["value"] if content["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
