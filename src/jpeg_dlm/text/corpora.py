"""Find sources of text and stream their documents, always in the same order; docs/data.md lists the sources."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.errors import DataError, MissingPackageError, UsageError, reason_of
from jpeg_dlm.fetch.assets import ASSETS, fetch
from jpeg_dlm.text.captions import captions
from jpeg_dlm.text.lm1b import detokenize_lm1b
from jpeg_dlm.text.stories import PART, VERSION, stories_of, written
from jpeg_dlm.text.tatoeba import english, pair_lines
from jpeg_dlm.text.text_files import (
    Document,
    document_of,
    documents_of,
    file_documents,
    fingerprint,
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
HUB_SETS = {"lm1b": "dvruette/lm1b:train", "openwebtext": "Skylion007/openwebtext:train"}


NAMED = (*CARRIED, "stories", *HUB_SETS)


@dataclass(frozen=True)
class Corpus:
    """A source of documents, its approximate size in bytes, and a fingerprint that changes when the source changes."""

    stream: Callable[[int], Iterator[Document]]  # takes the number of documents to skip
    total_bytes: int | None
    fingerprint: str


def bring(source: str, out: Path, console: Console) -> None:
    """Download or generate the files of a named corpus with progress, unless it is already prepared in `out`."""
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


def _find(source: str) -> Corpus:
    if not source:
        raise UsageError("data.source is not set: name a file or folder of text, 'sotu', 'wikipedia' or hf:NAME.")
    if source in HUB_SETS or source.startswith("hf:"):
        name = HUB_SETS.get(source, source.removeprefix("hf:"))
        return Corpus(lambda skip: _hub_documents(name, skip), None, f"hub:{name}")
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
    path = Path(os.path.expanduser(source))  # Path.expanduser fails for an unknown user
    if (path / "index.json").is_file():
        raise DataError(f"'{path}' is already prepared: pass it as the prepared folder, or prepare from the original text.")
    if path.is_dir():
        files = text_files(path)
        return _corpus(lambda: file_documents(files), total_size(files), fingerprint(files, path))
    if path.is_file():
        return _corpus(lambda: documents_of(path), total_size([path]), fingerprint([path], path.parent))
    raise DataError(f"No text at '{source}': no such file or folder; the named corpora are {', '.join(NAMED)} and hf:NAME.")


def _corpus(stream: Callable[[], Iterator[Document]], total_bytes: int, mark: str) -> Corpus:
    return Corpus(lambda skip: itertools.islice(stream(), skip, None), total_bytes, mark)


def _pinned(name: str) -> str:
    return f"asset:{ASSETS[name].archive_sha256}"


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
            yield document_of(record)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"Cannot read the data set '{name}' ({reason_of(error)}): check the name, its split and the network."
        ) from error
