"""Latents on the scale of the noise: each channel has mean 0 and variance 1 (appendix)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.machine.collectives import all_mean
from jpeg_dlm.methods.base import rounded_up_share

VARIANCE_FLOOR = 1e-4  # keeps standardization from blowing up a dead channel (COSMOS)


class Standardization(nn.Module):
    """Buffers of mean and inverse deviation, and the map between raw and standardized latents."""

    latent_mean: Tensor
    latent_scale: Tensor

    def start_statistics(self, *shape: int) -> None:
        self.register_buffer("latent_mean", torch.zeros(shape))
        self.register_buffer("latent_scale", torch.ones(shape))

    def standardize(self, z: Tensor) -> Tensor:
        return (z.float() - self.latent_mean) * self.latent_scale

    def unstandardize(self, z: Tensor) -> Tensor:
        return z / self.latent_scale + self.latent_mean


class RunningStandardization(Standardization):
    """Statistics of the first training steps, which then freeze."""

    config: Config
    latent_updates: Tensor

    def start_statistics(self, *shape: int) -> None:
        super().start_statistics(*shape)
        self.register_buffer("latent_updates", torch.zeros((), dtype=torch.int64))

    @property
    def standardize_steps(self) -> int:
        """The number of steps after which the statistics freeze."""
        given = self.config.objective.standardize_steps
        return given or rounded_up_share(self.config.train.steps, 0.1, most=2000)

    @torch.no_grad()
    def update_statistics(self, z: Tensor) -> None:
        """Update the running per-channel mean and variance over all processes; the first batch sets them."""
        z = z.float().flatten(0, 1)
        mean = all_mean(z.mean(0))
        variance = all_mean(((z - mean) ** 2).mean(0))
        # The trainer rejects a step that is not finite, and running statistics would never recover; the device decides.
        finite = (mean + variance).isfinite().all()
        m = self.config.objective.standardize_momentum * (self.latent_updates > 0)
        scale = (m * self.latent_scale**-2 + (1 - m) * variance).clamp_min(VARIANCE_FLOOR).rsqrt()
        self.latent_mean.copy_(torch.where(finite, m * self.latent_mean + (1 - m) * mean, self.latent_mean))
        self.latent_scale.copy_(torch.where(finite, scale, self.latent_scale))
        self.latent_updates += finite
