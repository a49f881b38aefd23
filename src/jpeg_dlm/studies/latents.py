"""Models with latents under one view, so that studies of the latent space treat systems alike.

Noise is told by the ratio of its factor to the signal's, sigma / alpha = SNR**-0.5, which is 0 for clean latents and the
same number on every path; each system has its own time for it. Shapes: B batch, N latents, D latent width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm import __version__
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.flow.path import interpolate
from jpeg_dlm.flow.vp import TanSchedule
from jpeg_dlm.methods.base import Batch, Method
from jpeg_dlm.methods.cosmos import Cosmos
from jpeg_dlm.methods.elf import Elf
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.console import Console

W = 1.0  # self-conditioning scale of these diagnostics (paper)


# ---------------------------------------------------------------- one noise, the time of each path


def tan_ratio(t: float, schedule: TanSchedule) -> float:
    """sigma / alpha at time t of a tan-d schedule."""
    alpha, sigma = schedule.alpha_sigma(torch.tensor(t, dtype=torch.float64))
    return float(sigma / alpha)


def linear_ratio(t: float) -> float:
    """sigma / alpha = (1 - t) / t on the linear path."""
    return (1 - t) / t


def linear_time(ratio: float) -> float:
    """The time of the linear path with this sigma / alpha."""
    return 1 / (1 + ratio)


def unit_rms(x_BND: Tensor) -> Tensor:
    """Each row scaled to a root mean square of 1."""
    return x_BND / x_BND.square().mean((1, 2), keepdim=True).sqrt()


def per_sample(value: float, like: Tensor) -> Tensor:
    """A value (B,) for each row."""
    return torch.full((len(like),), value, device=like.device)


# ---------------------------------------------------------------- the view


class LatentView(ABC):
    """What the studies ask of a model; latents are in the standardized coordinates that it generates in."""

    decode_branch = False  # whether `refine` does anything

    @abstractmethod
    def encode(self, batch: Batch) -> Tensor:
        """Clean latents (B, N, D)."""

    @abstractmethod
    def noisy(self, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
        """The state of the model's own path with this noise."""

    @abstractmethod
    def predict(self, z_t: Tensor, ratio: float) -> Tensor:
        """One prediction of the clean latents behind such a state, without an earlier one to condition on."""

    @abstractmethod
    def decode(self, z: Tensor) -> Tensor:
        """The decoding module alone: back to the original scale, then the most probable token at every position."""

    def refine(self, z: Tensor) -> Tensor:
        """What sampling does to its last state before decoding; not part of the paper's diagnostics."""
        return z


class JpegDlmView(LatentView):
    """Clean latents are those of the target compressor."""

    decode_branch = True

    def __init__(self, method: JpegDlm) -> None:
        self.method = method

    def encode(self, batch: Batch) -> Tensor:
        return self.method.encode(batch)

    def noisy(self, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
        return interpolate(z, eps, per_sample(linear_time(ratio), z))

    def predict(self, z_t: Tensor, ratio: float) -> Tensor:
        t = linear_time(ratio)
        return self.method.denoiser([t], W)(z_t, t, None)

    def decode(self, z: Tensor) -> Tensor:
        return self.method.greedy(z)

    def refine(self, z: Tensor) -> Tensor:
        return self.method.decode_latents(z, per_sample(W, z))


class CosmosView(LatentView):
    """States are variance-preserving, and self-conditioning is zero (paper)."""

    def __init__(self, method: Cosmos) -> None:
        self.method = method

    def encode(self, batch: Batch) -> Tensor:
        return self.method.encode(batch)

    def noisy(self, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
        return (z + ratio * eps) / math.hypot(1, ratio)

    def predict(self, z_t: Tensor, ratio: float) -> Tensor:
        return self.method.predict(z_t, per_sample(self.method.schedule.time(ratio), z_t))

    def decode(self, z: Tensor) -> Tensor:
        return self.method.greedy(z)


class ElfView(LatentView):
    """Latents are the encoder's features, one for each token; the network itself decodes (not in the paper)."""

    def __init__(self, method: Elf) -> None:
        self.method = method

    def encode(self, batch: Batch) -> Tensor:
        return self.method.features(batch)

    def time(self, ratio: float) -> float:
        """Its noise has a deviation of its own at t = 0."""
        return linear_time(ratio / self.method.config.objective.noise_scale)

    def noisy(self, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
        return self.time(ratio) * (z + ratio * eps)

    def predict(self, z_t: Tensor, ratio: float) -> Tensor:
        return self.method.predict(z_t, self.time(ratio), None, per_sample(W, z_t))

    def decode(self, z: Tensor) -> Tensor:
        return self.method.greedy(z, per_sample(W, z))


def view_of(method: Method) -> LatentView:
    """The view of a method; its encoder must be in place."""
    if isinstance(method, JpegDlm):
        return JpegDlmView(method)
    if isinstance(method, Cosmos):
        return CosmosView(method)
    if isinstance(method, Elf):
        return ElfView(method)
    raise UsageError(f"{method.title} has no latents to look at: name checkpoints of jpeg-dlm, cosmos or elf.")


# ---------------------------------------------------------------- models and their text


def check_sources(sources: Sequence[ModelSource], rows: int) -> None:
    """Refuse models without latents or encoder and text that is too short, before anything is computed."""
    for source in sources:
        view_of(source.model.complete_method())
        if len(heldout_of(source)) < rows:
            raise DataError(f"'{source.name}' has fewer than {rows} rows of held-out text: name more with --data.")


def heldout_of(source: ModelSource) -> Blocks:
    if source.heldout is None:
        raise DataError(f"There is no held-out text for '{source.name}': name some with --data.")
    return source.heldout


def batches_of(source: ModelSource, rows: Sequence[int]) -> Iterator[tuple[range, Batch]]:
    """(places in `rows`, the held-out rows there), a batch at a time, on the model's device."""
    heldout, device = heldout_of(source), source.model.method.device
    for start in range(0, len(rows), source.batch):
        places = range(start, min(start + source.batch, len(rows)))
        tokens_BL = heldout.rows([rows[i] for i in places]).to(device)
        yield places, Batch(tokens_BL, heldout.mask(tokens_BL))


@torch.no_grad()
def clean_latents(source: ModelSource, rows: Sequence[int], console: Console) -> Tensor:
    """Standardized clean latents (B, N, D) of held-out rows."""
    view, parts = view_of(source.model.complete_method()), []
    with console.progress(f"Encoding text with {source.name}", "rows") as progress:
        for places, batch in batches_of(source, rows):
            parts.append(view.encode(batch).float())
            progress(places.stop, len(rows))
    return torch.cat(parts)


def identity(source: ModelSource) -> dict[str, Any]:
    """Everything that the latents of a model's held-out text depend on."""
    config = source.model.config
    return {
        "version": __version__,
        "checkpoint_sha256": source.sha256,
        "tokenizer": source.model.tokenizer.fingerprint,
        "encoder": to_dict(config.encoder),
        "heldout": heldout_of(source).fingerprint,
        "device": source.model.method.device.type,
    }


def about(source: ModelSource) -> dict[str, Any]:
    """What a table says of a model; a method with one latent for each token has the rate 1."""
    rate = source.model.config.rate
    return {
        "name": source.name,
        "title": source.model.method.title,
        "preset": source.model.config.preset,
        "rate": 1.0 if rate is None else rate,
        "checkpoint_sha256": source.sha256,
        "heldout": heldout_of(source).fingerprint,
    }


def label(row: dict[str, Any]) -> str:
    """A model as tables and pictures name it."""
    return f"{row['name']} ({row['title']}, r = {row['rate']:g})"
