"""Context of the denoise branch in training: clean latents of the blocks before each row of a document."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.rng import RowNoise


def drawn_context(config: Config, batch: Batch, encode: Callable[[Batch], Tensor], noise: RowNoise) -> Context | None:
    """Return the context of `flow_draws` copies of a batch, which a share of rows does without; None if it has none."""
    if batch.before is None or batch.present_BK is None:
        return None
    o, m = config.objective, config.model
    z_BCD = encode(batch.before).view(len(batch.tokens_BL), -1, m.latent_dim)
    present_BC = batch.present_BK.repeat_interleave(m.latent_len, dim=1).repeat(o.flow_draws, 1)
    kept = noise.uniform("context_drop") >= o.context_drop
    return Context(z_BCD.repeat(o.flow_draws, 1, 1), present_BC & kept[:, None])
