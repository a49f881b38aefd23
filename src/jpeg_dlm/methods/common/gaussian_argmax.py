"""The uniform-state process as the argmax of a noisy one-hot vector (Duo).

The latent is w = a onehot(x0) + s eps with a**2 = sigmoid(-gamma), s**2 = sigmoid(gamma). Its argmax is x0 with probability
P = int phi(z - m) Phi(z)**(K - 1) dz, where m = a / s = exp(-gamma / 2), and otherwise uniform over the other ids: this is
the uniform-state process with alpha = (K P - 1) / (K - 1).

The integral is computed for every gamma by the trapezoid rule. The integrand is analytic and decays like a Gaussian, so
the rule converges exponentially: 201 nodes are within 1e-12 of ten times as many for K up to 50,258 (measured). This is
too fast for a stored table to be worthwhile, and the same nodes give the exact derivative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

REACH, NODES = 10.0, 201  # half width, in standard deviations around the mean, and nodes of the trapezoid rule
M_MAX = 60.0  # upper end of the search for m; alpha is 1 there for any vocabulary


def survival(gamma: Tensor, ids: int) -> tuple[Tensor, Tensor]:
    """Return (alpha, d alpha / d gamma) in float64, with the shape of gamma; alpha stays below 1 to keep odds finite."""
    m = torch.exp(-gamma.double() / 2)
    p, dp_dm = argmax_probability(m, ids)
    return ((ids * p - 1) / (ids - 1)).clamp_max(1 - 1e-12), ids / (ids - 1) * dp_dm * (-m / 2)


def argmax_probability(m: Tensor, ids: int) -> tuple[Tensor, Tensor]:
    """Return (P, dP / dm): the probability that a unit Gaussian of mean m exceeds `ids` - 1 others of mean 0."""
    y = torch.linspace(-REACH, REACH, NODES, dtype=torch.float64, device=m.device)  # z - m
    log_rest = (ids - 1) * torch.special.log_ndtr(y + m[..., None])
    terms = torch.exp(log_rest - y**2 / 2) * (2 * REACH / (NODES - 1) / math.sqrt(2 * math.pi))
    return terms.sum(-1), (terms * y).sum(-1)


def gamma_of(alpha: float, ids: int) -> float:
    """Return the inverse of `survival` by bisection, as alpha increases with m."""
    low, high = torch.tensor(0.0, dtype=torch.float64), torch.tensor(M_MAX, dtype=torch.float64)
    wanted = (1 + (ids - 1) * alpha) / ids
    for _ in range(60):
        middle = (low + high) / 2
        if argmax_probability(middle, ids)[0] < wanted:
            low = middle
        else:
            high = middle
    return -2 * math.log(float(high))
