"""The time variable of FLM, in which the share of tokens that can be decoded from a noisy state grows linearly.

A one-hot token of K on the linear path, z = (1 - gamma) eps + gamma onehot(x), is decoded by its largest coordinate. This
is correct with probability

    q(gamma) = E_y[ Phi(y + gamma / (1 - gamma))^(K - 1) ],   y ~ N(0, 1)

because the correct coordinate must exceed K - 1 others. Without noise q is 1, without signal 1 / K, and

    tau = alpha(gamma) = K / (K - 1) * (q - 1 / K)

runs from 0 to 1. With a large vocabulary, tau changes only in a narrow range of gamma, which uniform times would miss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jpeg_dlm.methods.common.gaussian_argmax import argmax_probability

TABLE_POINTS = 10_000  # (FLM)


def readable_share(gamma: Tensor, vocab: int) -> Tensor:
    """Return tau = alpha(gamma) in float64 for gamma (n) in [0, 1]: the share of decodable tokens above chance.

    The integral is Duo's, whose quadrature is exact to 1e-12; FLM's 100 Gauss-Hermite points are within 1e-4 (measured).
    """
    lead = gamma.double() / (1 - gamma.double())  # of the correct coordinate, in standard deviations of the noise
    q, _ = argmax_probability(lead, vocab)
    return ((vocab * q - 1) / (vocab - 1)).clamp(0, 1).where(gamma > 0, 0.0)  # exactly 0, where the quadrature leaves 1e-13


class TimeMap(nn.Module):
    """Maps tau to gamma: the inverse of `readable_share`, by linear interpolation in a table over gamma."""

    tau: Tensor
    gamma: Tensor

    def __init__(self, vocab: int) -> None:
        super().__init__()
        gamma = torch.linspace(0, 1, TABLE_POINTS, dtype=torch.float64, device="cpu")  # real values even for a model on 'meta'
        tau = readable_share(gamma, vocab)
        # Near gamma = 1, tau rounds to 1 in float64: keep only the first point of each value, and map 1 to 1.
        rising = torch.ones_like(tau, dtype=torch.bool)
        rising[1:] = tau[1:] > tau[:-1].cummax(0).values
        rising &= tau < 1
        self.register_buffer("tau", torch.cat([tau[rising], tau.new_ones(1)]), persistent=False)
        self.register_buffer("gamma", torch.cat([gamma[rising], gamma.new_ones(1)]), persistent=False)

    def forward(self, tau: Tensor) -> Tensor:
        """Return gamma (float64) for tau in [0, 1] of any shape."""
        right = torch.searchsorted(self.tau, tau.to(self.tau), right=True).clamp(1, len(self.tau) - 1)
        share = (tau.to(self.tau) - self.tau[right - 1]) / (self.tau[right] - self.tau[right - 1])
        return torch.lerp(self.gamma[right - 1], self.gamma[right], share.clamp(0, 1))
