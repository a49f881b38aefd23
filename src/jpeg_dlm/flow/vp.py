"""The variance-preserving diffusion of COSMOS: z_t = alpha z_0 + sigma eps on the tan-d schedule, and its reverse SDE.

Time runs from data (t = 0) to noise (t = 1), opposite to the linear path of `flow.path`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BETA_T_MAX = 0.95  # beta is constant from here on, as it has a pole at t = 1 (COSMOS)


@dataclass(frozen=True)
class TanSchedule:
    """SNR(t) = [d tan(pi t / 2)]**-2; a larger d adds noise earlier (paper: 5)."""

    d: float = 5.0

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return (alpha, sigma) with alpha**2 + sigma**2 = 1, from sine and cosine, as the tangent is undefined at t = 1."""
        data, noise = torch.cos(math.pi / 2 * t), self.d * torch.sin(math.pi / 2 * t)
        length = torch.hypot(data, noise)
        return data / length, noise / length

    def time(self, ratio: float) -> float:
        """Return the time t at which sigma / alpha = d tan(pi t / 2) equals `ratio`."""
        return 2 / math.pi * math.atan(ratio / self.d)

    def beta(self, t: Tensor) -> Tensor:
        """Return -d log(alpha**2) / dt, the rate of the forward SDE dz = -beta z / 2 dt + sqrt(beta) dw."""
        angle = math.pi / 2 * t.clamp(max=BETA_T_MAX)
        return math.pi * self.d**2 * torch.tan(angle) / (torch.cos(angle) ** 2 + self.d**2 * torch.sin(angle) ** 2)

    def reverse_step(self, z: Tensor, x0: Tensor, t: float, dt: float) -> tuple[Tensor, float]:
        """Return (mean, noise standard deviation) of one Euler step of the reverse SDE from t to t + dt, dt < 0."""
        at = torch.tensor(t, dtype=torch.float64)
        alpha, sigma = map(float, self.alpha_sigma(at))
        beta = float(self.beta(at))
        score = (alpha * x0 - z) / sigma**2
        return z + dt * (-beta / 2 * z - beta * score), math.sqrt(-beta * dt)
