"""A flow gradient that reaches the compressor: its schedule and its path.

The paper stops this gradient, since it led to representation collapse. LDLM (arXiv:2605.07933) lets it pass and describes
four remedies: a warm-up of the gradient, a mean squared error in place of the token loss for the codec, noise before the
decoder, and times that adapt to the loss (`flow_times`). REPA-E (arXiv:2504.10483) normalizes latents by the batch.
"""

from __future__ import annotations

import math

from torch import Tensor

from jpeg_dlm.machine.collectives import all_mean
from jpeg_dlm.methods.common.standardization import VARIANCE_FLOOR
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmObjective
from jpeg_dlm.rng import RowNoise

STEEPNESS, CENTER = 10.0, 0.8  # of the warm-up (after LDLM)


def warmup_factor(progress: float, share: float) -> float:
    """Return the factor of the gradient after `progress` of training: LDLM's sigmoid from 0 to 1 over the first `share`."""
    if progress >= share:
        return 1.0

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-STEEPNESS * (x - CENTER)))

    return (sigmoid(progress / share) - sigmoid(0.0)) / (sigmoid(1.0) - sigmoid(0.0))


def with_gradient_of(value: Tensor, source: Tensor, factor: float = 1.0) -> Tensor:
    """Return `value` with `factor` times the gradient of `source`."""
    return value.detach() + factor * (source - source.detach())


def batch_standardized(z: Tensor, floor: float = VARIANCE_FLOOR) -> Tensor:
    """Return z (B, N, D) with mean 0 and variance 1 in each channel over the batch of all processes.

    Its gradient has no part along shift or scale of a channel: the flow loss cannot be lowered by smaller latents.
    """
    rows = z.float().flatten(0, 1)
    centered = rows - all_mean(rows.mean(0))
    variance = all_mean((centered**2).mean(0))
    return (centered * variance.clamp_min(floor).rsqrt()).view_as(z)


def latents_with_flow_gradient(o: JpegDlmObjective, z_tgt: Tensor, z_raw: Tensor, z: Tensor, progress: float) -> Tensor:
    """Return the clean latents of the flow loss, given those of the context compressor, raw and standardized.

    Their value is that of the context compressor or of the target, and their gradient that of the context compressor.
    """
    value = z if o.flow_to_compressor_values == "context" else z_tgt
    source = batch_standardized(z_raw) if o.flow_to_compressor_norm == "batch" else z
    return with_gradient_of(value, source, o.flow_to_compressor * warmup_factor(progress, o.flow_to_compressor_warmup))


def blurred(z: Tensor, deviation: float, noise: RowNoise) -> Tensor:
    """Return latents with noise for the decompressor."""
    return z + deviation * noise.normal("decoder", *z.shape[1:]) if deviation else z
