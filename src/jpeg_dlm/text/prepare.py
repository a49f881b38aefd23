"""Turn text into a folder of token blocks: shards of rows, their hashes, the tokenizer, and held-out text.

    out/index.json           shapes, hashes, counts and options; written last, so its presence means complete
    out/train-00000.bin ...  rows of token_len little-endian uint16 or uint32, at most 64 MB each; also heldout-*.bin
    out/heldout.jsonl        the first held-out rows as text, for scorers
    out/manifest.json        hashes of the files above and tokenizer.json, except the shards, whose hashes are in the index

Whenever a shard is full, `state.npz` saves the progress, from which a killed preparation resumes to the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm.config import DataConfig
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.files import atomic_file, sweep_temps, write_atomic, write_sealed
from jpeg_dlm.text.blocks import FORMAT
from jpeg_dlm.text.corpora import Corpus, open_corpus
from jpeg_dlm.text.packing import Carry, sentences, step
from jpeg_dlm.text.prepared import SPLITS, UNCOMPARED, Prepared, describe, reuse
from jpeg_dlm.text.records import Ids
from jpeg_dlm.text.rows import Layout, layout_of
from jpeg_dlm.text.split import START, DocumentPiece, Place, Split, choose_split
from jpeg_dlm.text.text_files import Document, budgeted
from jpeg_dlm.text.tokenizer import TRAINED, TextTokenizer, load_tokenizer
from jpeg_dlm.wording import counted

SHARD_BYTES = 64 << 20
BPE_SAMPLE = 16 << 20  # most characters a tokenizer is trained on (assumed enough for vocabularies of this size)
HEAD = 4 << 20  # characters read before the split is chosen
LONG_HEAD = 64 << 20  # most characters read for it when documents are long: reading goes on until HEAD_HELD is reached
HEAD_HELD = 4  # expected number of whole documents to hold out (assumed: the rest then follows the share closely)
BATCH = 1 << 18  # characters tokenized at once
TEXT_ROWS = 4096  # held-out rows that are also kept as text

Progress = Callable[[int, int | None], None]


@dataclass
class SplitState:
    """State of one split while it is being written."""

    carry: Carry = field(default_factory=list)
    shards: list[dict[str, Any]] = field(default_factory=list)
    documents: int = 0
    left_out: int = 0  # documents with unknown tokens
    tokens: int = 0
    unk: int = 0
    rows: int = 0
    padded: bool = False  # given rows of ids end in padding
    pending: list[np.ndarray] = field(default_factory=list)  # chunks of rows not yet in a shard


def prepare(
    data: DataConfig,
    out: Path,
    progress: Progress | None = None,
    tokenizer: TextTokenizer | None = None,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[], None] = lambda: None,
) -> Prepared:
    """Write the blocks of `data.source` to `out`, or return those that are already there.

    `progress` is called with (bytes done, total bytes or None), and `check` often, which may raise to stop. A given `tokenizer`
    replaces the one that `data` names.
    """
    finished = reuse(data, out, tokenizer)
    if finished:
        return finished
    if tokenizer is None and data.tokenizer not in TRAINED:
        tokenizer = load_tokenizer(data.tokenizer)
    corpus = open_corpus(data.source, data.detokenize, data.field, bool(tokenizer and tokenizer.keeps_white_space))
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _Run(data, out, corpus, progress or (lambda done, total: None), check, tokenizer, shard_bytes).run()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space and run the same command again to resume" if full else "name another folder"
        raise DataError(f"Cannot write to '{out}' ({error.strerror or error}): {remedy}.") from error


# ---------------------------------------------------------------- the run


class _Run:
    """One preparation, from the first document or saved state to the index."""

    def __init__(
        self, data: DataConfig, out: Path, corpus: Corpus, progress: Progress, check: Callable[[], None],
        tokenizer: TextTokenizer | None, shard_bytes: int,
    ) -> None:  # fmt: skip
        self.data, self.out, self.corpus, self.progress, self.check = data, out, corpus, progress, check
        self.head, self.whole = _head(self._stream(0), data.holdout)
        if not any(self.head):
            raise DataError(f"'{data.source}' holds no text: name another source.")
        self.given = not isinstance(self.head[0], str)  # rows of ids, used as they are
        if self.given:
            self._check_options(tokenizer)
        known = sum(map(len, self.head))
        rest = 0 if self.whole else max(1, (corpus.total_bytes or 0) - known)
        self.split = choose_split(self.head, data.holdout, data.token_len, rest, data.holdout_by)
        if corpus.heldout:
            self.split = Split(0.0, frozenset(), 0, math.inf)  # all of the stream is for training
        self.tokenizer = tokenizer or self._train_tokenizer()
        self._check_vocabulary()
        self.layout = _layout(data, self.tokenizer)
        self.dtype = np.dtype("<u2") if self.tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
        self.shard_rows = max(1, shard_bytes // (data.token_len * self.dtype.itemsize))
        self.place, self.done_bytes, self.long = START, 0, 0  # `long`: number of documents that were cut
        self.parts = {name: SplitState() for name in SPLITS}
        compared = {k: v for k, v in data.options().items() if k not in UNCOMPARED}
        split = [self.split.longest, self.split.stretch, self.split.period]
        self.identity = [FORMAT, compared, corpus.fingerprint, self.tokenizer.fingerprint, self.shard_rows, split]

    def run(self) -> Prepared:
        """Consume every document and write the index."""
        self._resume()
        if self.corpus.heldout and self.place == START:  # nothing is saved before the first document of the stream
            documents = self._checked(self.corpus.heldout(0))
            self._consume(DocumentPiece(document, "heldout", START, True) for document in documents)
        self._consume(self._pieces(self.place))
        self._flush(finish=True)
        return self._finish()

    def _consume(self, pieces: Iterator[DocumentPiece]) -> None:
        for batch in _batches(pieces):
            self.check()
            for piece, ids in zip(batch, self._encode([piece.content for piece in batch]), strict=True):
                self._add(piece.split, ids)
                self.done_bytes += _bytes(piece.content)
            self.place = batch[-1].end
            self.long += sum(piece.end.piece == 1 and not piece.whole for piece in batch)
            if self._flush(finish=False) and self.place != START:
                self._save()
            self.progress(self.done_bytes, self.corpus.total_bytes)

    def _stream(self, skip: int) -> Iterator[Document]:
        return self._checked(self.corpus.stream(skip), skip)

    def _checked(self, documents: Iterator[Document], skip: int = 0) -> Iterator[Document]:
        """Yield the documents; raise `DataError` for a row of ids that has the wrong length."""
        for number, document in enumerate(documents, skip + 1):
            if not isinstance(document, str) and len(document) != self.data.token_len:
                raise DataError(
                    f"Row {number} of '{self.data.source}' has {counted(len(document), 'id')}, but data.token_len is "
                    f"{self.data.token_len}: set it to the length that all rows have, or prepare the text itself."
                )
            yield document

    def _check_options(self, tokenizer: TextTokenizer | None) -> None:
        if self.data.tokenizer in TRAINED and tokenizer is None:
            raise UsageError(f"'{self.data.source}' holds token ids, not text: name their tokenizer with --data.tokenizer.")
        if self.data.detokenize != "none":
            raise UsageError(f"data.detokenize is for text, and '{self.data.source}' holds token ids: leave it out.")

    def _pieces(self, start: Place) -> Iterator[DocumentPiece]:
        """Yield the pieces of the stream after the place `start`."""
        rest = iter(()) if self.whole else self._stream(max(start.document, len(self.head)))
        return self.split.pieces(itertools.chain(self.head[start.document :], rest), start)

    def _train_tokenizer(self) -> TextTokenizer:
        # The tokenizer is not trained on held-out text.
        texts = (str(piece.content) for piece in self._pieces(START) if piece.split == "train")
        lines = (line for text in budgeted(texts, BPE_SAMPLE, len) for line in text.split("\n"))
        return TRAINED[self.data.tokenizer](lines, self.data.vocab_size, self.check)

    def _check_vocabulary(self) -> None:
        size = self.tokenizer.vocab_size
        if size > self.data.vocab_size:
            raise UsageError(f"The tokenizer has {size} ids but data.vocab_size is {self.data.vocab_size}: set it to {size}.")

    def _joined(self, chunks: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros((0, self.data.token_len), self.dtype), *chunks])

    def _encode(self, batch: list[Document]) -> list[list[list[int]]]:
        """Return each document as pieces of ids; tokenize all pieces of the batch in one call."""
        texts, rows = [d for d in batch if isinstance(d, str)], [d for d in batch if not isinstance(d, str)]
        if texts if self.given else rows:
            raise DataError(f"'{self.data.source}' holds both text and token ids: prepare them separately.")
        if self.given:
            return [[self._row(row)] for row in rows]
        by_sentence = self.data.packing == "sentences"
        by_line = self.data.frame and self.tokenizer.boundary_id is not None
        units = [_units(document, by_sentence, by_line) for document in texts]
        flat = iter(self.tokenizer.encode_batch(list(itertools.chain.from_iterable(units)), following=by_sentence))
        return [list(itertools.islice(flat, len(u))) for u in units]

    def _row(self, ids: Ids) -> list[int]:
        size = self.tokenizer.vocab_size
        if max(ids) >= size:
            raise DataError(
                f"A row of '{self.data.source}' holds the id {max(ids)}, but the tokenizer has {size}: name the one that "
                "made the rows with --data.tokenizer."
            )
        return list(ids)

    def _add(self, name: str, document: list[list[int]]) -> None:
        part, unk, pad = self.parts[name], self.tokenizer.unk_id, self.tokenizer.pad_id
        unknown = sum(piece.count(unk) for piece in document) if unk is not None else 0
        if self.data.known and unknown:
            part.left_out += 1
            return
        part.documents += 1
        part.tokens += sum(map(len, document))
        part.unk += unknown
        if self.given:
            rows = document
            if rows[0][-1] == pad != self.tokenizer.eos_id:
                part.padded = True
                part.tokens -= rows[0].count(pad)
        else:
            rows, part.carry = step(self.layout, part.carry, document)
        if rows:
            part.pending.append(np.asarray(rows, self.dtype))

    def _flush(self, finish: bool) -> bool:
        """Write full shards, and the last partial ones if `finish`; return True if anything was written."""
        wrote = False
        for name, part in self.parts.items():
            if sum(map(len, part.pending)) < (1 if finish else self.shard_rows):
                continue
            rows = self._joined(part.pending)
            full = len(rows) if finish else len(rows) - len(rows) % self.shard_rows
            for start in range(0, full, self.shard_rows):
                shard = rows[start : min(start + self.shard_rows, full)]
                file, raw = f"{name}-{len(part.shards):05d}.bin", shard.tobytes()
                write_atomic(self.out / file, raw)
                part.shards.append({"file": file, "rows": len(shard), "sha256": hashlib.sha256(raw).hexdigest()})
                part.rows += len(shard)
            part.pending = [rows[full:].copy()]  # a copy, so that the written rows can be freed
            wrote = True
        return wrote

    # ---------------------------------------------------------------- state

    def _save(self) -> None:
        facts = {name: {k: v for k, v in vars(part).items() if k != "pending"} for name, part in self.parts.items()}
        progress = {"place": self.place, "done_bytes": self.done_bytes, "long": self.long}
        state = {"identity": self.identity, "parts": facts} | progress
        with atomic_file(self.out / "state.npz") as file:
            text = np.frombuffer(json.dumps(state).encode(), np.uint8)
            train, heldout = (self._joined(self.parts[name].pending) for name in SPLITS)
            np.savez(file, state=text, train=train, heldout=heldout)

    def _resume(self) -> None:
        """Load saved state if it belongs to this preparation and all its shards are intact."""
        try:
            with np.load(self.out / "state.npz", allow_pickle=False) as saved:
                state = json.loads(saved["state"].tobytes())
                pending = {name: saved[name] for name in SPLITS}
            if json.dumps(state["identity"]) != json.dumps(self.identity):
                return
            place = Place(*state["place"])
            parts = {name: SplitState(**state["parts"][name], pending=[pending[name]]) for name in SPLITS}
            if any(rows.dtype != self.dtype or rows.shape[1:] != (self.data.token_len,) for rows in pending.values()):
                return
            for shard in itertools.chain.from_iterable(part.shards for part in parts.values()):
                if hashlib.sha256((self.out / shard["file"]).read_bytes()).hexdigest() != shard["sha256"]:
                    return
        except (OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile):
            return  # no state or a damaged one: start from the beginning
        self.parts, self.place, self.done_bytes, self.long = parts, place, state["done_bytes"], state["long"]

    # ---------------------------------------------------------------- the end

    def _finish(self) -> Prepared:
        for name, part in self.parts.items():
            if not part.rows:
                raise DataError(
                    f"The {name} part of '{self.data.source}' has {counted(part.tokens, 'token')}, too few for a block of "
                    f"{self.data.token_len}: give more text, or lower data.token_len."
                )
        self.tokenizer.save(self.out / "tokenizer.json")
        write_atomic(self.out / "heldout.jsonl", self._heldout_text())
        index = self._index()
        text = json.dumps(index, indent=1, sort_keys=True) + "\n"
        write_sealed(self.out, ["tokenizer.json", "heldout.jsonl"], "index.json", text)
        self._tidy()
        self.progress(self.done_bytes, self.done_bytes)
        done = describe(self.out, index, reused=False)
        heldout = self.parts["heldout"]
        records = self.place.document + 1 + (heldout.documents + heldout.left_out if self.corpus.heldout else 0)
        return replace(done, note=f"{self.corpus.reader.summary(records, self.done_bytes)} {done.note}".strip())

    def _heldout_text(self) -> bytes:
        lines: list[str] = []
        for shard in self.parts["heldout"].shards:
            rows = np.fromfile(self.out / shard["file"], self.dtype).reshape(-1, self.data.token_len)
            for row in rows[: TEXT_ROWS - len(lines)].tolist():
                lines.append(json.dumps({"text": self.tokenizer.decode(row)}, ensure_ascii=False) + "\n")
        return "".join(lines).encode()

    def _index(self) -> dict[str, Any]:
        names = ("documents", "left_out", "tokens", "unk", "rows", "shards")
        data = self.data
        if self.given:
            data = replace(data, packing="padded" if any(part.padded for part in self.parts.values()) else "continuous")
        return {
            "format": FORMAT,
            "data": data.options(),
            "source": self.corpus.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "token_len": self.data.token_len,
            "dtype": self.dtype.name,
            "pad_id": self.layout.pad_id,
            "eos_id": self.layout.eos_id,
            "padded": data.packing == "padded",
            "given_rows": self.given,
            "long_documents": self.long,
            "splits": {name: {k: getattr(part, k) for k in names} for name, part in self.parts.items()},
        }

    def _tidy(self) -> None:
        """Remove the saved state and shards left by an unfinished preparation with other options."""
        listed = {shard["file"] for part in self.parts.values() for shard in part.shards}
        stale = [p for name in SPLITS for p in self.out.glob(f"{name}-[0-9]*.bin") if p.name not in listed]
        for path in [self.out / "state.npz", *stale]:
            path.unlink(missing_ok=True)
        sweep_temps(self.out)


def _head(stream: Iterator[Document], share: float) -> tuple[list[Document], bool]:
    """Return the first documents, and True if the stream has no more."""
    head: list[Document] = []
    size = 0
    for document in stream:
        if size > LONG_HEAD or size > HEAD and len(head) * share > HEAD_HELD:
            return [*head, document], False
        head.append(document)
        size += len(document)
    return head, True


def _bytes(document: Document) -> int:
    """Estimate the bytes of a document in its file; a JSON list of ids has about six characters per id."""
    return len(document.encode()) if isinstance(document, str) else 6 * len(document)


def _batches(pieces: Iterator[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    while batch := list(budgeted(pieces, BATCH, lambda piece: len(piece.content))):
        yield batch


def _units(document: str, by_sentence: bool, by_line: bool) -> list[str]:
    """Split a document into the units that are tokenized separately: sentences, lines, or the whole document."""
    if by_sentence:
        return [s for line in document.split("\n") for s in sentences(line)]
    return document.split("\n") if by_line else [document]


def _layout(data: DataConfig, tokenizer: TextTokenizer) -> Layout:
    if data.packing == "padded" and tokenizer.pad_id == tokenizer.eos_id:
        raise UsageError("data.packing 'padded' needs a tokenizer with a pad token: choose another tokenizer or packing.")
    if data.frame and tokenizer.bos_id is None:
        raise UsageError("data.frame needs a tokenizer with a begin token, such as 'bpe', 't5' or 'gpt2'.")
    return layout_of(data, tokenizer)
