"""Geometry of a latent space: its spectrum, effective rank, distance from N(0, I), and robustness to noise.

u (R, D) holds R latent vectors of this process, z (B, N, D) those of B texts by position. With several processes, every
mean is global and each process has equally many vectors, so results do not depend on how a batch is split. Everything
is computed in fp32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jpeg_dlm.flow.path import interpolate, per_sample
from jpeg_dlm.methods.base import Batch, LatentModel
from jpeg_dlm.methods.regularizers import covariance, sigreg, unit_directions
from jpeg_dlm.util.distributed import all_mean, world_size
from jpeg_dlm.util.rng import RowNoise, generator

SLICES = 256  # directions of the SIGReg distance (the default of objective.sigreg_slices)
DECODE_TIMES = (0.3, 0.5, 0.7)  # shares of clean latent at which decoding is measured (assumed: from hopeless to easy)
DECODE_PART = 4  # one row in four is decoded: decoding all rows three times costs as much as all losses (measured)
POINT_DISTANCE = 0.402  # SIGReg distance of vectors that are all 0: the integral of phi (1 - phi)**2 over [-3, 3]


def spectrum(cov_DD: Tensor) -> Tensor:
    """Return the eigenvalues in descending order in float64, or NaN if the covariance is not finite."""
    cov_DD = cov_DD.cpu().double()
    if not bool(cov_DD.isfinite().all()):
        return torch.full((len(cov_DD),), torch.nan, dtype=torch.float64)
    return torch.linalg.eigvalsh(cov_DD).flip(0).clamp_min(0)  # rounding may leave a zero slightly negative


def effective_rank(eigenvalues_D: Tensor) -> float:
    """Return exp of the entropy of the normalized eigenvalues: k for k equal ones, 0 if all are 0."""
    p = eigenvalues_D / eigenvalues_D.sum()
    return float(torch.special.entr(p).sum().exp()) if eigenvalues_D.sum() != 0 else 0.0


def measure(z_BND: Tensor) -> dict[str, float]:
    """Measure the latents of all processes: rank, smallest deviation of a channel, variance due to text, SIGReg distance.

    `rank` is the effective rank relative to the largest possible one. `text` is the variance around the mean of each
    position: 0 if latents depend on their position only. `sigreg` is the statistic per vector over fixed directions, as the
    statistic itself grows with their number: 0 for N(0, I), POINT_DISTANCE for a single point.
    """
    z_BND = z_BND.float()
    u = z_BND.flatten(0, 1)
    cov_DD, vectors = covariance(u), len(u) * world_size()
    eigenvalues = spectrum(cov_DD)
    directions = unit_directions(torch.randn(u.shape[1], SLICES, generator=generator(0, "geometry"))).to(u.device)
    return {
        "rank": effective_rank(eigenvalues) / max(1, min(len(eigenvalues), vectors - 1)),  # R vectors span R - 1 directions
        "std_min": float(cov_DD.diagonal().clamp_min(0).sqrt().min()),
        "text": float(all_mean((z_BND - all_mean(z_BND.mean(0))).square().mean())),
        "sigreg": float(sigreg(u, directions)) / vectors,
    }


def noisy_accuracy(
    z: Tensor, decode: Callable[[Tensor], Tensor], batch: Batch, noise: RowNoise, times: Sequence[float] = DECODE_TIMES
) -> list[float]:
    """Return, for each t, the share of this process's real tokens decoded from z_t = t z + (1 - t) eps, with one eps."""
    eps = noise.normal("decode", *z.shape[1:])
    return [float(batch.accuracy(decode(interpolate(z, eps, per_sample(t, z))))) for t in times]


def latent_measures(model: LatentModel, batch: Batch, noise: RowNoise) -> dict[str, float]:
    """Return the values that an evaluation logs; accuracies are of this process's rows and not yet averaged."""
    z = model.encode(batch)
    values = {f"latent_{name}": value for name, value in measure(z).items()}
    rows = max(1, len(z) // DECODE_PART)
    shares = noisy_accuracy(z[:rows], model.tokens, batch, replace(noise, rows=noise.rows[:rows]))
    return values | {f"decode_t{t:g}": share for t, share in zip(DECODE_TIMES, shares, strict=True)}
