"""A flow gradient that reaches the compressor: its schedule, its path, and times that follow the loss.

The paper stops this gradient, since it led to representation collapse. LDLM (arXiv:2605.07933) lets it pass and describes
four remedies: a warm-up of the gradient, a mean squared error in place of the token loss for the codec, noise before the
decoder, and times that adapt to the loss. REPA-E (arXiv:2504.10483) normalizes latents by the batch. All formulas keep the
value of what they are given and change its gradient alone, so that sampling and training see the same latents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from jpeg_dlm.machine.collectives import all_mean

STEEPNESS, CENTER = 10.0, 0.8  # of the warm-up (after LDLM)
BINS = 100  # of the time axis (assumed)
MEMORY = 0.99  # momentum of the loss in a bin (assumed)
UNIFORM = 0.1  # share of uniform times, so that every bin is measured (assumed)


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


def batch_standardized(z: Tensor, floor: float) -> Tensor:
    """Return z (B, N, D) with mean 0 and variance 1 in each channel over the batch of all processes.

    Its gradient has no part along shift or scale of a channel: the flow loss cannot be lowered by smaller latents.
    """
    rows = z.float().flatten(0, 1)
    centered = rows - all_mean(rows.mean(0))
    variance = all_mean((centered**2).mean(0))
    return (centered * variance.clamp_min(floor).rsqrt()).view_as(z)


class AdaptiveTimes(nn.Module):
    """Times whose density follows the slope of the denoising loss, so that the loss is linear in the drawn quantile (LDLM)."""

    loss_K: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("loss_K", 1 - (torch.arange(BINS) + 0.5) / BINS)  # a constant slope: uniform times

    def density(self) -> Tensor:
        """Return the probability of each bin."""
        padded = torch.cat([self.loss_K[:1], self.loss_K, self.loss_K[-1:]])
        slope = (padded[:-2] - padded[2:]).clamp_min(0)
        return UNIFORM / BINS + (1 - UNIFORM) * slope / slope.sum().clamp_min(torch.finfo(slope.dtype).tiny)

    def draw(self, uniform: Tensor) -> Tensor:
        """Map uniform draws to times by the inverse of the distribution function."""
        p_K = self.density()
        above_K = p_K.cumsum(0)
        k = torch.searchsorted(above_K, uniform, right=True).clamp_max(BINS - 1)
        within = ((uniform - above_K[k]) / p_K[k] + 1).clamp(0, 1)
        return ((k + within) / BINS).clamp_max(1 - 0.5 / BINS)

    @torch.no_grad()
    def update(self, t_B: Tensor, error_B: Tensor) -> None:
        """Move the loss of each bin toward the mean error of all processes at its times; ignore errors that are not finite."""
        k = (t_B * BINS).long().clamp(0, BINS - 1)
        sums = torch.zeros(2, BINS, device=t_B.device).index_add_(1, k, torch.stack([error_B, torch.ones_like(error_B)]))
        total_K, count_K = all_mean(sums)
        mean_K = total_K / count_K
        self.loss_K.copy_(torch.where(mean_K.isfinite(), torch.lerp(mean_K, self.loss_K, MEMORY), self.loss_K))
