"""Find sources of text and stream their documents, always in the same order; docs/data.md lists the sources."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.cleaning import captions, detokenize_lm1b
from jpeg_dlm.text.documents import (
    Document,
    RecordReader,
    documents_of,
    file_documents,
    fingerprint,
    is_records,
    text_files,
    text_lines,
    total_size,
)
from jpeg_dlm.text.download import ASSETS, fetch
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
SPLIT = re.compile(r"([^\[\]]+)(?:\[(\d*):(\d*)\])?")  # NAME or NAME[FIRST:END], which datasets itself does not stream

Stream = Callable[[int], Iterator[Document]]  # takes the number of documents to skip


@dataclass(frozen=True)
class Corpus:
    """A source of documents, its approximate size in bytes, and a fingerprint that changes when the source changes."""

    stream: Stream
    total_bytes: int | None
    fingerprint: str
    heldout: Stream | None = None  # documents of a held-out split, which are not in the stream


def open_corpus(data: DataConfig, verbatim: bool = False, console: Console | None = None) -> Corpus:
    """Find `data.source`, and download it if it is a corpus of the package; `verbatim` keeps all white space of documents."""
    source, reader = data.source, RecordReader(data.field, verbatim)
    if not source:
        raise UsageError("data.source is not set: name a file or folder of text, 'captions' or hf:NAME.")
    if source in HUB_SETS or source.startswith("hf:"):
        name = HUB_SETS.get(source, source.removeprefix("hf:"))
        train, _, heldout = name.partition(":")[2].partition(",")
        held = _detokenized(_hub_split(name, heldout, reader), data) if heldout else None
        return Corpus(_detokenized(_hub_split(name, train or "train", reader), data), None, f"hub:{name}", held)
    path = Path(os.path.expanduser(source))  # Path.expanduser fails for an unknown user
    if data.field and not path.is_dir() and not is_records(path):
        raise UsageError(f"data.field names a field of records, and '{source}' has no records: leave it out.")
    if source == "captions":
        files, mark = text_files(fetch(source, console)), f"asset:{ASSETS[source].archive_sha256}"
        size, documents = CAPTIONS_BYTES, lambda: captions(itertools.chain.from_iterable(map(text_lines, files)))
    elif (path / "index.json").is_file():
        raise DataError(f"'{path}' is already prepared: pass it as the prepared folder, or prepare from the original text.")
    elif path.is_dir():
        files = text_files(path)
        size, mark, documents = total_size(files), fingerprint(files, path), lambda: file_documents(files, reader)
    elif path.is_file():
        size, mark, documents = total_size([path]), fingerprint([path], path.parent), lambda: documents_of(path, reader)
    else:
        named = ", ".join(("captions", *HUB_SETS))
        raise DataError(f"No text at '{source}': no such file or folder; the named corpora are {named} and hf:NAME.")
    return Corpus(_detokenized(lambda skip: itertools.islice(documents(), skip, None), data), size, mark)


def _detokenized(stream: Stream, data: DataConfig) -> Stream:
    if data.detokenize == "none":
        return stream
    return lambda skip: (detokenize_lm1b(d) if isinstance(d, str) else d for d in stream(skip))


# ---------------------------------------------------------------- Hugging Face data sets


def _hub_split(name: str, split: str, reader: RecordReader) -> Stream:
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
