"""Compare the predicted clean latents with the best linear estimate, the Wiener filter of their covariance.

States are on the linear path z_t = t z + (1 - t) eps. A network that has learned only means and covariances has the error
of the filter, a ratio of 1; models that write text are below 1. Nothing here communicates with other processes.
Shapes: B rows, N latents, D latent width; G groups of K coordinates that are filtered together, S rows to fit on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from jpeg_dlm.flow.path import interpolate
from jpeg_dlm.methods.base import Batch, Latents
from jpeg_dlm.methods.common.latent_geometry import effective_rank, spectrum
from jpeg_dlm.nn.precision import fp32_island
from jpeg_dlm.rng import RowNoise

TIMES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
JOINT_SIZE = 1024  # largest N * D whose coordinates are filtered together: the spectrum takes one core a second (measured)
VARIANCE_PART = 4  # one row in four is used for variances (assumed)


@dataclass(frozen=True)
class LinearDenoiser:
    """The best linear estimate of z from z_t, given the means, principal directions and variances of each group."""

    mean_GK: Tensor
    directions_GKK: Tensor  # columns, in ascending order of variance
    variances_GK: Tensor
    spectrum_GK: Tensor  # variances of the rows that the directions were fitted on, which are too spread out

    @property
    def joint(self) -> bool:
        """True if all coordinates of a row are filtered together, False if each position is filtered separately."""
        return len(self.mean_GK) == 1

    def __call__(self, z_t_BND: Tensor, t: float) -> Tensor:
        """Return mean + t C (t**2 C + (1 - t)**2 I)**-1 (z_t - t mean)."""
        v = self.variances_GK
        gain_GK = t * v / (t**2 * v + (1 - t) ** 2)
        with fp32_island(z_t_BND):
            x_BGK = z_t_BND.float().reshape(-1, *self.mean_GK.shape) - t * self.mean_GK
            u_BGK = torch.einsum("bgk,gkj->bgj", x_BGK, self.directions_GKK) * gain_GK
            x_BGK = torch.einsum("bgj,gkj->bgk", u_BGK, self.directions_GKK) + self.mean_GK
        return x_BGK.reshape(z_t_BND.shape)


def fit_linear_denoiser(z_SND: Tensor, joint_size: int = JOINT_SIZE) -> LinearDenoiser:
    """Fit the filter of all coordinates together, or of each position if there are more than `joint_size` coordinates.

    A sample spectrum is too spread out. So the variances are measured on some rows along the directions of the others
    (Abadir, Distaso and Zikes 2014); this beat the sample covariance and Ledoit and Wolf's shrinkage (measured).
    """
    rows, positions, width = z_SND.shape
    groups = 1 if positions * width <= joint_size else positions
    z_SGK = z_SND.float().reshape(rows, groups, -1)
    mean_GK = z_SGK.mean(0)
    part = torch.arange(rows, device=z_SND.device) % VARIANCE_PART == 0
    with fp32_island(z_SND):
        x_SGK = z_SGK - mean_GK
        spectrum_GK, directions_GKK = _principal(x_SGK)
        variances_GK = torch.einsum("sgk,gkj->sgj", x_SGK[part], _principal(x_SGK[~part])[1]).square().mean(0)
    return LinearDenoiser(mean_GK, directions_GKK, variances_GK.sort(1)[0], spectrum_GK)


def _principal(x_SGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ascending eigenvalues and eigenvectors of each group's covariance, or NaN if it is not finite."""
    cov_GKK = torch.einsum("sgk,sgj->gkj", x_SGK, x_SGK) / len(x_SGK)
    if not bool(cov_GKK.isfinite().all()):
        return torch.full_like(cov_GKK[..., 0], torch.nan), torch.full_like(cov_GKK, torch.nan)
    values_GK, vectors_GKK = torch.linalg.eigh(cov_GKK)
    return values_GK.clamp_min(0), vectors_GKK


def ranks(z_SND: Tensor, linear: LinearDenoiser) -> dict[str, float]:
    """Return the effective rank of the latent vectors, and of whole rows if they are filtered together."""
    with fp32_island(z_SND):
        cov_DD = torch.cov(z_SND.float().flatten(0, 1).T, correction=0)
    found = {"rank": effective_rank(spectrum(cov_DD))}
    return found | ({"rank_joint": effective_rank(linear.spectrum_GK[0].double())} if linear.joint else {})


def compare_denoisers(parts: Iterable[tuple[Latents, Batch, RowNoise]], linear: LinearDenoiser) -> dict[str, float]:
    """Return, for each t, the relative squared errors of network and filter, their ratio, and the network's token accuracy.

    The noise of a row is the same at every t and for both network and filter.
    """
    network, filtered, right = (torch.zeros(len(TIMES), dtype=torch.float64) for _ in range(3))
    squares, real = 0.0, 0
    for latents, batch, noise in parts:
        assert latents.predict is not None
        z = latents.z_BND.float()
        mask_BL = batch.real_BL
        squares, real = squares + float(z.square().sum()), real + int(mask_BL.sum())
        eps = noise.normal("diagnosis", *z.shape[1:])
        for i, t in enumerate(TIMES):
            z_t = interpolate(z, eps, torch.full((len(z),), t, device=z.device))
            x = latents.predict(z_t, t)
            network[i] += float((x.float() - z).square().sum())
            filtered[i] += float((linear(z_t, t) - z).square().sum())
            right[i] += int(((latents.decode(x) == batch.tokens_BL) & mask_BL).sum())
    found = {"error": network / squares, "linear": filtered / squares, "ratio": network / filtered, "accuracy": right / real}
    return {f"{name}_{t:g}": float(x) for name, values in found.items() for t, x in zip(TIMES, values, strict=True)}
