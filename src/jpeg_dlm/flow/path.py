"""The linear path between Gaussian noise (t = 0) and clean embeddings (t = 1), and the grids of times of a sampler."""

from __future__ import annotations

import torch
from torch import Tensor

SC_PROB = 0.5  # probability of self-conditioning, per example (paper, ELF)


def per_row(x_B: Tensor, like: Tensor) -> Tensor:
    """Reshape x (B,) to multiply a (B, ...) tensor."""
    return x_B.view(-1, *[1] * (like.dim() - 1))


def per_sample(value: float, like: Tensor) -> Tensor:
    """Return the value (B,) for each row of `like`."""
    return torch.full((len(like),), value, device=like.device)


def interpolate(z_1: Tensor, eps: Tensor, t_B: Tensor) -> Tensor:
    """Return z_t = t z_1 + (1 - t) eps (Equation 1)."""
    t = per_row(t_B, z_1)
    return t * z_1 + (1 - t) * eps


def logit_normal(normal: Tensor, mean: float, std: float) -> Tensor:
    """Map standard normal draws to t ~ pi: sigmoid(mean + std * n) (paper: -1.5, 0.8)."""
    return torch.sigmoid(mean + std * normal)


def guidance_scale(uniform: Tensor) -> Tensor:
    """Map uniform draws to w in [0.5, 5], log-uniform in 1 + w (ELF)."""
    return 1.5 * 4.0**uniform - 1


def guided_target(z_tgt: Tensor, second: Tensor, first: Tensor, w_B: Tensor) -> Tensor:
    """Return the self-conditioning target z_SC = z_tgt + (1 - 1/w) (second - first) (appendix, Self-Conditioning)."""
    return z_tgt + (1 - 1 / per_row(w_B, z_tgt)) * (second - first)


def make_grid(kind: str, steps: int, mean: float, std: float, generator: torch.Generator) -> Tensor:
    """Return the times t_0 = 0 < ... < t_K = 1 of a sampler, computed in float64 except for random ones.

    Inner times of 'quantile' are the i/K quantiles of the logit-normal (released, OWT), those of 'random' K - 1 sorted
    draws of it (released, LM1B).
    """
    if kind == "uniform":
        return torch.linspace(0.0, 1.0, steps + 1, dtype=torch.float64).float()
    if kind == "quantile":
        levels = torch.arange(1, steps, dtype=torch.float64) / steps
        inner = logit_normal(torch.special.ndtri(levels), mean, std)
    else:
        normal = torch.randn(steps - 1, generator=generator, device=generator.device)
        inner = logit_normal(normal, mean, std).sort().values.cpu()
    return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)]).float()
