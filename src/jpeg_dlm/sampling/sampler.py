"""Samples by number: row i of seed s is the same text in any batch size and on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.control import Control, Origin
from jpeg_dlm.flow.latent_sampler import Watch, Writer
from jpeg_dlm.methods.base import require
from jpeg_dlm.rng import RowNoise

RELEASED_BATCH = {"random": 32, "quantile": 16}  # texts that share noise and times, by the grid of LM1B and of OWT (released)


@torch.no_grad()
def sample_batches(
    writer: Writer, n: int, sampler: Any, seed: int = 0, batch: int = 64, first: int = 0,
    watch: Watch | None = None, given: Tensor | None = None, control: Control | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield token ids of samples `first` to `first + n - 1`, batch by batch.

    `given` is kept: one row (L) in every sample, or a row for each (n, L). So are the rows of an origin in `control`. The
    released protocol has a batch of its own, since its samples depend on it.
    """
    if given is not None:
        require("templates", writer)
    if control is not None and control.guide is not None:
        require("guides", writer)
    if control is not None and control.origin is not None:
        require("edits", writer)
    if getattr(sampler, "protocol", "default") == "released":
        if first:
            raise UsageError("The released protocol draws samples in order: it cannot begin with one in the middle.")
        if writer.latent_sampler is None or sampler.grid not in RELEASED_BATCH:
            raise UsageError("The released protocol exists for jpeg-dlm with --sampler.grid random (LM1B) or quantile (OWT).")
        if given is not None or control is not None:
            raise UsageError("The released protocol writes whole texts freely: use the default one for what you ask for.")
        yield from writer.latent_sampler.released(n, sampler, seed, RELEASED_BATCH[sampler.grid], watch)
        return
    for start in range(0, n, batch):
        rows = range(start, min(start + batch, n))
        given_BL = None if given is None else rows_of(given, rows).to(writer.device)
        more = {} if control is None else {"control": _part(control, rows, writer.device)}
        noise = RowNoise(seed, range(first + rows.start, first + rows.stop), 0, writer.device)
        yield writer.sample(sampler, noise, watch, given_BL, **more)


def rows_of(given: Tensor, rows: range) -> Tensor:
    """Return these rows of (n, L), or a copy of (L) for each."""
    return given.expand(len(rows), -1) if given.dim() == 1 else given[rows.start : rows.stop]


def _part(control: Control, rows: range, device: torch.device) -> Control:
    """Return the control of some of the samples."""
    if control.origin is None:
        return control
    z, tokens = (x[rows.start : rows.stop].to(device) for x in (control.origin.z_BND, control.origin.tokens_BL))
    return replace(control, origin=Origin(z, tokens, control.origin.noise))
