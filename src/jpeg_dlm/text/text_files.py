"""Read documents from text files, plain or gzipped: anything that is not UTF-8 text is refused by name.

A document is a string with one paragraph per line and white space collapsed within lines, or for tokenizers that keep white
space the text as it is. A record with "input_ids" but no "text" is a row of token ids instead.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jpeg_dlm.errors import DataError
from jpeg_dlm.text.records import Ids, RecordReader
from jpeg_dlm.text.tokenizer import collapse

MARKER = "<|endoftext|>"
SUFFIXES = (".txt", ".md", ".jsonl")
BIG_FILE = 16 << 20  # larger files in a folder are split into several documents, which limits memory
LOOK_AHEAD = 1 << 20  # characters at the start of a file that are searched for markers and blank lines
LONGEST = 1 << 27  # characters of a line or document, which must fit into memory; text8 is one line of 100 million
# Text in a .gz file unpacks to 3 to 10 times its size. Past BOMB_BYTES, a ratio above BOMB_RATIO is refused.
BOMB_BYTES, BOMB_RATIO = 1 << 26, 100
# First bytes of each file format, from its specification; .docx, .epub and .odt are zip archives too.
ARCHIVES = {
    b"PK\x03\x04": "a zip archive", b"PK\x05\x06": "a zip archive", b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive", b"BZh91AY": "packed with bzip2", b"\xfd7zXZ\x00": "packed with xz",
    b"\x28\xb5\x2f\xfd": "packed with zstd", b"%PDF-": "a PDF document",
}  # fmt: skip

Document = str | Ids
Item = TypeVar("Item")


def text_files(folder: Path) -> list[Path]:
    """Return the text files below a folder in a fixed order, without hidden ones and those in hidden folders."""
    every = [p for p in folder.rglob("*") if p.is_file() and _kind(p)]
    found = [p for p in every if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    if not found:
        raise DataError(f"The folder '{folder}' holds no .txt, .md or .jsonl files (or .gz): name the folder with the text.")
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _kind(path: Path) -> str:
    """Return the suffix without .gz, or "" when the file is not a known kind of text."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def total_size(files: Iterable[Path]) -> int:
    """Estimate the bytes of unpacked text, for a progress bar: compressed text is about a third of its size."""
    return sum(p.stat().st_size * (3 if p.name.endswith(".gz") else 1) for p in files)


def fingerprint(files: list[Path], base: Path) -> str:
    """Hash the names, sizes, first and last 64 KB of all files: cheap, and changes with nearly every edit."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(os.fsencode(path.relative_to(base)) + f"\0{size}\0".encode())  # names need not be UTF-8
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return f"files:{digest.hexdigest()}"


def file_documents(files: Iterable[Path], reader: RecordReader | None = None) -> Iterator[Document]:
    """Yield the documents of several files: each is one, unless it holds records or is too large."""
    reader = reader or RecordReader()
    for path in files:
        if is_records(path) or path.stat().st_size > BIG_FILE:
            yield from documents_of(path, reader)
        else:
            lines = _limited(text_lines(path), path)
            yield "".join(lines) if reader.verbatim else "\n".join(_paragraphs(lines))


def documents_of(path: Path, reader: RecordReader) -> Iterator[Document]:
    """Return the documents of one file; raise `DataError` when it holds no text."""
    return _nonempty(_records(path, reader) if is_records(path) else _parts(path), path)


def is_records(path: Path) -> bool:
    """Return True if a file holds one record per line."""
    return _kind(path) == ".jsonl"


def _nonempty(stream: Iterator[Document], path: Path) -> Iterator[Document]:
    first = next(stream, None)
    if first is None:
        raise DataError(f"'{path}' holds no text: name a file with some.")
    yield first
    yield from stream


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain or gzipped; raise `DataError` for anything that is not UTF-8 text."""
    seen = False
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
            packed = start.startswith(b"\x1f\x8b")
            for magic, kind in ARCHIVES.items():
                if start.startswith(magic):
                    raise DataError(f"'{path}' is {kind}, not text: unpack it first and name the text file inside.")
            raw.seek(0)
            plain: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            text = io.TextIOWrapper(plain, encoding="utf-8-sig")
            most, read = max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size), 0
            while line := text.readline(LONGEST + 1):
                if len(line) > LONGEST:
                    raise DataError(f"'{path}' has a line of more than {LONGEST:,} characters: break it into several.")
                read += len(line)
                if packed and read > most:
                    raise DataError(
                        f"'{path}' unpacks to more than {BOMB_RATIO} times its size, so it is not text: leave it out."
                    )
                if "\0" in line:
                    raise DataError(f"'{path}' is a binary file (it holds NUL bytes): name a UTF-8 text file.")
                seen = seen or not line.isspace()
                yield line
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text ({error.reason}): convert it, for example with iconv.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' is a damaged .gz file ({error}): fetch it again.") from error
    except OSError as error:
        raise DataError(f"Cannot read '{path}': {error.strerror or error}.") from error
    if not seen:
        raise DataError(f"'{path}' is empty: name a file with text.")


def _limited(lines: Iterable[str], path: Path) -> Iterator[str]:
    """Yield the lines of one document; raise `DataError` when it is too long to fit into memory."""
    size = 0
    for line in lines:
        size += len(line)
        if size > LONGEST:
            raise DataError(
                f"'{path}' has a document of more than {LONGEST:,} characters: put a line {MARKER} between documents."
            )
        yield line


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Return paragraphs separated by blank lines, each on one line; without blank lines, each line is a paragraph."""
    stripped = [collapse(line) for line in lines]
    while stripped and not stripped[-1]:
        stripped.pop()
    if "" not in stripped:
        return stripped
    groups = itertools.groupby(stripped, key=bool)
    return [" ".join(group) for full, group in groups if full]


def _parts(path: Path) -> Iterator[str]:
    """Yield the parts between markers, else the paragraphs between blank lines, else the lines; the file's start decides."""
    head = {line.strip() for line in budgeted(text_lines(path), LOOK_AHEAD, len)}
    marked = MARKER in head
    if not marked and "" not in head:
        yield from filter(None, map(collapse, text_lines(path)))
        return
    lines = (line.strip() for line in text_lines(path))
    end = MARKER if marked else ""
    for ends, group in itertools.groupby(lines, key=lambda line: line == end):
        if not ends:
            paragraphs = _paragraphs(_limited(group, path))
            text = ("\n" if marked else " ").join(paragraphs)
            if text:
                yield text


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
            document = document_of(json.loads(line), reader)  # not strict: other fields of the record do not matter
        except (ValueError, RecursionError) as error:
            raise DataError(f"Line {number} of '{path}' is not a JSON object with a text field ({error}).") from error
        if document:
            yield document
    reader.check()


def document_of(record: Any, reader: RecordReader) -> Document:
    """Return the token ids of a record, or its text: as it is, or one paragraph per line."""
    value = reader.value(record)
    return value if reader.verbatim or not isinstance(value, str) else "\n".join(_paragraphs(value.splitlines()))
