"""Times of the flow loss and their weights: the paper's logit-normal times and x-loss, and options."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jpeg_dlm.flow.path import logit_normal, per_row
from jpeg_dlm.machine.collectives import all_mean
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmObjective
from jpeg_dlm.nn.dit import linear_estimate
from jpeg_dlm.rng import RowNoise

BINS = 100  # of the time axis (assumed)
MEMORY = 0.99  # momentum of the loss in a bin (assumed)
UNIFORM = 0.1  # share of uniform times, so that every bin is measured (assumed)


def drawn_times(o: JpegDlmObjective, noise: RowNoise, adaptive: AdaptiveTimes | None = None) -> Tensor:
    """Draw t ~ pi: logit-normal (paper), optionally mixed with a share of uniform times, or adapted to the loss."""
    if adaptive is not None:
        return adaptive.draw(noise.uniform("time"))
    t = logit_normal(noise.normal("time"), o.time_mean, o.time_std)
    if not o.time_uniform:
        return t
    chance, uniform = noise.uniform("time_uniform", 2).unbind(1)
    return torch.where(chance < o.time_uniform, uniform, t)


def weighted(error: Tensor, t: Tensor, o: JpegDlmObjective) -> Tensor:
    """Return the squared errors of clean embeddings as they are (x-loss, paper), or with another weight of each time.

    The v-loss weights them by (1 - t)**-2 (appendix); EDM's weighting divides by the variance of the best linear estimate's
    residual.
    """
    if o.flow_loss == "v":
        return error / per_row((1 - t).clamp_min(o.v_floor) ** 2, error)
    if o.flow_weighting == "residual":
        return error / per_row(linear_estimate(t)[1].clamp_min(o.v_floor) ** 2, error)
    return error


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
