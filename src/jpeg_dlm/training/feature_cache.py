"""Cache of encoder features on disk: computed once, read by row from a memory map.

A folder holds `features.bin` (N, L, F) in half precision and `progress.json` while it is being filled. When it is
complete, it gets `manifest.json` with the hashes and, last, `features.json`. Both JSON files identify the encoder and the
data, so stale features are never read.
Shapes: B batch, L tokens, F feature width, N rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.encoders.frozen import FrozenEncoder
from jpeg_dlm.errors import DataError
from jpeg_dlm.files import check_listed, free_bytes, write_atomic, write_sealed

FEATURES_FILE, PROGRESS_FILE, COMPLETE_FILE = "features.bin", "progress.json", "features.json"
ROWS_PER_WRITE = 256
SAVE_EVERY = 16  # writes between saves of progress: a save costs an fsync, a lost write a few seconds of encoding

DTYPE, STORED = "float16", "<f2"
RowSource = Callable[[range], tuple[Tensor, Tensor | None]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CacheInfo:
    """Description of cached features: their encoder, data and shape."""

    encoder: str
    encoder_fingerprint: str
    data_fingerprint: str
    n_rows: int
    token_len: int
    feature_dim: int
    dtype: str = DTYPE

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, L, F)."""
        return self.n_rows, self.token_len, self.feature_dim

    @property
    def n_bytes(self) -> int:
        """Size of the features file in bytes."""
        return 2 * self.n_rows * self.token_len * self.feature_dim


class FeatureCache:
    """Random access to the features in a complete folder."""

    def __init__(self, folder: Path, encoder_fingerprint: str, data_fingerprint: str) -> None:
        self.folder = Path(folder)
        info = _read_info(self.folder / COMPLETE_FILE)
        if info is None:
            raise DataError(f"'{folder}' holds no complete feature cache: build it first.")
        for name, found, wanted in (
            ("encoder weights", info.encoder_fingerprint, encoder_fingerprint),
            ("data", info.data_fingerprint, data_fingerprint),
            ("numbers", info.dtype, DTYPE),
        ):
            if found != wanted:
                raise DataError(f"The feature cache '{folder}' was made with other {name}: delete it to build it again.")
        path = self.folder / FEATURES_FILE
        if not path.is_file() or path.stat().st_size != info.n_bytes:
            raise DataError(f"'{path}' is missing or cut short: delete the folder '{folder}' to build it again.")
        self.info = info
        self._data = np.memmap(path, STORED, mode="r", shape=info.shape)

    @classmethod
    def build(
        cls, folder: Path, encoder: FrozenEncoder, blocks_rows: RowSource, n_rows: int, token_len: int,
        progress: Progress | None = None, data_fingerprint: str = "", device: str = "cpu",
    ) -> FeatureCache:  # fmt: skip
        """Fill `folder`, resuming an interrupted call, or open it if it is complete.

        `blocks_rows(range)` returns the tokens (B, L) and mask of rows; `progress(done, total)` is called regularly.
        """
        folder = Path(folder)
        if (folder / COMPLETE_FILE).is_file():
            check_listed(folder, remedy=f"delete the folder '{folder}' to build it again")
        else:
            shape = (n_rows, token_len, encoder.feature_dim)
            info = CacheInfo(encoder.name, encoder.fingerprint, data_fingerprint, *shape)
            if n_rows < 1:
                raise DataError("There are no rows to compute features of: prepare more text.")
            _fill(folder, info, encoder, blocks_rows, progress, device)
        cache = cls(folder, encoder.fingerprint, data_fingerprint)
        if cache.info.shape != (n_rows, token_len, encoder.feature_dim):
            raise DataError(f"The feature cache '{folder}' has another shape: delete the folder to build it again.")
        return cache

    def __len__(self) -> int:
        return self.info.n_rows

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return h_BLF in fp32, in the order of `indices`."""
        numbers = np.asarray(indices, np.int64)
        if len(numbers) and not (0 <= numbers.min() and numbers.max() < self.info.n_rows):
            raise DataError(f"The feature cache '{self.folder}' ends at row {self.info.n_rows - 1}: build it for this data.")
        return torch.from_numpy(np.ascontiguousarray(self._data[numbers])).float()


def _read_info(path: Path, key: str | None = None) -> CacheInfo | None:
    """Read the description in a JSON file; return None if it is missing or damaged."""
    try:
        values: Any = json.loads(path.read_text("utf-8"))
        return CacheInfo(**(values[key] if key else values))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _rows_done(folder: Path, info: CacheInfo) -> int:
    """Return the number of rows that an interrupted call has written for the same encoder and data, else 0."""
    path = folder / PROGRESS_FILE
    if _read_info(path, "info") != info:
        return 0
    done = json.loads(path.read_text("utf-8")).get("done", 0)
    size = (folder / FEATURES_FILE).stat().st_size if (folder / FEATURES_FILE).is_file() else 0
    return done if isinstance(done, int) and 0 <= done <= info.n_rows and size == info.n_bytes else 0


def _fill(
    folder: Path, info: CacheInfo, encoder: FrozenEncoder, blocks_rows: RowSource, progress: Progress | None, device: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    done = _rows_done(folder, info)
    path = folder / FEATURES_FILE
    present = path.stat().st_blocks * 512 if path.is_file() else 0
    free = free_bytes(folder)
    if info.n_bytes - present > free:  # a memory map that runs out of disk space kills the process without a message
        raise DataError(
            f"The features need {info.n_bytes / 1e9:.1f} GB and the disk of '{folder}' has {free / 1e9:.1f} GB free: "
            "use --data.cache-features false, or another disk."
        )
    data = np.memmap(path, STORED, mode="r+" if done else "w+", shape=info.shape)
    for turn, start in enumerate(range(done, info.n_rows, ROWS_PER_WRITE), 1):
        span = range(start, min(start + ROWS_PER_WRITE, info.n_rows))
        data[span.start : span.stop] = _encode(encoder, blocks_rows, span, info, device)
        if turn % SAVE_EVERY == 0 or span.stop == info.n_rows:
            _flush(data, path)
            write_atomic(folder / PROGRESS_FILE, json.dumps({"info": asdict(info), "done": span.stop}))
        if progress is not None:
            progress(span.stop, info.n_rows)
    write_sealed(folder, [FEATURES_FILE], COMPLETE_FILE, json.dumps(asdict(info), indent=1) + "\n")
    (folder / PROGRESS_FILE).unlink(missing_ok=True)


def _flush(data: np.memmap, path: Path) -> None:
    """Flush features to the disk, before the progress is saved."""
    data.flush()
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def _encode(encoder: FrozenEncoder, blocks_rows: RowSource, span: range, info: CacheInfo, device: str) -> np.ndarray:
    tokens_BL, mask_BL = blocks_rows(span)
    if tuple(tokens_BL.shape) != (len(span), info.token_len):
        raise DataError(f"Rows have shape {tuple(tokens_BL.shape)}, not {(len(span), info.token_len)}: prepare the data again.")
    h_BLF = encoder(tokens_BL.to(device), None if mask_BL is None else mask_BL.to(device)).cpu()
    stored_BLF = h_BLF.half()
    if not stored_BLF.isfinite().all():
        raise DataError("Features exceed the range of float16: standardize them with --encoder.scale per_channel.")
    return stored_BLF.numpy()
