"""Models with latents and their held-out text, so that studies of the latent space treat systems alike.

Shapes: B batch, N latents, D latent width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm import __version__
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.flow.vp import TanSchedule
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.base import Batch, LatentView, Method
from jpeg_dlm.methods.registry import systems_that
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.wording import either


def tan_ratio(t: float, schedule: TanSchedule) -> float:
    """Return sigma / alpha at time t of a tan-d schedule."""
    alpha, sigma = schedule.alpha_sigma(torch.tensor(t, dtype=torch.float64))
    return float(sigma / alpha)


def linear_ratio(t: float) -> float:
    """Return sigma / alpha = (1 - t) / t of the linear path."""
    return (1 - t) / t


def unit_rms(x_BND: Tensor) -> Tensor:
    """Scale each row to a root mean square of 1."""
    return x_BND / x_BND.square().mean((1, 2), keepdim=True).sqrt()


def view_of(method: Method) -> LatentView:
    """The view of a method; its encoder must be in place."""
    if view := method.latent_view():
        return view
    able = either(systems_that(lambda system: system.latent_view is not Method.latent_view))
    raise UsageError(f"{method.title} has no latents to look at: name checkpoints of {able}.")


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
    heldout, device = heldout_of(source), source.model.method.device
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
        "device": source.model.method.device.type,
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


def label(row: Mapping[str, Any]) -> str:
    """Return the name of a model in tables and pictures."""
    return f"{row['name']} ({row['title']}, r = {row['rate']:g})"


def log_of(path: Path | None) -> Path | None:
    """Return the log of the run that a path or one of its checkpoints names, or None."""
    run = path.parent.parent if path and path.parent.name == "checkpoints" else path
    return run / "metrics.jsonl" if run and (run / "metrics.jsonl").is_file() else None
