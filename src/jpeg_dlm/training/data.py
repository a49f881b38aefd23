"""Batches addressed by (seed, step): rows, order and noise are the same on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.text.blocks import Blocks, EpochOrder
from jpeg_dlm.training.features import FeatureCache
from jpeg_dlm.util.distributed import all_mean
from jpeg_dlm.util.rng import RowNoise, on_device


@dataclass
class BatchStream:
    """The training rows as an endless, randomly accessible sequence of batches."""

    blocks: Blocks
    train: TrainConfig
    device: torch.device
    rank: int = 0
    world: int = 1
    cache: FeatureCache | None = None
    context_blocks: int = 0  # rows before each row that a batch holds too
    joined: bool = False  # pairs are rows of source and target

    def __post_init__(self) -> None:
        self.order = EpochOrder(self.train.seed, len(self.blocks))
        self.padded = self.blocks.mask(self.blocks.rows([0])) is not None
        self.prefetch = self.device.type != "cpu"  # gather the next batch in a thread
        self._thread = ThreadPoolExecutor(1)
        self._pending: dict[tuple[int, int], Future[Batch]] = {}

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step over all processes and micro-batches."""
        return self.train.batch * self.train.accumulation * self.world

    def row_numbers(self, step: int, micro: int) -> tuple[range, list[int]]:
        """Return (places in the step's global batch, rows of the corpus) of this process's micro-batch.

        Consecutive places go to consecutive ranks' micro-batches, so a step sees the same rows however they are split.
        """
        first = (micro * self.world + self.rank) * self.train.batch
        places = range(first, first + self.train.batch)
        rows = self.order.rows(step * self.rows_per_step + first, self.train.batch)
        return places, rows.tolist()

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, RowNoise]]:
        """Yield the batches of one optimizer step, each with its noise."""
        counts_L = self._mean_counts(step)
        for micro in range(self.train.accumulation):
            places, rows = self.row_numbers(step, micro)
            batch = self._prefetched(step, micro) if self.prefetch else self.batch(rows)
            host = self.device.type == "cpu"
            noise = RowNoise(self.train.seed, places, step, self.device, self.rows_per_step, host)
            yield replace(batch, step_counts_L=counts_L), noise

    def _mean_counts(self, step: int) -> Tensor | None:
        """Return how many real tokens the micro-batches of a step have at each position, on average over all processes."""
        if self.train.accumulation == 1 or not self.padded:
            return None  # one micro-batch counts its own, and without padding all have as many
        rows = [row for micro in range(self.train.accumulation) for row in self.row_numbers(step, micro)[1]]
        mask_BL = self.blocks.mask(self.blocks.rows(rows))
        assert mask_BL is not None
        counts_L = mask_BL.sum(0).float() / self.train.accumulation
        counts_L = torch.cat([counts_L.new_zeros(self.blocks.source_len), counts_L]) if self.joined else counts_L
        return all_mean(on_device(counts_L, self.device))

    def _prefetched(self, step: int, micro: int) -> Batch:
        """Return a batch that a thread gathered during the one before, and let it begin with the next one."""
        here = self._pending.pop((step, micro), None) or self._gather(step, micro)
        after = (step, micro + 1) if micro + 1 < self.train.accumulation else (step + 1, 0)
        self._pending = {after: self._gather(*after)}
        return here.result()

    def _gather(self, step: int, micro: int) -> Future[Batch]:
        return self._thread.submit(self.batch, self.row_numbers(step, micro)[1])

    def batch(self, rows: list[int]) -> Batch:
        return batch_of(self.blocks, rows, self.device, self.context_blocks, self.cache, self.joined)


def batch_of(
    blocks: Blocks,
    rows: Sequence[int],
    device: torch.device,
    context_blocks: int = 0,
    cache: FeatureCache | None = None,
    joined: bool = False,
) -> Batch:
    """Return rows as a batch, with their features if they are cached, and with their sources or the rows before them."""

    def batch(tokens_BL: Tensor, numbers: Sequence[int]) -> Batch:
        optional = (blocks.mask(tokens_BL), cache.rows(numbers) if cache else None)
        mask_BL, features_BLF = (t if t is None else on_device(t, device) for t in optional)
        return Batch(on_device(tokens_BL, device), mask_BL, features_BLF)

    if blocks.source_len:
        source_BS = on_device(blocks.sources(rows), device)
        pairs = replace(batch(blocks.rows(rows), rows), source=Batch(source_BS, blocks.mask(source_BS)))
        return pairs.joined() if joined else pairs
    if not context_blocks:
        return batch(blocks.rows(rows), rows)
    tokens_BKL, present_BK = blocks.before(rows, context_blocks)
    before = batch(tokens_BKL.flatten(0, 1), [max(0, row - back) for row in rows for back in range(context_blocks, 0, -1)])
    return replace(batch(blocks.rows(rows), rows), before=before, present_BK=on_device(present_BK, device))
