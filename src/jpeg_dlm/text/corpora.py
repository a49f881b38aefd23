"""Find sources of text and stream their documents, always in the same order; docs/data.md lists the sources."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.fetch.assets import ASSETS, fetch
from jpeg_dlm.text.captions import captions
from jpeg_dlm.text.hub_sets import HubSplit, split_names
from jpeg_dlm.text.lm1b import detokenize_lm1b
from jpeg_dlm.text.records import RecordReader
from jpeg_dlm.text.stories import PART, VERSION, stories_of, written
from jpeg_dlm.text.tatoeba import english, pair_lines
from jpeg_dlm.text.text_files import (
    Document,
    documents_of,
    file_documents,
    fingerprint,
    is_records,
    text_files,
    text_lines,
    total_size,
)
from jpeg_dlm.text.wikipedia import wikipedia_articles

if TYPE_CHECKING:
    from jpeg_dlm.machine.console import Console

WIKIPEDIA_BYTES = 51_000_000  # measured: size of enwik8 after cleaning
CAPTIONS_BYTES, TATOEBA_BYTES = 4_470_000, 6_240_000  # measured: size of the sentences that are kept
SPEECHES = {"sotu": "", "sotu-modern": "1945"}  # first year of each corpus
CARRIED = {"wikipedia": "enwik8", "captions": "captions", "tatoeba": "tatoeba"} | dict.fromkeys(SPEECHES, "sotu")  # assets
# The test split and the last 100,000 of 8,013,769 documents are held out (MDLM, Duo). The revision of OpenWebText is in
# Parquet, since datasets 4 refuses the script of earlier ones.
HUB_SETS = {
    "lm1b": "dvruette/lm1b:train,test",
    "openwebtext": "Skylion007/openwebtext@79d93d786212f7344586290adb811d4ae6a1762c:train[:7913769],train[7913769:]",
}

NAMED = (*CARRIED, "stories", *HUB_SETS)


@dataclass(frozen=True)
class Corpus:
    """A source of documents, its approximate size in bytes, and a fingerprint that changes when the source changes."""

    stream: Callable[[int], Iterator[Document]]  # takes the number of documents to skip
    total_bytes: int | None
    fingerprint: str
    heldout: Callable[[int], Iterator[Document]] | None = None  # documents of a held-out split, which are not in the stream
    reader: RecordReader = field(default_factory=RecordReader)  # of the records, if there are any


def bring(source: str, out: Path, console: Console) -> None:
    """Download or generate the files of a named corpus with progress, unless it is already prepared in `out`."""
    if (out / "index.json").is_file():
        return
    count = stories_of(source)
    if count:
        written(count, console)
    elif source in CARRIED:
        fetch(CARRIED[source], console=console)


def open_corpus(source: str, detokenize: str = "none", field: str = "", verbatim: bool = False) -> Corpus:
    """Find `source`; read only as much as is needed to know that it exists. `verbatim` keeps all white space of documents."""
    corpus = _find(source, RecordReader(source, field, verbatim))
    if detokenize == "lm1b":
        corpus = replace(corpus, stream=_detokenized(corpus.stream), heldout=corpus.heldout and _detokenized(corpus.heldout))
    return corpus


def _detokenized(stream: Callable[[int], Iterator[Document]]) -> Callable[[int], Iterator[Document]]:
    spaced = lambda document: detokenize_lm1b(document) if isinstance(document, str) else document  # noqa: E731
    return lambda skip: map(spaced, stream(skip))


def _find(source: str, reader: RecordReader) -> Corpus:
    if not source:
        raise UsageError("data.source is not set: name a file or folder of text, 'sotu', 'wikipedia' or hf:NAME.")
    if source in HUB_SETS or source.startswith("hf:"):
        name = HUB_SETS.get(source, source.removeprefix("hf:"))
        train, heldout = split_names(name)
        apart = HubSplit(name, heldout, reader).documents if heldout else None
        return Corpus(HubSplit(name, train, reader).documents, None, f"hub:{name}", apart, reader)
    path = Path(os.path.expanduser(source))  # Path.expanduser fails for an unknown user
    if reader.field and not path.is_dir() and not is_records(path):
        raise UsageError(f"data.field names a field of records, and '{source}' has no records: leave it out.")
    if source == "wikipedia":
        return _corpus(lambda: wikipedia_articles(text_lines(fetch("enwik8"))), WIKIPEDIA_BYTES, _pinned("enwik8"))
    if count := stories_of(source):
        files = written(count)
        size = total_size(files) * count // (PART * len(files))
        mark = f"{_pinned('stories15m')}:{VERSION}:{count}"
        return _corpus(lambda: itertools.islice(file_documents(files), count), size, mark)
    if source == "captions":
        files = text_files(fetch("captions"))
        lines = lambda: itertools.chain.from_iterable(map(text_lines, files))  # noqa: E731
        return _corpus(lambda: captions(lines()), CAPTIONS_BYTES, _pinned("captions"))
    if source == "tatoeba":
        folder = fetch("tatoeba")
        return _corpus(lambda: english(pair_lines(folder)), TATOEBA_BYTES, _pinned("tatoeba"))
    if source in SPEECHES:
        files = [p for p in text_files(fetch("sotu")) if p.name >= SPEECHES[source]]  # names begin with the year
        return _corpus(lambda: file_documents(files), total_size(files), _pinned("sotu"))
    if (path / "index.json").is_file():
        raise DataError(f"'{path}' is already prepared: pass it as the prepared folder, or prepare from the original text.")
    if path.is_dir():
        files = text_files(path)
        corpus = _corpus(lambda: file_documents(files, reader), total_size(files), fingerprint(files, path))
        return replace(corpus, reader=reader)
    if path.is_file():
        corpus = _corpus(lambda: documents_of(path, reader), total_size([path]), fingerprint([path], path.parent))
        return replace(corpus, reader=reader)
    raise DataError(f"No text at '{source}': no such file or folder; the named corpora are {', '.join(NAMED)} and hf:NAME.")


def _corpus(stream: Callable[[], Iterator[Document]], total_bytes: int, mark: str) -> Corpus:
    return Corpus(lambda skip: itertools.islice(stream(), skip, None), total_bytes, mark)


def _pinned(name: str) -> str:
    return f"asset:{ASSETS[name].archive_sha256}"
