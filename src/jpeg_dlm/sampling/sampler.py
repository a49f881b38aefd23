"""Samples by number: row i of seed s is the same text in any batch size and on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.grids import quantile_grid, random_grid
from jpeg_dlm.methods.base import Method, Watch, refuse_given
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.engine import Engine

Writer = Method | Engine  # what samples


def device_of(method: Writer) -> torch.device:
    return method.device if isinstance(method, Engine) else next(method.parameters()).device


@torch.no_grad()
def sample_batches(
    method: Writer, n: int, sampler: Any, seed: int = 0, batch: int = 64, first: int = 0,
    watch: Watch | None = None, given_L: Tensor | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Token ids of samples `first` to `first + n - 1`, batch by batch; `given_L` is kept in every one of them."""
    if getattr(sampler, "protocol", "default") == "released":
        if first:
            raise UsageError("The released protocol draws samples in order: it cannot begin with one in the middle.")
        refuse_given(given_L, method.title)
        yield from released_batches(method, n, sampler, seed, batch, watch)
        return
    for start in range(first, first + n, batch):
        rows = range(start, min(start + batch, first + n))
        device = device_of(method)
        given_BL = None if given_L is None else given_L.to(device).expand(len(rows), -1)
        yield method.sample(sampler, RowNoise(seed, rows, 0, device), watch, given_BL)


@torch.no_grad()
def released_batches(
    method: Writer, n: int, sampler: Any, seed: int, batch: int, watch: Watch | None = None
) -> Iterator[Tensor]:
    """The random-number order of the authors' code, in which a sample depends on its batch.

    With the random grid (LM1B) the generator is seeded once per run and every batch draws noise, then a new grid. With
    the quantile grid (OWT) it is seeded anew with seed + number of the batch's first sample.
    """
    if not isinstance(method, JpegDlm | Engine) or sampler.grid not in ("random", "quantile"):
        raise UsageError("The released protocol exists for jpeg-dlm with --sampler.grid random (LM1B) or quantile (OWT).")
    device, m = device_of(method), method.config.model
    g = torch.Generator(device).manual_seed(seed)
    for start in range(0, n, batch):
        if sampler.grid == "quantile":
            g.manual_seed(seed + start)
        rows = min(batch, n - start)
        z = torch.randn((rows, m.latent_len, m.latent_dim), generator=g, device=device)
        if sampler.grid == "random":
            grid = random_grid(sampler.steps, sampler.grid_mean, sampler.grid_std, g)
        else:
            grid = quantile_grid(sampler.steps, sampler.grid_mean, sampler.grid_std)
        yield method.integrate(z, grid, sampler, watch)
