"""Text into a folder of token blocks: shards of rows, their hashes, the tokenizer, and held-out text.

    out/index.json           shapes, hashes, counts and options; written last, so its presence means complete
    out/tokenizer.json
    out/train-00000.bin ...  rows of token_len little-endian uint16 or uint32, at most 64 MB each
    out/heldout-00000.bin ...
    out/heldout.jsonl        the first held-out rows as text, for scorers

Work is saved whenever a shard is full: `state.npz` holds the place in the stream, the remainders of packing and the rows
of unfinished shards, in one file so that it is always consistent. A killed preparation goes on from there and ends with
the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jpeg_dlm.config import DataConfig
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.files import atomic_file, sweep_temps, write_atomic
from jpeg_dlm.text.blocks import FORMAT, read_index
from jpeg_dlm.text.corpora import Corpus, open_corpus
from jpeg_dlm.text.packing import Carry, Layout, sentences, step
from jpeg_dlm.text.split import START, Piece, Place, choose_split
from jpeg_dlm.text.tokenizer import TextTokenizer, load_tokenizer, train_bpe
from jpeg_dlm.wording import counted

SHARD_BYTES = 64 << 20
BPE_SAMPLE = 16 << 20  # characters a tokenizer is trained on at most (assumed enough for vocabularies of this size)
HEAD = 4 << 20  # characters looked at before the split is decided
LONG_HEAD = 64 << 20  # and as many more where documents are long, until ...
HEAD_HELD = 4  # ... so many whole ones can be expected to be held out (assumed: the rest then follows the share closely)
BATCH = 1 << 18  # characters tokenized at once
TEXT_ROWS = 4096  # held-out rows also kept as text
SPLITS = ("train", "heldout")
UNCOMPARED = ("cache_features",)  # options that do not change the blocks

Progress = Callable[[int, int | None], None]
Item = TypeVar("Item")


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
    note: str = ""  # what a user should know of the split


@dataclass
class Part:
    """What is known of one split while it grows."""

    carry: Carry = field(default_factory=list)
    shards: list[dict[str, Any]] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    unk: int = 0
    rows: int = 0
    pending: list[np.ndarray] = field(default_factory=list)  # chunks of rows not yet in a shard


def prepare(
    data: DataConfig,
    out: Path,
    progress: Progress | None = None,
    tokenizer: TextTokenizer | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Prepared:
    """Turn `data.source` into blocks below `out`, or return the ones that are there already.

    `progress` is told (bytes done, bytes in all or None). A given `tokenizer` is used instead of the one `data` names.
    """
    finished = _reuse(data, out, tokenizer)
    if finished:
        return finished
    corpus = open_corpus(data.source, data.detokenize)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _Run(data, out, corpus, progress or (lambda done, total: None), tokenizer, shard_bytes).run()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space and run the same command again, it goes on from there" if full else "name another folder"
        raise DataError(f"Cannot write to '{out}' ({error.strerror or error}): {remedy}.") from error


# ---------------------------------------------------------------- reuse


def _reuse(data: DataConfig, out: Path, tokenizer: TextTokenizer | None) -> Prepared | None:
    """The finished preparation in `out` when it is the one asked for; None when there is none yet."""
    if not (out / "index.json").is_file():
        return None
    index = read_index(out)
    old, new = index["data"], asdict(data)
    for name in new:
        if name not in UNCOMPARED and old.get(name, new[name]) != new[name]:  # what it does not name came later
            raise DataError(
                f"'{out}' was prepared with data.{name} {old[name]!r}, not {new[name]!r}: name another folder or delete it."
            )
    if tokenizer and tokenizer.fingerprint != index["tokenizer"]:
        raise DataError(f"'{out}' was prepared with another tokenizer: name another folder or delete it.")
    if _changed(data, index["source"]):
        raise DataError(f"The text '{data.source}' has changed since '{out}' was prepared: delete it or name another folder.")
    return _prepared(out, index, reused=True)


def _changed(data: DataConfig, fingerprint: str) -> bool:
    if not fingerprint.startswith("files:"):
        return False  # pinned or named: nothing to compare without a download
    try:
        return open_corpus(data.source).fingerprint != fingerprint
    except DataError:
        return False  # the text is no longer there; its blocks are


def _prepared(out: Path, index: dict[str, Any], reused: bool) -> Prepared:
    rows = {name: index["splits"][name]["rows"] for name in SPLITS}
    facts = index["token_len"], index["vocab_size"], index["tokenizer"]
    return Prepared(out, rows["train"], rows["heldout"], *facts, reused, _note(index))


def _note(index: dict[str, Any]) -> str:
    """A sentence on documents that are in both parts; empty where all are whole."""
    long = index.get("long_documents", 0)
    if not long:
        return ""
    train, heldout = (index["splits"][name]["tokens"] for name in SPLITS)
    return (
        f"{counted(long, 'document')} {'is' if long == 1 else 'are'} longer than all the text to hold out, so stretches inside "
        f"are held out ({heldout / (train + heldout):.1%} of the tokens)."
    )


# ---------------------------------------------------------------- the run


class _Run:
    """One preparation from the first document, or from saved state, to the index."""

    def __init__(
        self, data: DataConfig, out: Path, corpus: Corpus, progress: Progress, tokenizer: TextTokenizer | None, shard_bytes: int
    ) -> None:
        self.data, self.out, self.corpus, self.progress = data, out, corpus, progress
        self.head, self.whole = _head(corpus.stream(0), data.holdout)
        if not any(self.head):
            raise DataError(f"'{data.source}' holds no text: name another source.")
        known = sum(map(len, self.head))
        rest = 0 if self.whole else max(1, (corpus.total_bytes or 0) - known)
        self.split = choose_split(self.head, data.holdout, data.token_len, rest, data.holdout_by)
        self.tokenizer = tokenizer or self._tokenizer()
        self._check_vocabulary()
        self.layout = _layout(data, self.tokenizer)
        self.dtype = np.dtype("<u2") if self.tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
        self.shard_rows = max(1, shard_bytes // (data.token_len * self.dtype.itemsize))
        self.place, self.done_bytes, self.long = START, 0, 0  # `long`: documents that were cut
        self.parts = {name: Part() for name in SPLITS}
        compared = {k: v for k, v in asdict(data).items() if k not in UNCOMPARED}
        split = [self.split.longest, self.split.stretch, self.split.period]
        self.identity = [FORMAT, compared, corpus.fingerprint, self.tokenizer.fingerprint, self.shard_rows, split]

    def run(self) -> Prepared:
        """Consume every document and write the index."""
        self._resume()
        for batch in _batches(self._pieces(self.place)):
            for piece, ids in zip(batch, self._encode([piece.text for piece in batch]), strict=True):
                self._add(piece.split, ids)
                self.done_bytes += len(piece.text.encode())
            self.place = batch[-1].end
            self.long += sum(piece.end.piece == 1 and not piece.whole for piece in batch)
            if self._flush(finish=False):
                self._save()
            self.progress(self.done_bytes, self.corpus.total_bytes)
        self._flush(finish=True)
        return self._finish()

    def _pieces(self, start: Place) -> Iterator[Piece]:
        """The text after a place, in the pieces it is split by."""
        rest = iter(()) if self.whole else self.corpus.stream(max(start.document, len(self.head)))
        return self.split.pieces(itertools.chain(self.head[start.document :], rest), start)

    def _tokenizer(self) -> TextTokenizer:
        if self.data.tokenizer != "bpe":
            return load_tokenizer(self.data.tokenizer)
        # Held-out text stays out of the tokenizer too.
        texts = (piece.text for piece in self._pieces(START) if piece.split == "train")
        return train_bpe((line for t in _budgeted(texts, BPE_SAMPLE, len) for line in t.split("\n")), self.data.vocab_size)

    def _check_vocabulary(self) -> None:
        size = self.tokenizer.vocab_size
        if size > self.data.vocab_size:
            raise UsageError(f"The tokenizer has {size} ids but data.vocab_size is {self.data.vocab_size}: set it to {size}.")

    def _joined(self, chunks: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros((0, self.data.token_len), self.dtype), *chunks])

    def _encode(self, batch: list[str]) -> list[list[list[int]]]:
        """Each document as pieces of ids, all pieces of the batch tokenized in one call."""
        by_sentence = self.data.packing == "sentences"
        units = [_units(document, by_sentence, self.data.frame) for document in batch]
        flat = iter(self.tokenizer.encode_batch(list(itertools.chain.from_iterable(units)), following=by_sentence))
        return [list(itertools.islice(flat, len(u))) for u in units]

    def _add(self, name: str, document: list[list[int]]) -> None:
        part, unk = self.parts[name], self.tokenizer.unk_id
        part.documents += 1
        part.tokens += sum(map(len, document))
        part.unk += sum(piece.count(unk) for piece in document) if unk is not None else 0
        rows, part.carry = step(self.layout, part.carry, document)
        if rows:
            part.pending.append(np.asarray(rows, self.dtype))

    def _flush(self, finish: bool) -> bool:
        """Write full shards, and at the end the last ones; true when something was written."""
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
        """Take up saved state when it belongs to this very preparation and its shards are all there."""
        try:
            with np.load(self.out / "state.npz", allow_pickle=False) as saved:
                state = json.loads(saved["state"].tobytes())
                pending = {name: saved[name] for name in SPLITS}
            if json.dumps(state["identity"]) != json.dumps(self.identity):
                return
            place = Place(*state["place"])
            parts = {name: Part(**state["parts"][name], pending=[pending[name]]) for name in SPLITS}
            if any(rows.dtype != self.dtype or rows.shape[1:] != (self.data.token_len,) for rows in pending.values()):
                return
            for shard in itertools.chain.from_iterable(part.shards for part in parts.values()):
                if hashlib.sha256((self.out / shard["file"]).read_bytes()).hexdigest() != shard["sha256"]:
                    return
        except (OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile):
            return  # no state, or a damaged one: everything is made again
        self.parts, self.place, self.done_bytes, self.long = parts, place, state["done_bytes"], state["long"]

    # ---------------------------------------------------------------- the end

    def _finish(self) -> Prepared:
        for name, part in self.parts.items():
            if not part.rows:
                raise DataError(
                    f"The {name} part of '{self.data.source}' has {part.tokens} tokens, which fill no block of "
                    f"{self.data.token_len}: give more text, or lower data.token_len."
                )
        self.tokenizer.save(self.out / "tokenizer.json")
        write_atomic(self.out / "heldout.jsonl", self._heldout_text())
        index = self._index()
        write_atomic(self.out / "index.json", (json.dumps(index, indent=1, sort_keys=True) + "\n").encode())
        self._tidy()
        self.progress(self.done_bytes, self.done_bytes)
        return _prepared(self.out, index, reused=False)

    def _heldout_text(self) -> bytes:
        lines: list[str] = []
        for shard in self.parts["heldout"].shards:
            rows = np.fromfile(self.out / shard["file"], self.dtype).reshape(-1, self.data.token_len)
            for row in rows[: TEXT_ROWS - len(lines)].tolist():
                lines.append(json.dumps({"text": self.tokenizer.decode(row)}, ensure_ascii=False) + "\n")
        return "".join(lines).encode()

    def _index(self) -> dict[str, Any]:
        names = ("documents", "tokens", "unk", "rows", "shards")
        return {
            "format": FORMAT,
            "data": asdict(self.data),
            "source": self.corpus.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "token_len": self.data.token_len,
            "dtype": self.dtype.name,
            "pad_id": self.layout.pad_id,
            "eos_id": self.layout.eos_id,
            "padded": self.data.packing == "padded",
            "long_documents": self.long,
            "splits": {name: {k: getattr(part, k) for k in names} for name, part in self.parts.items()},
        }

    def _tidy(self) -> None:
        """Remove the state, and what an earlier unfinished preparation with other options left behind."""
        listed = {shard["file"] for part in self.parts.values() for shard in part.shards}
        stale = [p for name in SPLITS for p in self.out.glob(f"{name}-[0-9]*.bin") if p.name not in listed]
        for path in [self.out / "state.npz", *stale]:
            path.unlink(missing_ok=True)
        sweep_temps(self.out)


def _head(stream: Iterator[str], share: float) -> tuple[list[str], bool]:
    """The first documents, and whether they are all there are."""
    head: list[str] = []
    size = 0
    for text in stream:
        if size > LONG_HEAD or size > HEAD and len(head) * share > HEAD_HELD:
            return [*head, text], False
        head.append(text)
        size += len(text)
    return head, True


def _budgeted(items: Iterable[Item], characters: int, length: Callable[[Item], int]) -> Iterator[Item]:
    """Items until more than `characters` were given."""
    for item in items:
        yield item
        characters -= length(item)
        if characters < 0:
            return


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    while batch := list(_budgeted(pieces, BATCH, lambda piece: len(piece.text))):
        yield batch


def _units(document: str, by_sentence: bool, by_line: bool) -> list[str]:
    """What is tokenized apart: sentences, lines, or the whole document."""
    if by_sentence:
        return [s for line in document.split("\n") for s in sentences(line)]
    return document.split("\n") if by_line else [document]


def _layout(data: DataConfig, tokenizer: TextTokenizer) -> Layout:
    if data.packing == "padded" and tokenizer.pad_id == tokenizer.eos_id:
        raise UsageError("data.packing 'padded' needs a tokenizer with a pad token: choose another tokenizer or packing.")
    if data.frame and (tokenizer.bos_id is None or tokenizer.boundary_id is None):
        raise UsageError("data.frame needs a tokenizer with begin and line tokens, such as 'bpe' or 't5'.")
    bos, boundary = (-1 if i is None else i for i in (tokenizer.bos_id, tokenizer.boundary_id))
    return Layout(data.packing, data.token_len, tokenizer.eos_id, tokenizer.pad_id, data.frame, bos, boundary, data.whole)
