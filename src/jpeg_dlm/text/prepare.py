"""Turn text into a folder of token blocks: shards of rows, their hashes, the tokenizer, and held-out text.

    out/index.json           shapes, hashes, counts and options; written last, so its presence means complete
    out/train-00000.bin ...  rows of token_len little-endian uint16 or uint32, at most 64 MB each; also heldout-*.bin
    out/heldout.jsonl        the first held-out rows as text, for scorers
    out/manifest.json        hashes of the files above and tokenizer.json, except the shards, whose hashes are in the index

Whenever a shard is full, `state.npz` saves the progress, from which a killed preparation resumes to the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.blocks import FORMAT, read_index
from jpeg_dlm.text.packing import Carry, layout_of, pack_document, sentences
from jpeg_dlm.text.pairs import TAB, PairSplit, open_text, sides
from jpeg_dlm.text.sources import Corpus, Document, Stream, budgeted
from jpeg_dlm.text.split import START, DocumentPiece, Place, Split, choose_split
from jpeg_dlm.text.tokenizer import TRAINED, TextTokenizer, load_tokenizer
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.errors import DataError, UsageError, counted
from jpeg_dlm.util.files import FULL_DISK, atomic_file, sweep_temps, write_atomic, write_sealed

SPLITS = ("train", "heldout")
UNCOMPARED = ("cache_features",)  # options that do not change the blocks
SHARD_BYTES = 64 << 20
TOKENIZER_SAMPLE = 16 << 20  # most characters a tokenizer is trained on (assumed enough for vocabularies of this size)
HEAD = 4 << 20  # characters read before the split is chosen
LONG_HEAD = 64 << 20  # most characters read for it when documents are long: reading goes on until HEAD_HELD is reached
HEAD_HELD = 4  # expected number of whole documents to hold out (assumed: the rest then follows the share closely)
BATCH = 1 << 18  # characters tokenized at once
TEXT_ROWS = 4096  # held-out rows that are also kept as text

Check = Callable[[], None]  # called often; may raise to stop


@dataclass(frozen=True)
class Prepared:
    """A finished preparation."""

    path: Path
    train_rows: int
    heldout_rows: int
    token_len: int
    vocab_size: int
    tokenizer: str  # fingerprint
    reused: bool
    note: str  # remarks on documents that are left out or split


def prepare(
    data: DataConfig,
    out: Path,
    console: Console | None = None,
    tokenizer: TextTokenizer | None = None,
    check: Check = lambda: None,
    shard_bytes: int = SHARD_BYTES,
) -> Prepared:
    """Fetch the text of `data.source` and write its blocks to `out`, or return those that are already there.

    A given `tokenizer` replaces the one that `data` names.
    """
    console = console or Console(quiet=True)
    if (out / "index.json").is_file():
        return _reuse(data, out, tokenizer)
    if tokenizer is None and data.tokenizer not in TRAINED:
        tokenizer = load_tokenizer(data.tokenizer)
    corpus = open_text(data, bool(tokenizer and tokenizer.keeps_white_space), console)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with console.progress("Preparing text", "bytes") as progress:
            kind = _PairPreparation if data.source_len else _Preparation
            preparation = kind(data, out, corpus, tokenizer, check, shard_bytes)
            return preparation.run(lambda: progress(preparation.done_bytes, corpus.total_bytes))
    except OSError as error:
        full = error.errno in FULL_DISK
        remedy = "free some space and run the same command again to resume" if full else "name another folder"
        raise DataError(f"Cannot write to '{out}' ({error.strerror or error}): {remedy}.") from error


# ---------------------------------------------------------------- a finished preparation


def _reuse(data: DataConfig, out: Path, tokenizer: TextTokenizer | None) -> Prepared:
    """Return the finished preparation in `out`; raise `DataError` when it does not match."""
    index = read_index(out)
    old, new = index["data"], asdict(data)
    if index["given_rows"]:
        new["packing"] = old["packing"]  # determined from the rows, not an option
    for name in new:
        if name not in UNCOMPARED and old.get(name) != new[name]:
            raise DataError(
                f"'{out}' was prepared with data.{name} {old.get(name)!r}, not {new[name]!r}: name another folder or delete it."
            )
    if tokenizer and tokenizer.fingerprint != index["tokenizer"]:
        raise DataError(f"'{out}' was prepared with another tokenizer: name another folder or delete it.")
    source = index["source"]
    if not source.startswith("asset:"):  # assets are pinned
        with contextlib.suppress(DataError):  # the text may be gone, but its blocks remain
            source = open_text(data).fingerprint
    if source != index["source"]:
        raise DataError(f"The text '{data.source}' has changed since '{out}' was prepared: delete it or name another folder.")
    return _describe(out, index, reused=True)


def _describe(out: Path, index: dict[str, Any], reused: bool) -> Prepared:
    """Return a summary of the preparation in `out`."""
    train, heldout = (index["splits"][name]["rows"] for name in SPLITS)
    remarks = []
    if unknown := sum(index["splits"][name]["left_out"] for name in SPLITS):
        kind, reason = ("pair", "too long for a row, or ") if index.get("source_len") else ("document", "")
        remarks.append(f"Left out: {counted(unknown, kind)} {reason}with words outside the vocabulary.")
    if index["long_documents"]:
        remarks.append(
            f"Cut: {counted(index['long_documents'], 'document')} longer than all the text to hold out, so parts of long "
            f"documents are held out ({heldout / max(1, train + heldout):.1%} of the blocks)."
        )
    return Prepared(out, train, heldout, index["token_len"], index["vocab_size"], index["tokenizer"], reused, " ".join(remarks))


# ---------------------------------------------------------------- a new preparation


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


class _Preparation:
    """One preparation, from the first document or saved state to the index."""

    def __init__(
        self, data: DataConfig, out: Path, corpus: Corpus, tokenizer: TextTokenizer | None, check: Check, shard_bytes: int
    ) -> None:
        self.data, self.out, self.corpus, self.check = data, out, corpus, check
        self.head, self.is_all = _head(self._checked(corpus.stream), data.holdout)
        if not any(self.head):
            raise DataError(f"'{data.source}' holds no text: name another source.")
        self.given = not isinstance(self.head[0], str)  # rows of ids, used as they are
        if self.given and (tokenizer is None or data.detokenize != "none"):
            raise UsageError(
                f"'{data.source}' holds token ids, not text: name their tokenizer with --data.tokenizer, and leave out "
                "--data.detokenize."
            )
        rest = 0 if self.is_all else max(1, (corpus.total_bytes or 0) - sum(map(len, self.head)))
        self.split = choose_split(self.head, data.holdout, data.token_len, rest)
        if corpus.heldout:
            self.split = Split(0.0, frozenset(), 0, math.inf)  # all of the stream is for training
        self.tokenizer = tokenizer or self._train_tokenizer()
        if (size := self.tokenizer.vocab_size) > data.vocab_size:
            raise UsageError(f"The tokenizer has {size} ids but data.vocab_size is {data.vocab_size}: set it to {size}.")
        self.layout = layout_of(data, self.tokenizer)
        self.dtype = np.dtype("<u2") if size <= 1 << 16 else np.dtype("<u4")
        self.shard_rows = max(1, shard_bytes // (data.row_len * self.dtype.itemsize))
        self.place, self.done_bytes, self.long = START, 0, 0  # `long`: number of documents that were cut
        self.parts = {name: SplitState() for name in SPLITS}
        compared = {k: v for k, v in asdict(data).items() if k not in UNCOMPARED}
        split = [self.split.longest, self.split.stretch, self.split.period]
        self.identity = [FORMAT, compared, corpus.fingerprint, self.tokenizer.fingerprint, self.shard_rows, split]

    def run(self, report: Callable[[], None]) -> Prepared:
        """Consume every document and write the index."""
        self._resume()
        if self.corpus.heldout and self.place == START:  # nothing is saved before the first document of the stream
            documents = self._checked(self.corpus.heldout)
            self._consume((DocumentPiece(document, "heldout", START, True) for document in documents), report)
        self._consume(self._pieces(self.place), report)
        self._flush(finish=True)
        return self._finish()

    def _consume(self, pieces: Iterator[DocumentPiece], report: Callable[[], None]) -> None:
        while batch := list(budgeted(pieces, BATCH, lambda piece: len(piece.content))):
            self.check()
            for piece, ids in zip(batch, self._encode([piece.content for piece in batch]), strict=True):
                self._add(piece.split, ids)
                # A JSON list of ids has about six characters per id.
                self.done_bytes += len(piece.content.encode()) if isinstance(piece.content, str) else 6 * len(piece.content)
            self.place = batch[-1].end
            self.long += sum(piece.end.piece == 1 and not piece.whole for piece in batch)
            if self._flush(finish=False) and self.place != START:
                self._save()
            report()

    def _checked(self, stream: Stream, skip: int = 0) -> Iterator[Document]:
        """Yield the documents after the first `skip`; raise `DataError` for a row of ids that has the wrong length."""
        for number, document in enumerate(stream(skip), skip + 1):
            if not isinstance(document, str) and len(document) != self.data.token_len:
                raise DataError(
                    f"Row {number} of '{self.data.source}' has {counted(len(document), 'id')}, but data.token_len is "
                    f"{self.data.token_len}: set it to the length that all rows have, or prepare the text itself."
                )
            yield document

    def _pieces(self, start: Place) -> Iterator[DocumentPiece]:
        """Yield the pieces of the stream after the place `start`."""
        rest = iter(()) if self.is_all else self._checked(self.corpus.stream, max(start.document, len(self.head)))
        return self.split.pieces(itertools.chain(self.head[start.document :], rest), start)

    def _train_tokenizer(self) -> TextTokenizer:
        # The tokenizer is not trained on held-out text.
        texts = (str(piece.content) for piece in self._pieces(START) if piece.split == "train")
        lines = (line for text in budgeted(texts, TOKENIZER_SAMPLE, len) for line in text.replace(TAB, "\n").split("\n"))
        return TRAINED[self.data.tokenizer](lines, self.data.vocab_size, self.check)

    def _encode(self, batch: list[Document]) -> list[list[list[int]]]:
        """Return each document as pieces of ids: its sentences, lines, or the whole; all of the batch in one call."""
        texts, rows = [d for d in batch if isinstance(d, str)], [d for d in batch if not isinstance(d, str)]
        if texts if self.given else rows:
            raise DataError(f"'{self.data.source}' holds both text and token ids: prepare them separately.")
        if self.given:
            self._refuse_unknown_ids(rows)
            return [[list(row)] for row in rows]
        by_sentence, units = self.data.packing == "sentences", [self._units(text) for text in texts]
        flat = iter(self.tokenizer.encode_batch(list(itertools.chain.from_iterable(units)), following=by_sentence))
        return [list(itertools.islice(flat, len(u))) for u in units]

    def _refuse_unknown_ids(self, rows: Iterable[Iterable[int]]) -> None:
        if (largest := max(map(max, rows))) >= self.tokenizer.vocab_size:
            raise DataError(
                f"A row of '{self.data.source}' holds the id {largest}, but the tokenizer has {self.tokenizer.vocab_size}: "
                "name the one that made the rows with --data.tokenizer."
            )

    def _units(self, text: str) -> list[str]:
        """Split a document into what is tokenized separately."""
        if self.data.packing == "sentences":
            return [sentence for line in text.split("\n") for sentence in sentences(line)]
        return text.split("\n") if self.data.frame and self.tokenizer.boundary_id is not None else [text]

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
            rows = self._packed(part, document)
        if rows:
            part.pending.append(np.asarray(rows, self.dtype))

    def _packed(self, part: SplitState, document: list[list[int]]) -> list[list[int]]:
        rows, part.carry = pack_document(self.layout, part.carry, document)
        return rows

    def _joined(self, chunks: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros((0, self.data.row_len), self.dtype), *chunks])

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
        text = json.dumps({"identity": self.identity, "parts": facts} | progress)
        train, heldout = (self._joined(self.parts[name].pending) for name in SPLITS)
        with atomic_file(self.out / "state.npz") as file:
            np.savez(file, state=np.frombuffer(text.encode(), np.uint8), train=train, heldout=heldout)

    def _resume(self) -> None:
        """Load saved state if it belongs to this preparation and all its shards are intact."""
        try:
            with np.load(self.out / "state.npz", allow_pickle=False) as saved:
                state = json.loads(saved["state"].tobytes())
                parts = {name: SplitState(**state["parts"][name], pending=[saved[name]]) for name in SPLITS}
            intact = json.dumps(state["identity"]) == json.dumps(self.identity)
            for shard in itertools.chain.from_iterable(part.shards for part in parts.values()):
                raw = (self.out / shard["file"]).read_bytes()
                intact = intact and hashlib.sha256(raw).hexdigest() == shard["sha256"]
        except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile):
            return  # no state or a damaged one: start from the beginning
        if intact:
            self.parts, self.place = parts, Place(*state["place"])
            self.done_bytes, self.long = state["done_bytes"], state["long"]

    # ---------------------------------------------------------------- the end

    def _finish(self) -> Prepared:
        for name, part in self.parts.items():
            if not part.rows:
                raise DataError(
                    f"The {name} part of '{self.data.source}' has {counted(part.tokens, 'token')}, too few for a block of "
                    f"{self.data.token_len}: give more text, or lower data.token_len."
                )
        self.tokenizer.save(self.out / "tokenizer.json")
        self._write_heldout_text()
        index = self._index()
        text = json.dumps(index, indent=1, sort_keys=True) + "\n"
        write_sealed(self.out, ["tokenizer.json", "heldout.jsonl"], "index.json", text)
        # Remove the saved state and shards left by an unfinished preparation with other options.
        listed = {shard["file"] for part in self.parts.values() for shard in part.shards}
        for path in [self.out / "state.npz", *(p for name in SPLITS for p in self.out.glob(f"{name}-[0-9]*.bin"))]:
            if path.name not in listed:
                path.unlink(missing_ok=True)
        sweep_temps(self.out)
        return _describe(self.out, index, reused=False)

    def _write_heldout_text(self) -> None:
        shards = (np.fromfile(self.out / shard["file"], self.dtype) for shard in self.parts["heldout"].shards)
        rows = (row for shard in shards for row in shard.reshape(-1, self.data.row_len).tolist())
        texts = itertools.islice(self._heldout_records(rows), TEXT_ROWS)
        write_atomic(self.out / "heldout.jsonl", "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in texts))

    def _heldout_records(self, rows: Iterable[list[int]]) -> Iterator[dict[str, Any]]:
        return ({"text": self.tokenizer.decode(row)} for row in rows)

    def _index(self) -> dict[str, Any]:
        names, data = ("documents", "left_out", "tokens", "unk", "rows", "shards"), self.data
        if self.given:
            data = replace(data, packing="padded" if any(part.padded for part in self.parts.values()) else "continuous")
        return {
            "format": FORMAT,
            "data": asdict(data),
            "source": self.corpus.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "token_len": self.data.token_len,
            **({"source_len": self.data.source_len} if self.data.source_len else {}),
            "dtype": self.dtype.name,
            "pad_id": self.layout.pad_id,
            "eos_id": self.layout.eos_id,
            "padded": data.packing == "padded",
            "given_rows": self.given,
            "long_documents": self.long,
            "splits": {name: {k: getattr(part, k) for k in names} for name, part in self.parts.items()},
        }


class _PairPreparation(_Preparation):
    """The preparation of pairs: a row is the padded source, then the padded target, each with an end token."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given = False  # ids of sources and targets are laid out as those of texts

    def _checked(self, stream: Stream, skip: int = 0) -> Iterator[Document]:
        return stream(skip)  # pairs that do not fit a row are left out

    @cached_property
    def _pair_split(self) -> PairSplit:
        heldout = self.corpus.heldout  # if there is such a split, all of its pairs and no others are held out
        return PairSplit(lambda: (heldout or self.corpus.stream)(0), 1.0 if heldout else self.data.holdout)

    def _pieces(self, start: Place) -> Iterator[DocumentPiece]:
        for number, document in enumerate(self.corpus.stream(start.document), start.document):
            if name := self._pair_split.of(document):
                yield DocumentPiece(document, "train" if self.corpus.heldout else name, Place(number + 1), True)

    def _encode(self, batch: list[Document]) -> list[list[list[int]]]:
        rows = [document for document in batch if not isinstance(document, str)]
        if len(rows) < len(batch):
            return super()._encode(batch)
        self._refuse_unknown_ids(rows)
        eos_id = self.tokenizer.eos_id  # ELF's ids end with it, and a row adds its own
        return [[list(ids[:-1] if ids[-1:] == (eos_id,) else ids) for ids in sides(row)] for row in rows]

    def _units(self, text: str) -> list[str]:
        return list(sides(text))

    def _packed(self, part: SplitState, document: list[list[int]]) -> list[list[int]]:
        lengths = (self.data.source_len, self.data.token_len)
        if not all(0 < len(ids) < length for ids, length in zip(document, lengths, strict=True)):
            part.left_out += 1
            return []
        return [[i for ids, n in zip(document, lengths, strict=True) for i in replace(self.layout, token_len=n).text_row(ids)]]

    def _heldout_records(self, rows: Iterable[list[int]]) -> Iterator[dict[str, Any]]:
        """Yield each held-out source once, with all its targets."""
        size, seen = self.data.source_len, set()
        text = lambda side: side if isinstance(side, str) else self.tokenizer.decode(list(side))  # noqa: E731
        references = {text(source): list(map(text, targets)) for source, targets in self._pair_split.references.items()}
        for row in rows:
            source, target = (self.tokenizer.decode(ids) for ids in (row[:size], row[size:]))
            if source not in seen:
                seen.add(source)
                targets = [target, *references.get(source, [])]
                yield {"text": target, "source": source, "references": list(dict.fromkeys(targets))}


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
