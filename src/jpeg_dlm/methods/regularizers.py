"""SIGReg and the variance and covariance terms, which keep the latent space from collapsing; standardization (appendix).

U (R, D) holds R latent vectors of this process. With several processes, every mean is global, so the terms do not depend
on how a batch is split. Everything is computed in fp32, under autocast too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmObjective
from jpeg_dlm.nn.layers import fp32_island
from jpeg_dlm.util.distributed import all_mean, world_size
from jpeg_dlm.util.rng import RowNoise

VARIANCE_FLOOR = 1e-4  # keeps standardization and the hinge finite for a dead channel (COSMOS, VICReg)
KNOTS, T_MAX = 17, 3.0  # quadrature knots and largest frequency of SIGReg (LeJEPA)
DT = T_MAX / (KNOTS - 1)


def latent_regularizers(z: Tensor, o: JpegDlmObjective, steps: int, noise: RowNoise) -> dict[str, Tensor]:
    """Return the SIGReg, variance and covariance terms of the context compressor's latents (B, N, D)."""
    u, terms = z.flatten(0, 1), {}
    if o.sigreg_weight:
        directions = unit_directions(noise.shared_normal("sigreg", u.shape[1], o.sigreg_slices))
        factor = o.sigreg_vectors / (len(u) * world_size()) if o.sigreg_vectors else 1.0
        if o.sigreg_late:  # the compressor first learns to keep tokens, then to fill its space
            factor *= 1 + (o.sigreg_late / o.sigreg_weight - 1) * min(1.0, max(0.0, 10 * noise.step / max(1, steps) - 0.5))
        terms["sigreg"] = factor * sigreg(u, directions)
    terms["var"], terms["cov"] = variance_covariance(u)
    return terms


def unit_directions(normal_DM: Tensor) -> Tensor:
    """Return the columns of a normal matrix, divided by their lengths, which are random unit directions."""
    return normal_DM / normal_DM.norm(dim=0)


def sigreg(u: Tensor, directions: Tensor) -> Tensor:
    """Return SIGReg (sketched isotropic Gaussian regularization): the mean Epps-Pulley statistic over unit directions."""
    with fp32_island(u):
        return epps_pulley(u.float() @ directions).mean()


def epps_pulley(y: Tensor) -> Tensor:
    """Return the Epps-Pulley distance of each column of y (R, M) from N(0, 1), times R of all processes: shape (M,).

    Uses trapezoidal quadrature on [-T_MAX, T_MAX], folded onto the half line by symmetry, and LeJEPA's Gaussian weight.
    """
    t = torch.linspace(0.0, T_MAX, KNOTS, dtype=torch.float32, device=y.device)
    phi = torch.exp(-0.5 * t**2)
    weights = torch.full_like(t, 2 * DT)
    weights[0] = weights[-1] = DT
    real_KM, imag_KM = all_mean(_WaveMeans.apply(y))  # one all-reduce for all knots
    distance_KM = (real_KM - phi[:, None]) ** 2 + imag_KM**2
    return (weights * phi) @ distance_KM * (len(y) * world_size())


def _waves(y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield cos(k dt y) and sin(k dt y), each a rotation of the pair before; later pairs overwrite earlier ones."""
    angle = DT * y
    cos, sin = angle.cos(), angle.sin_()
    real, imag, spare = torch.ones_like(y), torch.zeros_like(y), torch.empty_like(y)
    for _ in range(KNOTS):
        yield real, imag
        torch.mul(real, cos, out=spare).addcmul_(imag, sin, value=-1)
        imag.mul_(cos).addcmul_(real, sin)
        real, spare = spare, real


class _WaveMeans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return torch.stack([torch.stack([real.mean(0), imag.mean(0)]) for real, imag in _waves(y)], dim=1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        dy = torch.zeros_like(y)
        for k, (real, imag) in enumerate(_waves(y)):
            t = k * DT / len(y)
            dy.addcmul_(imag, g[0, k], value=-t).addcmul_(real, g[1, k], value=t)
        return dy


def covariance(u: Tensor) -> Tensor:
    """Return the covariance (D, D) of the vectors of all processes, normalized by their number."""
    u = u.float()
    with fp32_island(u):
        centered = u - all_mean(u.mean(0))
        return all_mean(centered.T @ centered / len(u))


def variance_covariance(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return (L_var, L_cov): the hinge on channel deviations below 1, and the mean squared off-diagonal covariance."""
    rows = len(u) * world_size()
    cov = covariance(u) * (rows / max(1, rows - 1))
    variance = cov.diagonal()
    hinge = torch.relu(1 - torch.sqrt(variance + VARIANCE_FLOOR)).mean()
    off_diagonal = (cov**2).sum() - (variance**2).sum()
    return hinge, off_diagonal / u.shape[1]


class Standardization(nn.Module):
    """Latents on the scale of the noise, with mean 0 and variance 1 (appendix): buffers of mean and inverse deviation."""

    latent_mean: Tensor
    latent_scale: Tensor

    def start_statistics(self, *shape: int) -> None:
        self.register_buffer("latent_mean", torch.zeros(shape))
        self.register_buffer("latent_scale", torch.ones(shape))

    def standardize(self, z: Tensor) -> Tensor:
        return (z.float() - self.latent_mean) * self.latent_scale

    def unstandardize(self, z: Tensor) -> Tensor:
        return z / self.latent_scale + self.latent_mean
