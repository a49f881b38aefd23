"""Probabilities that the largest coordinate of a noisy one-hot vector is the right one, for Duo and FLM.

Of K unit Gaussians, one with mean m and the others with mean 0, that one is the largest with probability
P(m) = int phi(z - m) Phi(z)**(K - 1) dz.

Duo: the argmax of w = a onehot(x0) + s eps with a**2 = sigmoid(-gamma), s**2 = sigmoid(gamma), so m = a / s = exp(-gamma / 2),
is x0 with probability P and otherwise uniform: the uniform-state process with alpha = (K P - 1) / (K - 1).
FLM: tokens on the linear path z = (1 - gamma) eps + gamma onehot(x), so m = gamma / (1 - gamma), are decodable in the share
tau = K / (K - 1) * (P - 1 / K) above chance, which runs from 0 to 1. With a large vocabulary it changes only in a narrow range
of gamma, which uniform times would miss.

The integral is computed by the trapezoid rule. The integrand is analytic and decays like a Gaussian, so the rule converges
exponentially: 201 nodes are within 1e-12 of ten times as many for K up to 50,258 (measured). This is too fast for a stored
table to be worthwhile, and the same nodes give the exact derivative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

REACH, NODES = 10.0, 201  # half width, in standard deviations around the mean, and nodes of the trapezoid rule (measured)
M_MAX = 60.0  # upper end of the search for m; alpha is 1 there for any vocabulary
TABLE_POINTS = 10_000  # (FLM)


def argmax_probability(m: Tensor, ids: int) -> tuple[Tensor, Tensor]:
    """Return (P, dP / dm): the probability that a unit Gaussian of mean m exceeds `ids` - 1 others of mean 0."""
    y = torch.linspace(-REACH, REACH, NODES, dtype=torch.float64, device=m.device)  # z - m
    log_rest = (ids - 1) * torch.special.log_ndtr(y + m[..., None])
    terms = torch.exp(log_rest - y**2 / 2) * (2 * REACH / (NODES - 1) / math.sqrt(2 * math.pi))
    return terms.sum(-1), (terms * y).sum(-1)


def survival(gamma: Tensor, ids: int) -> tuple[Tensor, Tensor]:
    """Return (alpha, d alpha / d gamma) in float64, with the shape of gamma; alpha stays below 1 to keep odds finite."""
    m = torch.exp(-gamma.double() / 2)
    p, dp_dm = argmax_probability(m, ids)
    return ((ids * p - 1) / (ids - 1)).clamp_max(1 - 1e-12), ids / (ids - 1) * dp_dm * (-m / 2)


def gamma_of(alpha: float, ids: int) -> float:
    """Return the inverse of `survival` by bisection, as alpha increases with m."""
    low, high = torch.tensor(0.0, dtype=torch.float64), torch.tensor(M_MAX, dtype=torch.float64)
    target = (1 + (ids - 1) * alpha) / ids
    for _ in range(60):
        middle = (low + high) / 2
        if argmax_probability(middle, ids)[0] < target:
            low = middle
        else:
            high = middle
    return -2 * math.log(float(high))


def decodable_share(gamma: Tensor, vocab: int) -> Tensor:
    """Return FLM's tau in float64 for gamma (n) in [0, 1]; its own 100 Gauss-Hermite points are within 1e-4 (measured)."""
    lead = gamma.double() / (1 - gamma.double())  # of the correct coordinate, in standard deviations of the noise
    q, _ = argmax_probability(lead, vocab)
    return ((vocab * q - 1) / (vocab - 1)).clamp(0, 1).where(gamma > 0, 0.0)  # exactly 0, where the quadrature leaves 1e-13


class TimeMap(nn.Module):
    """Maps tau to gamma: the inverse of `decodable_share`, by linear interpolation in a table over gamma."""

    tau: Tensor
    gamma: Tensor

    def __init__(self, vocab: int) -> None:
        super().__init__()
        gamma = torch.linspace(0, 1, TABLE_POINTS, dtype=torch.float64, device="cpu")  # real values even for a model on 'meta'
        tau = decodable_share(gamma, vocab)
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
