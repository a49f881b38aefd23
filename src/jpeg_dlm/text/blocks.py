"""Read rows of a prepared folder from memory-mapped shards, in an order that depends only on the seed and the position."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.util.errors import DataError
from jpeg_dlm.util.files import check_listed, load_json, sha256_file
from jpeg_dlm.util.rng import derive_seed

FORMAT = 1  # version of index.json and the shards
INDEX_BYTES = 16 << 20  # largest index that is read; enough for a hundred thousand shards of 64 MB
DTYPES = ("uint16", "uint32")
SHARD_NAME = re.compile(r"(train|heldout)-\d{5,9}\.bin")  # plain names only: nothing outside the folder is read
# The fields that are read, with their types; the numbers are sizes and ids.
FIELDS = {"data": dict, "source": str, "tokenizer": str, "dtype": str, "padded": bool, "given_rows": bool}
NUMBERS = {"token_len": 1, "vocab_size": 1, "pad_id": 0, "eos_id": 0, "long_documents": 0}  # the least of each


def read_index(folder: Path) -> dict[str, Any]:
    """Read and check the index of a prepared folder."""
    path, remedy = folder / "index.json", "delete the folder and prepare it again"
    if not path.is_file():
        raise DataError(f"'{folder}' is not a prepared folder (no index.json): make one with  jpeg-dlm prepare.")
    index = load_json(path, INDEX_BYTES, DataError, remedy)
    if index.get("format") != FORMAT:
        raise DataError(f"'{folder}' was prepared by another version (format {index.get('format')!r:.40}): prepare it again.")
    try:
        _check_index(index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"'{path}' cannot be read ({error}): {remedy}.") from error
    return index


def _check_index(index: dict[str, Any]) -> None:
    """Check the types and sizes of all fields that are read from an index; raise whatever error a bad field causes."""
    if index["dtype"] not in DTYPES or any(type(index[name]) is not kind for name, kind in FIELDS.items()):
        raise ValueError("a description is of the wrong type")
    numbers = [(index[name], least) for name, least in NUMBERS.items()] + [(index.get("source_len", 0), 0)]
    for split in (index["splits"]["train"], index["splits"]["heldout"]):
        numbers += [(shard["rows"], 1) for shard in split["shards"]]
        if split["rows"] != sum(shard["rows"] for shard in split["shards"]):
            raise ValueError("the rows of the shards do not add up to the rows of their split")
        for shard in split["shards"]:
            if not SHARD_NAME.fullmatch(shard["file"]) or not isinstance(shard["sha256"], str):
                raise ValueError(f"{shard['file']!r:.80} is not a shard")
    if not all(type(number) is int and least <= number <= 1 << 40 for number, least in numbers):
        raise ValueError("a size is impossible")


class Blocks:
    """The rows of one split of a prepared folder."""

    def __init__(self, folder: Path, split: Literal["train", "heldout"] = "train") -> None:
        self.folder, self.split = folder, split
        self.index = read_index(folder)
        self.token_len: int = self.index["token_len"]
        self.source_len: int = self.index.get("source_len", 0)
        self.vocab_size: int = self.index["vocab_size"]
        self.pad_id: int = self.index["pad_id"]
        self._files: list[dict[str, Any]] = self.index["splits"][split]["shards"]
        self._shards = [self._open(shard) for shard in self._files]
        self._ends = np.cumsum([len(shard) for shard in self._shards])

    def _open(self, shard: dict[str, Any]) -> np.ndarray:
        path, dtype = self.folder / shard["file"], np.dtype(self.index["dtype"]).newbyteorder("<")
        shape = (shard["rows"], self.source_len + self.token_len)
        try:
            size = path.stat().st_size
            if size != shape[0] * shape[1] * dtype.itemsize:
                raise DataError(f"The shard '{path}' is damaged ({size} bytes): delete '{self.folder}' and prepare it again.")
            return np.memmap(path, dtype, mode="r", shape=shape)
        except OSError as error:
            raise DataError(f"The shard '{path}' cannot be read ({error.strerror or error}): prepare it again.") from error

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def fingerprint(self) -> str:
        """sha256 of the index, which names the hash of every shard and of the tokenizer."""
        return hashlib.sha256(json.dumps(self.index, sort_keys=True).encode()).hexdigest()

    def tokenizer(self) -> TextTokenizer:
        """Load the tokenizer that made the rows."""
        tokenizer = TextTokenizer.from_file(self.folder / "tokenizer.json")
        if tokenizer.fingerprint != self.index["tokenizer"]:
            raise DataError(f"The tokenizer.json in '{self.folder}' is not the one that made its rows: prepare it again.")
        return tokenizer

    def verify(self) -> None:
        """Check the hash of every shard and, if there is a manifest, those of the index, tokenizer and held-out text."""
        check_listed(self.folder, remedy=f"delete '{self.folder}' and prepare it again")
        for shard in self._files:
            path = self.folder / shard["file"]
            if sha256_file(path) != shard["sha256"]:
                raise DataError(f"The shard '{path}' is damaged (wrong hash): delete '{self.folder}' and prepare it again.")

    def rows(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        """Return the rows with the given indices, in the given order, as int64 (B, L); of pairs, the targets."""
        return self._rows(indices)[:, self.source_len :]

    def sources(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        """Return the sources of rows (B, S)."""
        return self._rows(indices)[:, : self.source_len]

    def _rows(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        wanted = np.asarray(indices, np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} asked of {len(self)}")
        out = np.empty((len(wanted), self.source_len + self.token_len), np.int64)
        shard_of = np.searchsorted(self._ends, wanted, side="right")
        for s in np.unique(shard_of):
            here = shard_of == s
            first = self._ends[s] - len(self._shards[s])
            out[here] = self._shards[s][wanted[here] - first]
        if out.size and out.max() >= self.vocab_size:
            raise DataError(
                f"Rows of '{self.folder}' hold ids that its tokenizer does not have: delete it and prepare it again."
            )
        return torch.from_numpy(out)

    def before(self, indices: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` rows before each row (B, count, L), oldest first, and a mask of those in the row's document."""
        if self.index["given_rows"]:
            raise DataError(f"'{self.folder}' holds rows without documents: prepare the text itself for a model with context.")
        wanted = np.asarray(indices, np.int64)[:, None] + np.arange(-count, 0)
        rows = self.rows(wanted.clip(0).ravel()).view(*wanted.shape, self.token_len)
        ended = (rows == self.index["eos_id"]).any(-1) | torch.from_numpy(wanted < 0)
        return rows, ended.flip(1).cumsum(1).flip(1) == 0

    def mask(self, rows: Tensor) -> Tensor | None:
        """Return a mask that is True on text and False on padding, or None when the packing never pads."""
        return rows != self.pad_id if self.index["padded"] else None


class EpochOrder:
    """Visits every row once per epoch, in a new order each epoch; caches the order of the latest epoch."""

    def __init__(self, seed: int, n_rows: int) -> None:
        if n_rows < 1:
            raise DataError("There are no rows to train on: prepare more text or lower data.token_len.")
        self.seed, self.n_rows = seed, n_rows
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def order(self, epoch: int) -> np.ndarray:
        """Return the permutation of rows in one epoch."""
        if epoch != self._epoch:
            # Sort raw counter output rather than call Generator.permutation: numpy guarantees only the former to stay
            # the same across versions.
            raw = np.random.Philox(key=derive_seed(self.seed, "epoch", epoch)).random_raw(self.n_rows)
            self._epoch, self._order = epoch, np.argsort(raw, kind="stable")
        return self._order

    def rows(self, position: int, count: int) -> np.ndarray:
        """Return the rows at stream positions `position` to `position + count - 1`, which may span epochs."""
        parts: list[np.ndarray] = []
        while count > 0:
            epoch, offset = divmod(position, self.n_rows)
            part = self.order(epoch)[offset : offset + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)
