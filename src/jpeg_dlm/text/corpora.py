"""Sources of text as streams of documents, always in the same order.

A document is a string whose paragraphs are lines; within a line, white space is collapsed. A record that has no "text" but
"input_ids" is a row of token ids instead. What counts as a document:

| source | documents |
|---|---|
| one .txt or .md file | parts between lines that are only `<|endoftext|>`; else blank-line-separated paragraphs; else lines |
| .jsonl | each record: its "text", else its first text field |
| folder | one per .txt or .md file (in order of path; files above 16 MB as above), one per record of a .jsonl |
| any of these with .gz | the same |
| `sotu`, `sotu-modern` | one per speech; the latter those since 1945 |
| `wikipedia` | one per article of enwik8, prose only |
| `captions` | one per sentence: short ones of SNLI, each once |
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

from jpeg_dlm.assets import ASSETS, fetch
from jpeg_dlm.errors import DataError, MissingPackageError, UsageError, reason_of
from jpeg_dlm.text.captions import captions
from jpeg_dlm.text.stories import PART, VERSION, stories_of, written
from jpeg_dlm.text.tokenizer import collapse
from jpeg_dlm.text.wikipedia import wikipedia_articles

if TYPE_CHECKING:
    from jpeg_dlm.training.console import Console

MARKER = "<|endoftext|>"
SUFFIXES = (".txt", ".md", ".jsonl")
BIG_FILE = 16 << 20  # a larger file of a folder is many documents, so that no document has to fit twice in memory
LOOK_AHEAD = 1 << 20  # how far into a file we look for markers and blank lines
LONGEST = 1 << 27  # characters of a line and of a document, which have to fit into memory; text8 is one line of 100 million
BOMB_BYTES, BOMB_RATIO = 1 << 26, 100  # past so many bytes, a .gz that grew so many times is no text, which grows 3 to 10 times
# How files begin, by the specifications of their formats; .docx, .epub and .odt are zip archives too.
ARCHIVES = {
    b"PK\x03\x04": "a zip archive", b"PK\x05\x06": "a zip archive", b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive", b"BZh91AY": "packed with bzip2", b"\xfd7zXZ\x00": "packed with xz",
    b"\x28\xb5\x2f\xfd": "packed with zstd", b"%PDF-": "a PDF document",
}  # fmt: skip
WIKIPEDIA_BYTES = 51_000_000  # measured: what the cleaner leaves of enwik8
CAPTIONS_BYTES = 4_470_000  # measured: the sentences that are kept
SPEECHES = {"sotu": "", "sotu-modern": "1945"}  # corpus and the first year it takes
HUB_SETS = {"lm1b": "dvruette/lm1b:train", "openwebtext": "Skylion007/openwebtext:train"}


Ids = tuple[int, ...]
Document = str | Ids


@dataclass(frozen=True)
class Corpus:
    """A source that was found: its documents, about how many bytes they are, and a mark that changes when it does."""

    stream: Callable[[int], Iterator[Document]]  # takes the number of documents to skip
    total_bytes: int | None
    fingerprint: str


def bring(source: str, out: Path, console: Console) -> None:
    """Download or write what a named corpus needs, unless it is prepared in `out` already.

    Its progress is shown on `console`, so that it is over before that of the preparation begins.
    """
    if (out / "index.json").is_file():
        return
    count = stories_of(source)
    if count:
        written(count, console)
    elif name := {"wikipedia": "enwik8", "captions": "captions"}.get(source, "sotu" if source in SPEECHES else ""):
        fetch(name, console=console)


def open_corpus(source: str, detokenize: str = "none") -> Corpus:
    """Find `source`; nothing is read yet but what is needed to know that it is there."""
    corpus = _find(source)
    if detokenize == "lm1b":
        spaced = lambda document: detokenize_lm1b(document) if isinstance(document, str) else document  # noqa: E731
        return Corpus(lambda skip: map(spaced, corpus.stream(skip)), corpus.total_bytes, corpus.fingerprint)
    return corpus


def documents(source: str, detokenize: str = "none", skip: int = 0) -> Iterator[Document]:
    """The documents of `source` after the first `skip`."""
    return open_corpus(source, detokenize).stream(skip)


def _find(source: str) -> Corpus:
    if not source:
        raise UsageError("No text was named: set data.source to a file or folder of text, to 'sotu', 'wikipedia' or hf:NAME.")
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
    if source in SPEECHES:
        files = [p for p in _files(fetch("sotu")) if p.name >= SPEECHES[source]]  # names begin with the year
        return Corpus(lambda skip: _skipping(_documents(files), skip), _size(files), _pinned("sotu"))
    path = Path(os.path.expanduser(source))  # Path's own refuses a user that does not exist
    if (path / "index.json").is_file():
        raise DataError(f"'{path}' is already prepared: name it where blocks are read, or prepare from its original text.")
    if path.is_dir():
        files = _files(path)
        return Corpus(lambda skip: _skipping(_documents(files), skip), _size(files), _mark(files, path))
    if path.is_file():
        return Corpus(lambda skip: _skipping(_file(path), skip), _size([path]), _mark([path], path.parent))
    raise DataError(f"No text at '{source}': no such file or folder; the named corpora are {', '.join(NAMED)} and hf:NAME.")


NAMED = (*SPEECHES, "wikipedia", "captions", "stories", *HUB_SETS)


def _pinned(name: str) -> str:
    return f"asset:{ASSETS[name].archive_sha256}"


def _skipping(stream: Iterator[Document], skip: int) -> Iterator[Document]:
    return itertools.islice(stream, skip, None)


# ---------------------------------------------------------------- files and folders


def _files(folder: Path) -> list[Path]:
    """Text files below a folder in a fixed order; hidden ones are left alone."""
    found = [p for p in folder.rglob("*") if p.is_file() and _kind(p) and not p.relative_to(folder).as_posix().startswith(".")]
    if not found:
        raise DataError(f"The folder '{folder}' holds no .txt, .md, .jsonl or .gz of these: name the folder with the text.")
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _kind(path: Path) -> str:
    """The suffix that says how to read the file, without .gz; empty when it is not text."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def _size(files: Iterable[Path]) -> int:
    # Text is about a third of its size when packed; this only feeds a progress bar.
    return sum(p.stat().st_size * (3 if p.name.endswith(".gz") else 1) for p in files)


def _mark(files: list[Path], base: Path) -> str:
    """Names, sizes and both ends of all files: cheap, and different for nearly every change."""
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
    """The documents of one file; a file without any text is refused."""
    return _nonempty(_records(path) if _kind(path) == ".jsonl" else _parts(path), path)


def _nonempty(stream: Iterator[Document], path: Path) -> Iterator[Document]:
    first = next(stream, None)
    if first is None:
        raise DataError(f"'{path}' holds no text: name a file with some.")
    yield first
    yield from stream


def text_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, packed or not; anything that is not UTF-8 text is refused by name."""
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
                        f"'{path}' unpacks to more than {BOMB_RATIO} times its size, which no text does: leave it out."
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
    """The lines of one document, which must fit into memory."""
    size = 0
    for line in lines:
        size += len(line)
        if size > LONGEST:
            raise DataError(
                f"'{path}' has a document of more than {LONGEST:,} characters: put a line {MARKER} between documents."
            )
        yield line


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Blank-line-separated paragraphs, each on one line; without a blank line, each line is one."""
    stripped = [collapse(line) for line in lines]
    while stripped and not stripped[-1]:
        stripped.pop()
    if "" not in stripped:
        return stripped
    groups = itertools.groupby(stripped, key=bool)
    return [" ".join(group) for full, group in groups if full]


def _parts(path: Path) -> Iterator[str]:
    """Documents of one text file by the rule in the table above; the file's beginning decides which rule holds."""
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
            document = _document_of(json.loads(line))  # not strictly: what else a record holds is no concern of ours
        except (ValueError, RecursionError) as error:
            raise DataError(f"Line {number} of '{path}' is not a JSON object with a text field ({error}).") from error
        if document:
            yield document


def _document_of(record: Any) -> Document:
    """The text of a record, or its token ids: its field "text", else "input_ids", else its first field that is a string."""
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
            # Empty records stay, so that the number of documents read is the number to skip on resuming.
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
        (r"(?<=\d)(?:: | / )(?=\d)", lambda m: m[0].strip()),  # 10 : 30, whose first space is gone by now, and 3 / 4
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
    """Quotes that stand alone lean on the word they quote: every second one closes, `` opens and '' closes."""
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
