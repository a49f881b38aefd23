"""The frozen encoder of a run: its feature statistics, and its features of all rows on disk.

A cache folder holds `features.bin` (N, L, F) in half precision and, once that is complete, `features.json`, which names the
encoder, the data and the shape, so stale features are never read. An interrupted computation starts again.
Shapes: B batch, L tokens, F feature width, N rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.encoders import FrozenEncoder, build_encoder
from jpeg_dlm.encoders.frozen import freeze, load_statistics, measure_statistics, save_statistics
from jpeg_dlm.encoders.small import CONFIG_FILE, read_small_encoder_info, save_small_encoder
from jpeg_dlm.methods.encoder_pretraining import EncoderPretraining
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import Ranks, barrier
from jpeg_dlm.util.errors import DataError, UsageError
from jpeg_dlm.util.files import dump_json, fsync, load_json, write_atomic

STATISTICS_ROWS = 4096  # rows over which feature statistics are measured (assumed: plenty for a mean per channel)
FEATURES_FILE, COMPLETE_FILE = "features.bin", "features.json"
DTYPE = "<f2"
ROWS_PER_WRITE = 256


def statistics_rows(blocks: Blocks) -> Iterator[list[int]]:
    """Yield the numbers of the rows used for statistics of features and latents, batch by batch."""
    rows = range(min(STATISTICS_ROWS, len(blocks)))
    return (list(rows[start : start + 256]) for start in range(0, len(rows), 256))


def statistics_batches(blocks: Blocks, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tokens of these rows and the mask of real ones."""
    for numbers in statistics_rows(blocks):
        tokens_BL = blocks.rows(numbers).to(device)
        yield tokens_BL, blocks.mask(tokens_BL)


def frozen_encoder(config: Config, folder: Path, blocks: Blocks, ranks: Ranks) -> FrozenEncoder:
    """Return the encoder of a run with its feature statistics, which the main process measures on its device."""
    e = config.encoder
    if e.kind == "small":
        place = folder if (folder / CONFIG_FILE).is_file() else Path(e.name)
        fingerprint = read_small_encoder_info(place)["tokenizer_fingerprint"]
        if fingerprint and fingerprint != blocks.index["tokenizer"]:
            raise UsageError(
                f"The encoder in '{place}' was trained with another tokenizer than the text: prepare the text with "
                "--data.tokenizer set to that encoder's tokenizer.json, or train another encoder."
            )
    encoder = build_encoder(e, config.data.vocab_size, config.train.seed, folder).to(ranks.device)
    if e.scale == "per_channel" and not encoder.has_statistics:
        if ranks.is_main:
            encoder.set_feature_statistics(*measure_statistics(encoder, statistics_batches(blocks, ranks.device)))
            save_statistics(folder, encoder)
        barrier()
        if not ranks.is_main:
            load_statistics(folder, encoder)
    return encoder


def save_encoder(method: EncoderPretraining, config: Config, folder: Path, blocks: Blocks, ranks: Ranks) -> None:
    """Measure the feature statistics of a pretrained encoder and save it in `folder`."""
    if ranks.is_main:
        frozen = freeze(method.model, replace(config.encoder, scale="per_channel"))
        method.model.set_feature_statistics(*measure_statistics(frozen, statistics_batches(blocks, ranks.device)))
        save_small_encoder(folder, method.model, blocks.tokenizer().fingerprint)
    barrier()


# ---------------------------------------------------------------- cached features


class FeatureCache:
    """Random access to the features of all rows of `blocks`; `fill` computes them."""

    def __init__(self, folder: Path, encoder: FrozenEncoder, blocks: Blocks) -> None:
        self.shape = (len(blocks), blocks.token_len, encoder.feature_dim)
        self.info = {"encoder": encoder.fingerprint, "data": blocks.fingerprint, "shape": list(self.shape), "dtype": DTYPE}
        self.folder, self.path = folder, folder / FEATURES_FILE
        self.n_bytes = 2 * self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def is_complete(self) -> bool:
        """True if the folder holds the features of this encoder and data."""
        described = (self.folder / COMPLETE_FILE).is_file() and load_json(self.folder / COMPLETE_FILE, 1 << 16) == self.info
        return described and self.path.is_file() and self.path.stat().st_size == self.n_bytes

    @torch.no_grad()
    def fill(self, encoder: FrozenEncoder, blocks: Blocks, device: torch.device, progress: Callable[[int, int], None]) -> None:
        """Compute the features of all rows and write them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / COMPLETE_FILE).unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        free = shutil.disk_usage(self.folder).free
        if self.n_bytes > free:  # a memory map that runs out of disk space kills the process without a message
            raise DataError(
                f"The features need {self.n_bytes / 1e9:.1f} GB and the disk of '{self.folder}' has {free / 1e9:.1f} GB free: "
                "use --data.cache-features false, or another disk."
            )
        data = np.memmap(self.path, DTYPE, mode="w+", shape=self.shape)
        for start in range(0, len(blocks), ROWS_PER_WRITE):
            rows = range(start, min(start + ROWS_PER_WRITE, len(blocks)))
            tokens_BL = blocks.rows(rows)
            mask_BL = blocks.mask(tokens_BL)
            h_BLF = encoder(tokens_BL.to(device), None if mask_BL is None else mask_BL.to(device)).half().cpu()
            if not h_BLF.isfinite().all():
                raise DataError("Features exceed the range of float16: standardize them with --encoder.scale per_channel.")
            data[rows.start : rows.stop] = h_BLF.numpy()
            progress(rows.stop, len(blocks))
        data.flush()
        fsync(self.path)
        write_atomic(self.folder / COMPLETE_FILE, dump_json(self.info))

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return h_BLF in fp32, in the order of `indices`."""
        return torch.from_numpy(np.ascontiguousarray(self._data[np.asarray(indices, np.int64)])).float()

    @cached_property
    def _data(self) -> np.memmap:
        return np.memmap(self.path, DTYPE, mode="r", shape=self.shape)


def feature_cache(folder: Path, encoder: FrozenEncoder, blocks: Blocks, ranks: Ranks, console: Console) -> FeatureCache:
    """Return the features of all training rows, which the main process computes if the folder lacks them."""
    cache = FeatureCache(folder, encoder, blocks)
    if ranks.is_main and not cache.is_complete:
        with console.progress("Caching encoder features", "rows") as progress:
            cache.fill(encoder, blocks, ranks.device, progress)
    barrier()
    return cache
