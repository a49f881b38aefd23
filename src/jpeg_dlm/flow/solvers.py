"""Solvers for dz/dt = (x(z, t) - z) / (1 - t), where `predict(z, t)` returns the clean embedding x.

The linear part is solved exactly: over a step from t to u with x held constant,
z(u) = (1 - u)/(1 - t) z + (u - t)/(1 - t) x, which equals an Euler step on this path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

Predict = Callable[[Tensor, float], Tensor]
OnStep = Callable[[int, float, Tensor, Tensor], None]  # step, time, state before the step, prediction
Solver = Callable[[Predict, Tensor, list[float], OnStep | None], Tensor]


def velocity(x: Tensor, z: Tensor, t: float) -> Tensor:
    """Return the velocity v = (x - z) / (1 - t) of a clean-embedding prediction x (appendix)."""
    return (x - z) / (1 - t)


def euler(predict: Predict, z: Tensor, grid: list[float], on_step: OnStep | None = None) -> Tensor:
    """Solve in first order, with one evaluation per step (paper, Algorithm 2)."""
    for k, (t, u) in enumerate(pairwise(grid)):
        x = predict(z, t)
        if on_step:
            on_step(k, t, z, x)
        z = z + (u - t) * velocity(x, z, t)
    return z


def heun(predict: Predict, z: Tensor, grid: list[float], on_step: OnStep | None = None) -> Tensor:
    """Solve in second order, with two evaluations per step but the last, as the velocity is undefined at t = 1."""
    for k, (t, u) in enumerate(pairwise(grid)):
        x = predict(z, t)
        if on_step:
            on_step(k, t, z, x)
        v = velocity(x, z, t)
        ahead = z + (u - t) * v
        z = ahead if u >= 1 else z + (u - t) * 0.5 * (v + velocity(predict(ahead, u), ahead, u))
    return z


def multistep(predict: Predict, z: Tensor, grid: list[float], on_step: OnStep | None = None) -> Tensor:
    """Solve in second order, with one evaluation per step: extrapolate x linearly in t from the last two predictions.

    With x(s) = x + slope (s - t), the ODE integrates to the constant-x formula plus
    slope * [(u - t) + (1 - u) ln((1 - u)/(1 - t))], where the logarithmic term vanishes at u = 1. The first step holds x
    constant, and the last, long one extrapolates no further than the distance of the two predictions (measured).
    """
    past: tuple[float, Tensor] | None = None
    for k, (t, u) in enumerate(pairwise(grid)):
        x = predict(z, t)
        if on_step:
            on_step(k, t, z, x)
        step = z + (u - t) * velocity(x, z, t)
        if past is not None:
            slope = (x - past[1]) / (t - past[0])
            reach = (u - t) + (1 - u) * math.log((1 - u) / (1 - t)) if u < 1 else min(1 - t, t - past[0])
            step = step + slope * reach
        z, past = step, (t, x)
    return z


def back_share(t: float, u: float, gamma: float) -> float:
    """Return a = 1 - gamma (u - t), at least 0: the share of the state that a step back keeps."""
    return min(1.0, max(0.0, 1 - gamma * (u - t)))


def step_back(z: Tensor, t: float, u: float, gamma: float, noise: Tensor) -> tuple[Tensor, float]:
    """Return (z_b, t_b): scale z and t by a = `back_share`, and fill up z with fresh noise.

    The two independent noises add up to less than the noise of the path at t_b, so z_b is slightly too clean for t_b (ELF).
    """
    a = back_share(t, u, gamma)
    return a * z + (1 - a) * noise, a * t


def stochastic_times(grid: list[float], gamma: float) -> list[float]:
    """Return the times at which `stochastic` evaluates: each time of the grid after its step back."""
    return [back_share(t, u, gamma) * t for t, u in pairwise(grid[:-1])] + grid[-2:]


def stochastic(gamma: float, fresh: Callable[[], Tensor]) -> Solver:
    """Return Euler steps that each begin with `step_back`, except the last (ELF); `fresh` draws the noise.

    The network sees states with noise of its own making replaced, so that it can mend earlier errors.
    """

    def solve(predict: Predict, z: Tensor, grid: list[float], on_step: OnStep | None = None) -> Tensor:
        for k, (t, u) in enumerate(pairwise(grid)):
            if u < grid[-1]:
                z, t = step_back(z, t, u, gamma, fresh())
            x = predict(z, t)
            if on_step:
                on_step(k, t, z, x)
            z = z + (u - t) * velocity(x, z, t)
        return z

    return solve


SOLVERS: dict[str, Solver] = {"euler": euler, "heun": heun, "multistep": multistep}
