"""Pairs of a source and a target: named corpora, tasks with exact answers, and what is held out.

A pair is a document with a tab between its source and its target, neither of which has one: white space is collapsed. A
pair of token ids has SEPARATOR between them.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.cleaning import captions, sentence
from jpeg_dlm.text.download import ASSETS, fetch
from jpeg_dlm.text.sources import (
    Corpus,
    Document,
    RecordReader,
    file_documents,
    file_fingerprint,
    is_records,
    open_corpus,
    record_fields,
    text_files,
    text_lines,
)
from jpeg_dlm.text.split import Name
from jpeg_dlm.text.tokenizer import collapse
from jpeg_dlm.util.errors import DataError, UsageError
from jpeg_dlm.util.rng import derive_seed

if TYPE_CHECKING:
    from jpeg_dlm.util.console import Console

TAB, SEPARATOR = "\t", -1
TASK_ROWS, TASK_SYMBOLS = 20_000, range(3, 9)  # pairs of a task, and the numbers of symbols of a source (assumed)
# Words of captions that carry little meaning; the others are the keywords of a caption.
FUNCTION_WORDS = frozenset(
    "a an the is are was were be been being am do does did has have had having of in on at to by for with from into onto over "
    "under up down out off and or but as while that which who whom whose this these those there it its his her their he she "
    "they him them one some his another each very near next".split()
)


def pair(source: str, target: str) -> str:
    """Return a pair as a document."""
    return collapse(source) + TAB + collapse(target)


def sides(document: Document) -> tuple[Any, Any]:
    """Return the source and the target of a pair: texts, or tuples of ids."""
    if isinstance(document, str):
        source, _, target = document.partition(TAB)
        return source, target
    end = document.index(SEPARATOR)
    return document[:end], document[end + 1 :]


# ---------------------------------------------------------------- files and data sets

PLAIN = (("condition_input_ids", "input_ids"), ("source", "target"), ("input", "output"))  # fields that need no naming


@dataclass(frozen=True)
class PairReader(RecordReader):
    """Reads two fields of records: the named ones, else ids as in ELF's data sets, else "source" and "target", else ELF's."""

    target: str = ""

    def document(self, record: Any) -> Document:
        """Return the pair of a record, texts or token ids; raise ValueError if it has none."""
        if not isinstance(record, dict):
            raise ValueError("not an object")
        fields = dict(record_fields(record))
        plain = next((names for names in PLAIN if names[0] in fields), PLAIN[-1])
        names = (self.field or plain[0], self.target or plain[1])
        source, target = map(fields.get, names)
        if isinstance(source, str) and isinstance(target, str):
            return pair(source, target)
        if isinstance(source, list) and isinstance(target, list):
            if not all(type(i) is int and i >= 0 for i in source + target):
                raise ValueError("the ids are not whole numbers from 0")
            return (*source, SEPARATOR, *target)
        named = "name them with --data.source-field and --data.target-field"
        raise ValueError(f"no texts in {' and '.join(names)} among the fields {', '.join(fields)}: {named}")


def file_pairs(path: Path, reader: PairReader) -> Iterator[Document]:
    """Yield the pairs of a file: records, or lines with a tab between source and target and perhaps before more columns."""
    if is_records(path):
        yield from file_documents([path], reader, False)
        return
    for number, line in enumerate(text_lines(path), 1):
        source, tab, rest = line.rstrip("\n").partition(TAB)
        if not tab:
            raise DataError(f"Line {number} of '{path}' has no tab: write a source, a tab and a target, or use JSON Lines.")
        yield pair(source, rest.partition(TAB)[0])


# ---------------------------------------------------------------- named corpora: functions of the files of their asset


def tatoeba(language: str) -> Callable[[Path], Iterator[str]]:
    """Return the reader of sentences in a language with their English translations, which come first in its files."""

    def read(folder: Path) -> Iterator[str]:
        packed = folder / f"{language}-eng.zip"
        with zipfile.ZipFile(packed) as archive, archive.open(f"{language}.txt") as file:
            for line in io.TextIOWrapper(file, "utf-8"):
                english, other = line.split(TAB)[:2]
                yield pair(other, english)

    return read


def snli(folder: Path) -> Iterator[str]:
    """Yield pairs of a label with a premise, and a hypothesis that an annotator wrote for them."""
    for line in itertools.chain.from_iterable(map(text_lines, text_files(folder))):
        record = json.loads(line)
        premise, hypothesis = sentence(record["sentence1"]), sentence(record["sentence2"])
        if premise and hypothesis and record["gold_label"] != "-":
            yield pair(f"{record['gold_label']}: {premise}", hypothesis)


def keywords(folder: Path) -> Iterator[str]:
    """Yield pairs of the content words of a caption in random order, and the caption."""
    for text in captions(itertools.chain.from_iterable(map(text_lines, text_files(folder)))):
        words = [word for word in text.lower().rstrip('.!?"').replace(",", "").split() if word not in FUNCTION_WORDS]
        Random(derive_seed(0, "keywords/" + text)).shuffle(words)
        if words:
            yield pair(" ".join(words), text)


# ---------------------------------------------------------------- tasks with exact answers


def task(name: str, rows: int = TASK_ROWS) -> Iterator[str]:
    """Yield pairs of symbols and the answer: copied, reversed or sorted letters, or the sum of two numbers, ones first."""
    for i in range(rows):
        random = Random(derive_seed(0, "task/" + name, i))
        if name == "sum":
            a, b = random.randrange(1000), random.randrange(1000)
            # Ones first and zeros at the end: a digit of the sum then depends on digits at fixed places and before.
            yield pair(" ".join(f"{a:03}"[::-1] + "+" + f"{b:03}"[::-1]), " ".join(f"{a + b:04}"[::-1]))
            continue
        letters = random.choices("abcdefghij", k=random.choice(TASK_SYMBOLS))
        answer = {"copy": letters, "reverse": letters[::-1], "sort": sorted(letters)}[name]
        yield pair(" ".join(letters), " ".join(answer))


TASKS = ("copy", "reverse", "sort", "sum")
# Name -> asset and reader.
CORPORA: dict[str, tuple[str, Callable[[Path], Iterator[str]]]] = {
    "tatoeba:fra-eng": ("tatoeba", tatoeba("fra")),
    "tatoeba:spa-eng": ("tatoeba", tatoeba("spa")),
    "snli": ("captions", snli),
    "captions:keywords": ("captions", keywords),
}
NAMED = (*CORPORA, *(f"task:{name}" for name in TASKS))


def open_text(data: DataConfig, verbatim: bool = False, console: Console | None = None) -> Corpus:
    """Find `data.source`: a corpus of text, or of pairs if their sources have a length."""
    source, reader = data.source, PairReader(data.source_field, target=data.target_field)
    if not data.source_len:
        if source in NAMED:
            raise UsageError(f"'{source}' has pairs of a source and a target: set --data.source-len.")
        return open_corpus(data, verbatim, console)
    path, size = Path(os.path.expanduser(source)), None
    if source in CORPORA:
        asset, read = CORPORA[source]
        folder, mark = fetch(asset, console), f"asset:{ASSETS[asset].archive_sha256}:{source}"
        stream = restarted(lambda: read(folder))
    elif source in NAMED:
        mark, stream = f"asset:{source}", restarted(lambda: task(source.partition(":")[2]))
    elif source.startswith("hf:"):
        return open_corpus(data, console=console, reader=reader)
    elif path.is_file():
        size, mark, stream = path.stat().st_size, file_fingerprint([path], path), restarted(lambda: file_pairs(path, reader))
    else:
        raise DataError(f"No pairs at '{source}': no such file; the named corpora are {', '.join(NAMED)} and hf:NAME.")
    return Corpus(stream, size, mark)


def restarted(documents: Callable[[], Iterator[Document]]) -> Callable[[int], Iterator[Document]]:
    """Return a stream that reads from the beginning and skips."""
    return lambda skip: itertools.islice(documents(), skip, None)


# ---------------------------------------------------------------- held-out pairs


class PairSplit:
    """Holds out pairs by their target, so that no text of a held-out pair is trained on.

    All pairs of a target are in one part. Other pairs of a held-out source belong to neither, but are its references too.
    """

    def __init__(self, documents: Callable[[], Iterable[Document]], share: float) -> None:
        self.share = share
        self.references: dict[Document, list[Document]] = {s: [] for s, target in map(sides, documents()) if self._held(target)}
        for source, target in map(sides, documents()):
            if source in self.references:
                self.references[source].append(target)

    def _held(self, target: Document) -> bool:
        return derive_seed(0, f"pair/{target}") / 2**63 < self.share

    def of(self, document: Document) -> Name | None:
        """Return the part of a pair."""
        source, target = sides(document)
        if self._held(target):
            return "heldout"
        return None if source in self.references else "train"
