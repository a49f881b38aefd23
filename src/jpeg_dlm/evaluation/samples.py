"""Read sample files of any program: one text or JSON value per line; a cut last line is skipped and counted."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpeg_dlm.errors import DataError

SUFFIXES = (".txt", ".jsonl")
LARGEST_FILE = 1 << 30  # bytes; a hundred thousand long texts, which must fit in memory
LARGEST_ID = 1 << 31
GENERATED, REAL = ("prediction", "text", "generated"), ("reference", "text", "prediction")


@dataclass(frozen=True)
class SampleFile:
    """The texts of one file, with their token ids and references if every line has them."""

    path: Path
    sha256: str
    texts: list[str]
    token_ids: list[list[int]] | None = None
    references: list[str] | None = None
    cut_lines: int = 0  # 1 if the last line is incomplete because its program was stopped

    @property
    def blank(self) -> int:
        return sum(not text.strip() for text in self.texts)

    @property
    def origin(self) -> str:
        """The file and its content, as results name them."""
        return f"{self.path.name} {self.sha256[:12]}"


def is_samples(path: Path) -> bool:
    """Return True if a path names a sample file, not a model."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def read_samples(path: Path, fields: Sequence[str] = GENERATED) -> SampleFile:
    """Read every text of a file; from JSON objects, the first of `fields` that is present, else the first string."""
    if not is_samples(path):
        raise DataError(f"'{path}' is not a file of texts: give .txt with one text per line, or .jsonl.")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise DataError(f"'{path}' has more than {LARGEST_FILE:,} bytes: score fewer texts at once.")
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read '{path}': {error.strerror or error}.") from error
    digest, raw = hashlib.sha256(raw).hexdigest(), raw.removeprefix(codecs.BOM_UTF8)
    if path.suffix.lower() == ".txt":
        found = SampleFile(path, digest, [text for _, text in _lines(raw, path)])
    else:
        found = _read_jsonl(raw, path, digest, fields)
    if len(found.texts) == found.blank:
        raise DataError(f"'{path}' holds no text: every line is blank.")
    return found


def _lines(raw: bytes, path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines; only a line feed ends one, because texts may contain other separators."""
    lines = raw.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            yield number, line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"Line {number} of '{path}' is not UTF-8: convert the file, or remove the line.") from error


def _read_jsonl(raw: bytes, path: Path, digest: str, fields: Sequence[str]) -> SampleFile:
    # A file may be cut in the middle of a character, so everything after the last line feed may be invalid.
    whole, _, tail = raw.rpartition(b"\n")
    rows = [(number, _parse(line, number, path)) for number, line in _lines(whole + b"\n", path) if line.strip()]
    cut = 0
    if tail.strip():
        try:
            rows.append((raw.count(b"\n") + 1, json.loads(tail.decode("utf-8"))))
        except (ValueError, RecursionError):
            cut = 1
    values = [row for _, row in rows]
    return SampleFile(
        path, digest, [_text(row, number, path, fields) for number, row in rows], _all_ids(values), _all_references(values), cut
    )


def _parse(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"Line {number} of '{path}' is not JSON: repair or remove it.") from error


def _text(row: Any, number: int, path: Path, fields: Sequence[str]) -> str:
    if isinstance(row, dict):
        named = [row[name] for name in fields if isinstance(row.get(name), str)]
        row = named[0] if named else next((v for v in row.values() if isinstance(v, str)), None)
    if not isinstance(row, str):
        raise DataError(f"Line {number} of '{path}' holds no text: give a string, or an object with '{fields[0]}'.")
    # JSON can contain lone surrogates, which no tokenizer accepts.
    return row.encode("utf-8", "replace").decode("utf-8")


def _all_ids(rows: Sequence[Any]) -> list[list[int]] | None:
    ids = [row.get("token_ids") if isinstance(row, dict) else None for row in rows]
    good = all(isinstance(one, list) and all(type(i) is int and 0 <= i < LARGEST_ID for i in one) for one in ids)
    return ids if ids and good else None  # type: ignore[return-value]


def _all_references(rows: Sequence[Any]) -> list[str] | None:
    pairs = all(isinstance(row, dict) and any(name in row for name in GENERATED) for row in rows)
    found = [row.get("reference") for row in rows] if pairs else []
    return found if found and all(isinstance(one, str) and one.strip() for one in found) else None  # type: ignore[return-value]
