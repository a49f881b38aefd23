"""Read documents from UTF-8 text files, plain or gzipped, and from records.

A document is a string with one paragraph per line and white space collapsed within lines, or for tokenizers that keep white
space the text as it is. A record with "input_ids" but no "text" is a row of token ids instead.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jpeg_dlm.text.tokenizer import collapse
from jpeg_dlm.util.errors import DataError

MARKER = "<|endoftext|>"
SUFFIXES = (".txt", ".md", ".jsonl")
BIG_FILE = 16 << 20  # larger files in a folder are split into several documents, which limits memory
LOOK_AHEAD = 1 << 20  # characters at the start of a file that are searched for markers and blank lines
ENDS = 1 << 16  # bytes at both ends of a file that its fingerprint covers

Document = str | tuple[int, ...]
Item = TypeVar("Item")


def paragraphs(lines: Iterable[str]) -> str:
    """Return the paragraphs between blank lines, each on one line; without blank lines, each line is a paragraph."""
    stripped = [collapse(line) for line in lines]
    while stripped and not stripped[-1]:
        stripped.pop()
    if "" not in stripped:
        return "\n".join(stripped)
    groups = itertools.groupby(stripped, key=bool)
    return "\n".join(" ".join(group) for full, group in groups if full)


@dataclass(frozen=True)
class RecordReader:
    """Reads one field of records: the named one, else "text", else "input_ids", else the only one with text."""

    field: str = ""
    verbatim: bool = False  # keep the white space of documents

    def document(self, record: Any) -> Document:
        """Return the text or token ids of a record; raise ValueError if it has none, or several texts to choose from."""
        if not isinstance(record, dict):
            raise ValueError("not an object")
        fields = dict(_fields(record))
        value = fields.get(self.field or self._choose(fields))
        if isinstance(value, list):
            if not all(type(i) is int and i >= 0 for i in value):
                raise ValueError("the ids are not whole numbers from 0")
            return tuple(value)
        if not isinstance(value, str):
            raise ValueError(f"no text {f'in {self.field!r} ' if self.field else ''}among the fields {', '.join(fields)}")
        return value if self.verbatim else paragraphs(value.splitlines())

    def _choose(self, fields: dict[str, Any]) -> str:
        if isinstance(fields.get("text"), str):
            return "text"
        if isinstance(fields.get("input_ids"), list):
            return "input_ids"
        texts = [name for name, value in fields.items() if isinstance(value, str)]
        if len(texts) > 1:
            raise ValueError(f"no field 'text': name one of {', '.join(texts)} with --data.field")
        return texts[0] if texts else "text"


def _fields(record: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all fields, those of nested records with dots in their names."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def text_files(folder: Path) -> list[Path]:
    """Return the text files below a folder in a fixed order, without hidden ones and those in hidden folders."""
    files = [p for p in folder.rglob("*") if p.is_file() and _kind(p) in SUFFIXES]
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    if not files:
        raise DataError(f"The folder '{folder}' holds no .txt, .md or .jsonl files (or .gz): name the folder with the text.")
    return sorted(files, key=lambda p: p.relative_to(folder).as_posix())


def _kind(path: Path) -> str:
    """Return the suffix without .gz."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def is_records(path: Path) -> bool:
    """Return True if a file holds one record per line."""
    return _kind(path) == ".jsonl"


def total_size(files: Iterable[Path]) -> int:
    """Estimate the bytes of unpacked text, for a progress bar: compressed text is about a third of its size."""
    return sum(p.stat().st_size * (3 if p.name.endswith(".gz") else 1) for p in files)


def fingerprint(files: list[Path], base: Path) -> str:
    """Hash the names, sizes and both ends of all files: cheap, and changes with nearly every edit."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(os.fsencode(path.relative_to(base)) + f"\0{size}\0".encode())  # names need not be UTF-8
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read())
    return f"files:{digest.hexdigest()}"


def file_documents(files: Iterable[Path], reader: RecordReader) -> Iterator[Document]:
    """Yield the documents of several files: each is one, unless it holds records or is too large."""
    for path in files:
        if is_records(path) or path.stat().st_size > BIG_FILE:
            yield from documents_of(path, reader)
        else:
            yield "".join(text_lines(path)) if reader.verbatim else paragraphs(text_lines(path))


def documents_of(path: Path, reader: RecordReader) -> Iterator[Document]:
    """Yield the documents of one file; raise `DataError` when it holds none."""
    empty = True
    for document in _records(path, reader) if is_records(path) else _parts(path):
        empty = False
        yield document
    if empty:
        raise DataError(f"'{path}' holds no text: name a file with some.")


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain or gzipped; raise `DataError` if it is anything else."""
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                if "\0" in line:
                    raise DataError(f"'{path}' is a binary file (it holds NUL bytes): name a UTF-8 text file.")
                yield line
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text ({error.reason}): unpack or convert it and name the text file.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Cannot read '{path}' ({getattr(error, 'strerror', None) or error}): name another file.") from error


def _parts(path: Path) -> Iterator[str]:
    """Yield the parts between markers, else the paragraphs between blank lines, else the lines; the file's start decides."""
    head = {line.strip() for line in budgeted(text_lines(path), LOOK_AHEAD, len)}
    lines, marked = (line.strip() for line in text_lines(path)), MARKER in head
    if not marked and "" not in head:
        yield from filter(None, map(collapse, lines))
        return
    end = MARKER if marked else ""
    for ends, group in itertools.groupby(lines, key=lambda line: line == end):
        text = "" if ends else paragraphs(group)
        if text:
            yield text if marked else text.replace("\n", " ")


def budgeted(items: Iterable[Item], characters: int, length: Callable[[Item], int]) -> Iterator[Item]:
    """Yield items until their total length exceeds `characters`."""
    for item in items:
        yield item
        characters -= length(item)
        if characters < 0:
            return


def _records(path: Path, reader: RecordReader) -> Iterator[Document]:
    for number, line in enumerate(text_lines(path), 1):
        if line.isspace():
            continue
        try:
            document = reader.document(json.loads(line))  # not strict: other fields of the record do not matter
        except (ValueError, RecursionError) as error:
            raise DataError(f"Line {number} of '{path}' is not a JSON object with a text ({error}).") from error
        if document:
            yield document
