"""Context of the denoise branch in training: clean latents of the blocks before each row of a document."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.rng import RowNoise


def drawn_context(config: Config, batch: Batch, encode: Callable[[Batch], Tensor], noise: RowNoise) -> Context | None:
    """Return the context of `flow_draws` copies of a batch; None if it has none.

    Before the beginning of a text latents are zero. Where the context is dropped, by chance, it is not present: what a model
    writes without it may come from anywhere in a text.
    """
    if batch.before is None or batch.present_BK is None:
        return None
    o, m = config.objective, config.model
    z_BKND = encode(batch.before).view(*batch.present_BK.shape, m.latent_len, m.latent_dim)
    z_BCD = torch.where(batch.present_BK[..., None, None], z_BKND, 0.0).flatten(1, 2).repeat(o.flow_draws, 1, 1)
    kept = noise.uniform("context_drop") >= o.context_drop
    return Context(z_BCD, kept[:, None].expand(z_BCD.shape[:2]))
