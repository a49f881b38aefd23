"""A common interface to models with latents, for studies of the latent space.

The noise level is the ratio sigma / alpha = SNR**-0.5, which is 0 for clean latents and comparable across paths; each system
has its own time for it. Shapes: B batch, N latents, D latent width.
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
from jpeg_dlm.sampling.sampler import device_of
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.console import Console

W = 1.0  # self-conditioning scale of these diagnostics (paper)


# ---------------------------------------------------------------- noise levels and times


def tan_ratio(t: float, schedule: TanSchedule) -> float:
    """Return sigma / alpha at time t of a tan-d schedule."""
    alpha, sigma = schedule.alpha_sigma(torch.tensor(t, dtype=torch.float64))
    return float(sigma / alpha)


def linear_ratio(t: float) -> float:
    """Return sigma / alpha = (1 - t) / t of the linear path."""
    return (1 - t) / t


def linear_time(ratio: float) -> float:
    """Return the time of the linear path with this sigma / alpha."""
    return 1 / (1 + ratio)


def unit_rms(x_BND: Tensor) -> Tensor:
    """Scale each row to a root mean square of 1."""
    return x_BND / x_BND.square().mean((1, 2), keepdim=True).sqrt()


def per_sample(value: float, like: Tensor) -> Tensor:
    """Repeat a value for each row, (B,)."""
    return torch.full((len(like),), value, device=like.device)


# ---------------------------------------------------------------- the view


class LatentView(ABC):
    """Operations on a model's latents, in the standardized coordinates in which it generates."""

    decode_branch = False  # True if `refine` has an effect

    @abstractmethod
    def encode(self, batch: Batch) -> Tensor:
        """Return clean latents (B, N, D)."""

    @abstractmethod
    def noisy(self, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
        """Return the state of the model's own path at this noise level."""

    @abstractmethod
    def predict(self, z_t: Tensor, ratio: float) -> Tensor:
        """Predict the clean latents of such a state once, without a previous prediction as self-conditioning."""

    @abstractmethod
    def decode(self, z: Tensor) -> Tensor:
        """Apply the decoding module alone: restore the original scale, then take the most probable tokens."""

    def refine(self, z: Tensor) -> Tensor:
        """Apply what sampling does to its last state before decoding; not part of the paper's diagnostics."""
        return z


class JpegDlmView(LatentView):
    """JPEG-DLM; clean latents are those of the target compressor."""

    decode_branch = True

    def __init__(self, method: JpegDlm) -> None:
        self.method = method

    def encode(self, batch: Batch) -> Tensor:
        return self.method.encode(batch)

    def noisy(self, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
        return interpolate(z, eps, per_sample(linear_time(ratio), z))

    def predict(self, z_t: Tensor, ratio: float) -> Tensor:
        return self.method.self_conditioned(per_sample(W, z_t))(z_t, linear_time(ratio))

    def decode(self, z: Tensor) -> Tensor:
        return self.method.greedy(z)

    def refine(self, z: Tensor) -> Tensor:
        return self.method.decode_latents(z, per_sample(W, z))


class CosmosView(LatentView):
    """COSMOS; states are variance-preserving, and self-conditioning is zero (paper)."""

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
    """ELF; latents are the encoder's features, one per token, and the network itself decodes (not in the paper)."""

    def __init__(self, method: Elf) -> None:
        self.method = method

    def encode(self, batch: Batch) -> Tensor:
        return self.method.features(batch)

    def time(self, ratio: float) -> float:
        """Return ELF's time; its noise at t = 0 has the standard deviation `noise_scale`."""
        return linear_time(ratio / self.method.config.objective.noise_scale)

    def noisy(self, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
        return self.time(ratio) * (z + ratio * eps)

    def predict(self, z_t: Tensor, ratio: float) -> Tensor:
        return self.method.predict(z_t, self.time(ratio), None, per_sample(W, z_t))

    def decode(self, z: Tensor) -> Tensor:
        return self.method.greedy(z, per_sample(W, z))


def view_of(method: Method) -> LatentView:
    """Return the view of a method, which must have its encoder."""
    if isinstance(method, JpegDlm):
        return JpegDlmView(method)
    if isinstance(method, Cosmos):
        return CosmosView(method)
    if isinstance(method, Elf):
        return ElfView(method)
    raise UsageError(f"{method.title} has no latents to study: name checkpoints of jpeg-dlm, cosmos or elf.")


# ---------------------------------------------------------------- models and their text


def check_sources(sources: Sequence[ModelSource], rows: int) -> None:
    """Raise an error early for models without latents or encoder, and for too little text."""
    for source in sources:
        view_of(source.model.complete_method())
        if len(heldout_of(source)) < rows:
            raise DataError(f"'{source.name}' has fewer than {rows} rows of held-out text: name more with --data.")


def heldout_of(source: ModelSource) -> Blocks:
    if source.heldout is None:
        raise DataError(f"There is no held-out text for '{source.name}': name some with --data.")
    return source.heldout


def batches_of(source: ModelSource, rows: Sequence[int]) -> Iterator[tuple[range, Batch]]:
    """Yield batches of (places in `rows`, the held-out rows there) on the model's device."""
    heldout, device = heldout_of(source), device_of(source.model.method)
    for start in range(0, len(rows), source.batch):
        places = range(start, min(start + source.batch, len(rows)))
        tokens_BL = heldout.rows([rows[i] for i in places]).to(device)
        yield places, Batch(tokens_BL, heldout.mask(tokens_BL))


@torch.no_grad()
def clean_latents(source: ModelSource, rows: Sequence[int], console: Console) -> Tensor:
    """Return standardized clean latents (B, N, D) of held-out rows."""
    view, parts = view_of(source.model.complete_method()), []
    with console.progress(f"Encoding text with {source.name}", "rows") as progress:
        for places, batch in batches_of(source, rows):
            parts.append(view.encode(batch).float())
            progress(places.stop, len(rows))
    return torch.cat(parts)


def identity(source: ModelSource) -> dict[str, Any]:
    """Return everything that the latents of a model's held-out text depend on."""
    config = source.model.config
    return {
        "version": __version__,
        "checkpoint_sha256": source.sha256,
        "tokenizer": source.model.tokenizer.fingerprint,
        "encoder": to_dict(config.encoder),
        "heldout": heldout_of(source).fingerprint,
        "device": device_of(source.model.method).type,
    }


def about(source: ModelSource) -> dict[str, Any]:
    """Return the description of a model for tables; a method with one latent per token has rate 1."""
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
    """Return the name of a model in tables and pictures."""
    return f"{row['name']} ({row['title']}, r = {row['rate']:g})"
