"""Samples by number: row i of seed s is the same text in any batch size and on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.latent_sampler import Watch, Writer
from jpeg_dlm.methods.base import refuse_given
from jpeg_dlm.rng import RowNoise


@torch.no_grad()
def sample_batches(
    writer: Writer, n: int, sampler: Any, seed: int = 0, batch: int = 64, first: int = 0,
    watch: Watch | None = None, given_L: Tensor | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Token ids of samples `first` to `first + n - 1`, batch by batch; `given_L` is kept in every one of them."""
    if writer.latent_sampler is not None:
        refuse_given(given_L, writer.title)
    if getattr(sampler, "protocol", "default") == "released":
        if first:
            raise UsageError("The released protocol draws samples in order: it cannot begin with one in the middle.")
        if writer.latent_sampler is None or sampler.grid not in ("random", "quantile"):
            raise UsageError("The released protocol exists for jpeg-dlm with --sampler.grid random (LM1B) or quantile (OWT).")
        yield from writer.latent_sampler.released(n, sampler, seed, batch, watch)
        return
    for start in range(first, first + n, batch):
        rows = range(start, min(start + batch, first + n))
        given_BL = None if given_L is None else given_L.to(writer.device).expand(len(rows), -1)
        yield writer.sample(sampler, RowNoise(seed, rows, 0, writer.device), watch, given_BL)
