"""Find sources of text and stream their documents, always in the same order; docs/data.md lists the sources.

A document is a string with one paragraph per line and white space collapsed within lines, or for tokenizers that keep white
space the text as it is. A record with "input_ids" but no "text" is a row of token ids instead.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.cleaning import DETOKENIZERS, captions
from jpeg_dlm.text.download import ASSETS, fetch
from jpeg_dlm.text.tokenizer import collapse
from jpeg_dlm.util.errors import DataError, MissingPackageError, UsageError, reason_of

if TYPE_CHECKING:
    from jpeg_dlm.util.console import Console

CAPTIONS_BYTES = 4_470_000  # of the sentences that are kept (measured)
# The test split and the last 100,000 of 8,013,769 documents are held out (MDLM, Duo). The revision of OpenWebText is in
# Parquet, since datasets 4 refuses the script of earlier ones.
HUB_SETS = {
    "lm1b": "dvruette/lm1b:train,test",
    "openwebtext": "Skylion007/openwebtext@79d93d786212f7344586290adb811d4ae6a1762c:train[:7913769],train[7913769:]",
}
# The sets of zero-shot perplexity (MDLM, Duo): name, field and detokenization. Of those that have a script on the hub, its
# conversion to Parquet is read.
ZERO_SHOT = {
    "ag-news": ("hf:fancyzhx/ag_news:test", "text", "none"),
    "arxiv": ("hf:armanc/scientific_papers/arxiv@refs/convert/parquet:validation", "article", "papers"),
    "lambada": ("hf:EleutherAI/lambada_openai:test", "text", "lambada"),
    "lm1b": ("hf:dvruette/lm1b:test", "text", "lm1b"),
    "ptb": ("hf:ptb-text-only/ptb_text_only@refs/convert/parquet:validation", "sentence", "ptb"),
    "pubmed": ("hf:armanc/scientific_papers/pubmed@refs/convert/parquet:validation", "article", "papers"),
    "wikitext2": ("hf:Salesforce/wikitext/wikitext-2-raw-v1:validation", "text", "wikitext"),
    "wikitext103": ("hf:Salesforce/wikitext/wikitext-103-raw-v1:validation", "text", "wikitext"),
}
SPLIT = re.compile(r"([^\[\]]+)(?:\[(\d*):(\d*)\])?")  # NAME or NAME[FIRST:END], which datasets itself does not stream
MARKER = "<|endoftext|>"
SUFFIXES = (".txt", ".md", ".jsonl")
BIG_FILE = 16 << 20  # larger files in a folder are split into several documents, which limits memory
LOOK_AHEAD = 1 << 20  # characters at the start of a file that are searched for markers and blank lines
ENDS = 1 << 16  # bytes at both ends of a file that its fingerprint covers

Document = str | tuple[int, ...]
Stream = Callable[[int], Iterator[Document]]  # takes the number of documents to skip
Item = TypeVar("Item")


@dataclass(frozen=True)
class Corpus:
    """A source of documents, its approximate size in bytes, and a fingerprint that changes when the source changes."""

    stream: Stream
    total_bytes: int | None
    fingerprint: str
    heldout: Stream | None = None  # documents of a held-out split, which are not in the stream


def open_corpus(
    data: DataConfig, verbatim: bool = False, console: Console | None = None, reader: RecordReader | None = None
) -> Corpus:
    """Find `data.source`, and download it if it is a corpus of the package; `verbatim` keeps all white space of documents."""
    source, reader = data.source, reader or RecordReader(data.field, verbatim)
    if not source:
        raise UsageError("data.source is not set: name a file or folder of text, 'captions' or hf:NAME.")
    if source in HUB_SETS or source.startswith("hf:"):
        name = HUB_SETS.get(source, source.removeprefix("hf:"))
        train, _, heldout = name.partition(":")[2].partition(",")
        held = _detokenized(hub_split(name, heldout, reader), data) if heldout else None
        return Corpus(_detokenized(hub_split(name, train or "train", reader), data), None, f"hub:{name}", held)
    path = Path(os.path.expanduser(source))  # Path.expanduser fails for an unknown user
    if data.field and not path.is_dir() and not is_records(path):
        raise UsageError(f"data.field names a field of records, and '{source}' has no records: leave it out.")
    if source == "captions":
        files, mark = text_files(fetch(source, console)), f"asset:{ASSETS[source].archive_sha256}"
        size, documents = CAPTIONS_BYTES, lambda: captions(itertools.chain.from_iterable(map(text_lines, files)))
    elif (path / "index.json").is_file():
        raise DataError(f"'{path}' is already prepared: pass it as the prepared folder, or prepare from the original text.")
    elif path.is_file() or path.is_dir():
        files = text_files(path) if path.is_dir() else [path]
        mark, documents = file_fingerprint(files, path), lambda: file_documents(files, reader, path.is_dir())
        # For a progress bar: compressed text is about a third of its size.
        size = sum(file.stat().st_size * (3 if file.name.endswith(".gz") else 1) for file in files)
    else:
        named = ", ".join(("captions", *HUB_SETS))
        raise DataError(f"No text at '{source}': no such file or folder; the named corpora are {named} and hf:NAME.")
    return Corpus(_detokenized(lambda skip: itertools.islice(documents(), skip, None), data), size, mark)


def _detokenized(stream: Stream, data: DataConfig) -> Stream:
    if data.detokenize == "none":
        return stream
    detokenize = DETOKENIZERS[data.detokenize]
    return lambda skip: (detokenize(d) if isinstance(d, str) else d for d in stream(skip))


# ---------------------------------------------------------------- files and records


def paragraphs(lines: Iterable[str]) -> str:
    """Return the paragraphs between blank lines, each on one line; without blank lines, each line is a paragraph."""
    stripped = "\n".join(map(collapse, lines)).rstrip("\n").split("\n")
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
        fields = dict(record_fields(record))
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


def record_fields(record: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all fields, those of nested records with dots in their names."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from record_fields(value, f"{prefix}{name}.")
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


def file_fingerprint(files: list[Path], source: Path) -> str:
    """Hash the names, sizes and both ends of all files: cheap, and changes with nearly every edit."""
    digest = hashlib.sha256()
    for path in files:
        size, name = path.stat().st_size, path.relative_to(source if source.is_dir() else source.parent)
        digest.update(os.fsencode(name) + f"\0{size}\0".encode())  # names need not be UTF-8
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read())
    return f"files:{digest.hexdigest()}"


def file_documents(files: Iterable[Path], reader: RecordReader, whole: bool) -> Iterator[Document]:
    """Yield the documents of files; with `whole`, each is one, unless it holds records or is too large."""
    for path in files:
        if whole and not is_records(path) and path.stat().st_size <= BIG_FILE:
            yield "".join(text_lines(path)) if reader.verbatim else paragraphs(text_lines(path))
            continue
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


# ---------------------------------------------------------------- Hugging Face data sets


def hub_split(name: str, split: str, reader: RecordReader) -> Stream:
    """Return the stream of a split, or of a range of it, of the data set NAME[/CONFIG][@REVISION][:SPLIT[,HELDOUT]]."""
    match = SPLIT.fullmatch(split)
    if not match:
        raise UsageError(f"'{split}' is not a split of a data set: write NAME or NAME[FIRST:END], as in train[:1000].")
    first, end = int(match[2] or 0), int(match[3]) if match[3] else None
    path, _, revision = name.partition(":")[0].partition("@")
    path, config = os.path.expanduser(path), None
    if path.count("/") >= 2 and not Path(path).is_dir():  # names on the hub have one or two parts
        path, _, config = path.rpartition("/")

    def documents(skip: int) -> Iterator[Document]:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingPackageError("datasets", "data", f"The data set '{name}'") from error
        count = None if end is None else max(0, end - first - skip)
        try:
            stream = datasets.load_dataset(path, config, split=match[1], revision=revision or None, streaming=True)
            for record in itertools.islice(stream.skip(first + skip), count):
                # Keep empty records: the number of documents read is the number to skip when resuming.
                yield reader.document(record)
        except (OSError, ValueError, RuntimeError) as error:
            remedy = "check its name, configuration (hf:OWNER/NAME/CONFIG), split, --data.field and the network"
            raise DataError(f"Cannot read the data set '{name}' ({reason_of(error)}): {remedy}.") from error

    return documents
