"""Batches addressed by (seed, step): rows, order and noise are the same on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.text.blocks import Blocks, EpochOrder
from jpeg_dlm.training.feature_cache import FeatureCache


@dataclass
class BatchStream:
    """The training rows as an endless, randomly accessible sequence of batches."""

    blocks: Blocks
    train: TrainConfig
    device: torch.device
    rank: int = 0
    world: int = 1
    cache: FeatureCache | None = None

    def __post_init__(self) -> None:
        self.order = EpochOrder(self.train.seed, len(self.blocks))

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
        for micro in range(self.train.accumulation):
            places, rows = self.row_numbers(step, micro)
            yield self.batch(rows), RowNoise(self.train.seed, places, step, self.device, self.rows_per_step)

    def batch(self, rows: list[int]) -> Batch:
        tokens = self.blocks.rows(rows)
        mask = self.blocks.mask(tokens)
        features = self.cache.rows(rows) if self.cache is not None else None
        return Batch(
            tokens.to(self.device),
            None if mask is None else mask.to(self.device),
            None if features is None else features.to(self.device),
        )
