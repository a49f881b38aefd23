"""Times t_0 = 0 < ... < t_K = 1 at which the solver evaluates the network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uniform_grid(steps: int) -> Tensor:
    """Return K + 1 equally spaced times."""
    return torch.linspace(0.0, 1.0, steps + 1, dtype=torch.float64).float()


def quantile_grid(steps: int, mean: float, std: float) -> Tensor:
    """Return a grid whose inner times are the i/K quantiles of the logit-normal, in float64 and then cast (released, OWT)."""
    levels = torch.arange(1, steps, dtype=torch.float64) / steps
    inner = torch.sigmoid(mean + std * torch.special.ndtri(levels))
    return _with_ends(inner)


def random_grid(steps: int, mean: float, std: float, generator: torch.Generator) -> Tensor:
    """Return a grid whose inner times are K - 1 sorted draws of the logit-normal (released, LM1B)."""
    normal = torch.randn(steps - 1, generator=generator, device=generator.device)
    return _with_ends(torch.sigmoid(std * normal + mean).sort().values.cpu())


def _with_ends(inner: Tensor) -> Tensor:
    return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)]).float()


def make_grid(
    kind: str, steps: int, mean: float, std: float, generator: torch.Generator, times: Sequence[float] = ()
) -> Tensor:
    """Return the grid of a sampler config; only 'random' uses the generator, only 'stored' the times."""
    if kind == "stored":
        return torch.tensor(times)
    if kind == "uniform":
        return uniform_grid(steps)
    if kind == "quantile":
        return quantile_grid(steps, mean, std)
    return random_grid(steps, mean, std, generator)
