"""The linear probability path between Gaussian noise (t = 0) and clean embeddings (t = 1)."""

from __future__ import annotations

import torch
from torch import Tensor


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


def guidance_scale(uniform: Tensor, w_min: float, w_max: float) -> Tensor:
    """Map uniform draws to w, log-uniform in 1 + w; for the range [0.5, 5] this is ELF's 1.5 * 4**u - 1."""
    return (1 + w_min) * ((1 + w_max) / (1 + w_min)) ** uniform - 1


def guided_target(z_tgt: Tensor, second: Tensor, first: Tensor, w_B: Tensor) -> Tensor:
    """Return the self-conditioning target z_SC = z_tgt + (1 - 1/w) (second - first) (appendix, Self-Conditioning)."""
    return z_tgt + (1 - 1 / per_row(w_B, z_tgt)) * (second - first)
