"""Read sources of text as streams of documents, always in the same order.

A document is a string with one paragraph per line and white space collapsed within lines. A record with "input_ids" but
no "text" is a row of token ids instead. Each source is split into documents as follows:

| source | documents |
|---|---|
| one .txt or .md file | parts between lines that are only `<|endoftext|>`; else blank-line-separated paragraphs; else lines |
| .jsonl | each record: its "text", else its first text field |
| folder | one per .txt or .md file (in order of path; files above 16 MB as above), one per record of a .jsonl |
| any of these with .gz | the same |
| `sotu`, `sotu-modern` | one per speech; the latter those since 1945 |
| `wikipedia` | one per article of enwik8, prose only |
| `captions` | one per sentence: short ones of SNLI, each once |
| `tatoeba` | one per sentence: the English of Tatoeba's pairs with French and Spanish, each once |
| `stories`, `stories:N` | one per story that stories15M writes: 20,000, or N |
| `lm1b`, `openwebtext`, `hf:NAME[:SPLIT]` | one per record, streamed by the package `datasets` |
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpeg_dlm.errors import DataError, MissingPackageError, UsageError, reason_of
from jpeg_dlm.fetch.assets import ASSETS, fetch
from jpeg_dlm.text.captions import captions
from jpeg_dlm.text.stories import PART, VERSION, stories_of, written
from jpeg_dlm.text.tatoeba import english, pair_lines
from jpeg_dlm.text.tokenizer import collapse
from jpeg_dlm.text.wikipedia import wikipedia_articles

if TYPE_CHECKING:
    from jpeg_dlm.machine.console import Console

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
WIKIPEDIA_BYTES = 51_000_000  # measured: size of enwik8 after cleaning
CAPTIONS_BYTES, TATOEBA_BYTES = 4_470_000, 6_240_000  # measured: size of the sentences that are kept
SPEECHES = {"sotu": "", "sotu-modern": "1945"}  # first year of each corpus
CARRIED = {"wikipedia": "enwik8", "captions": "captions", "tatoeba": "tatoeba"} | dict.fromkeys(SPEECHES, "sotu")  # assets
HUB_SETS = {"lm1b": "dvruette/lm1b:train", "openwebtext": "Skylion007/openwebtext:train"}


Ids = tuple[int, ...]
Document = str | Ids


@dataclass(frozen=True)
class Corpus:
    """A source of documents, its approximate size in bytes, and a fingerprint that changes when the source changes."""

    stream: Callable[[int], Iterator[Document]]  # takes the number of documents to skip
    total_bytes: int | None
    fingerprint: str


def bring(source: str, out: Path, console: Console) -> None:
    """Download or generate the files of a named corpus, unless it is already prepared in `out`.

    Progress is shown on `console`, and ends before the progress of the preparation begins.
    """
    if (out / "index.json").is_file():
        return
    count = stories_of(source)
    if count:
        written(count, console)
    elif source in CARRIED:
        fetch(CARRIED[source], console=console)


def open_corpus(source: str, detokenize: str = "none") -> Corpus:
    """Find `source`; read only as much as is needed to know that it exists."""
    corpus = _find(source)
    if detokenize == "lm1b":
        spaced = lambda document: detokenize_lm1b(document) if isinstance(document, str) else document  # noqa: E731
        return Corpus(lambda skip: map(spaced, corpus.stream(skip)), corpus.total_bytes, corpus.fingerprint)
    return corpus


def documents(source: str, detokenize: str = "none", skip: int = 0) -> Iterator[Document]:
    """Return the documents of `source` after the first `skip`."""
    return open_corpus(source, detokenize).stream(skip)


def _find(source: str) -> Corpus:
    if not source:
        raise UsageError("data.source is not set: name a file or folder of text, 'sotu', 'wikipedia' or hf:NAME.")
    if source in HUB_SETS or source.startswith("hf:"):
        name = HUB_SETS.get(source, source.removeprefix("hf:"))
        return Corpus(lambda skip: _hub_documents(name, skip), None, f"hub:{name}")
    if source == "wikipedia":
        return Corpus(
            lambda skip: _skipping(wikipedia_articles(text_lines(fetch("enwik8"))), skip), WIKIPEDIA_BYTES, _pinned("enwik8")
        )
    count = stories_of(source)
    if count:
        files = written(count)
        size = _size(files) * count // (PART * len(files))
        return Corpus(
            lambda skip: itertools.islice(_documents(files), skip, count), size, f"{_pinned('stories15m')}:{VERSION}:{count}"
        )
    if source == "captions":
        files = _files(fetch("captions"))
        return Corpus(
            lambda skip: _skipping(captions(itertools.chain.from_iterable(map(text_lines, files))), skip),
            CAPTIONS_BYTES,
            _pinned("captions"),
        )
    if source == "tatoeba":
        folder = fetch("tatoeba")
        return Corpus(lambda skip: _skipping(english(pair_lines(folder)), skip), TATOEBA_BYTES, _pinned("tatoeba"))
    if source in SPEECHES:
        files = [p for p in _files(fetch("sotu")) if p.name >= SPEECHES[source]]  # names begin with the year
        return Corpus(lambda skip: _skipping(_documents(files), skip), _size(files), _pinned("sotu"))
    path = Path(os.path.expanduser(source))  # Path.expanduser fails for an unknown user
    if (path / "index.json").is_file():
        raise DataError(f"'{path}' is already prepared: pass it as the prepared folder, or prepare from the original text.")
    if path.is_dir():
        files = _files(path)
        return Corpus(lambda skip: _skipping(_documents(files), skip), _size(files), _mark(files, path))
    if path.is_file():
        return Corpus(lambda skip: _skipping(_file(path), skip), _size([path]), _mark([path], path.parent))
    raise DataError(f"No text at '{source}': no such file or folder; the named corpora are {', '.join(NAMED)} and hf:NAME.")


NAMED = (*CARRIED, "stories", *HUB_SETS)


def _pinned(name: str) -> str:
    return f"asset:{ASSETS[name].archive_sha256}"


def _skipping(stream: Iterator[Document], skip: int) -> Iterator[Document]:
    return itertools.islice(stream, skip, None)


# ---------------------------------------------------------------- files and folders


def _files(folder: Path) -> list[Path]:
    """Return the text files below a folder in a fixed order, without hidden ones."""
    found = [p for p in folder.rglob("*") if p.is_file() and _kind(p) and not p.relative_to(folder).as_posix().startswith(".")]
    if not found:
        raise DataError(f"The folder '{folder}' holds no .txt, .md or .jsonl files (or .gz): name the folder with the text.")
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _kind(path: Path) -> str:
    """Return the suffix without .gz, or "" when the file is not a known kind of text."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def _size(files: Iterable[Path]) -> int:
    # Compressed text is about a third of its size; the estimate only feeds a progress bar.
    return sum(p.stat().st_size * (3 if p.name.endswith(".gz") else 1) for p in files)


def _mark(files: list[Path], base: Path) -> str:
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


def _documents(files: Iterable[Path]) -> Iterator[Document]:
    for path in files:
        if _kind(path) == ".jsonl" or path.stat().st_size > BIG_FILE:
            yield from _file(path)
        else:
            yield "\n".join(_paragraphs(_limited(text_lines(path), path)))


def _file(path: Path) -> Iterator[Document]:
    """Return the documents of one file; raise `DataError` when it holds no text."""
    return _nonempty(_records(path) if _kind(path) == ".jsonl" else _parts(path), path)


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
    """Yield the documents of one text file by the table above; the start of the file decides which rule applies."""
    head = list(itertools.islice(_budget(text_lines(path), LOOK_AHEAD), 1 << 20))
    marked = any(line.strip() == MARKER for line in head)
    blank = "" in [line.strip() for line in head]
    if not marked and not blank:
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


def _budget(lines: Iterable[str], characters: int) -> Iterator[str]:
    for line in lines:
        yield line
        characters -= len(line)
        if characters < 0:
            return


def _records(path: Path) -> Iterator[Document]:
    for number, line in enumerate(text_lines(path), 1):
        if line.isspace():
            continue
        try:
            document = _document_of(json.loads(line))  # not strict: other fields of the record do not matter
        except (ValueError, RecursionError) as error:
            raise DataError(f"Line {number} of '{path}' is not a JSON object with a text field ({error}).") from error
        if document:
            yield document


def _document_of(record: Any) -> Document:
    """Return the text or token ids of a record: its field "text", else "input_ids", else its first string field."""
    if not isinstance(record, dict):
        raise ValueError("not an object")
    text = record.get("text")
    ids = record.get("input_ids")
    if not isinstance(text, str) and isinstance(ids, list):
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("input_ids are not whole numbers from 0")
        return tuple(ids)
    if not isinstance(text, str):
        text = next((v for v in record.values() if isinstance(v, str)), None)
    if text is None:
        raise ValueError(f"no text among the fields {', '.join(map(str, record)) or '(none)'}")
    return "\n".join(_paragraphs(text.splitlines()))


def _hub_documents(name: str, skip: int) -> Iterator[Document]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingPackageError("datasets", "data", f"The data set '{name}'") from error
    path, _, split = name.partition(":")
    try:
        stream = datasets.load_dataset(path, split=split or "train", streaming=True).skip(skip)
        for record in stream:
            # Keep empty records: the number of documents read is the number to skip when resuming.
            yield _document_of(record)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"Cannot read the data set '{name}' ({reason_of(error)}): check the name, its split and the network."
        ) from error


# ---------------------------------------------------------------- LM1B


_LM1B_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r" (?='(?:s|S|m|M|d|D|t|T|ll|LL|re|RE|ve|VE)\b)", ""),  # it 's, don 't
        (r" (?=(?:n't|N'T)\b)", ""),
        (r"(?<=\ws) ' (?=[a-z])", "' "),  # the players ' union
        (r" (?=[.,;:!?%)\]}](?:\s|$|[\"'.,;:!?)]))", ""),
        (r"(?<=[(\[{$£€#]) ", ""),
        (r"(?<=\d)(?:: | / )(?=\d)", lambda m: m[0].strip()),  # 10 : 30 (the first space is already removed) and 3 / 4
        (r"(?<=\S) @-@ (?=\S)", "-"),
    ]
]


def detokenize_lm1b(text: str) -> str:
    """Undo the Penn-Treebank-like spacing of the One Billion Word Benchmark, line by line."""
    return "\n".join(_detokenize_line(line) for line in text.split("\n"))


def _detokenize_line(line: str) -> str:
    line = _pair_quotes(line)
    for pattern, replacement in _LM1B_RULES:
        line = pattern.sub(replacement, line)
    return line


def _pair_quotes(line: str) -> str:
    """Attach stand-alone quotes to the word they quote: `` opens, '' closes, and " opens and closes in turn."""
    words: list[str] = []
    opened = lean = False  # lean: the next word follows an opening quote without a space
    for word in line.split():
        if word == "''" or (word == '"' and opened):
            words[-1:] = [words[-1] + '"'] if words else ['"']
            opened = lean = False
        elif word in ('"', "``"):
            words.append('"')
            opened = lean = True
        elif lean:
            words[-1] += word
            lean = False
        else:
            words.append(word)
    return " ".join(words)
