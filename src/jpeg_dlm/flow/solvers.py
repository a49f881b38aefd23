"""ODE solvers for dz/dt = (x(z, t) - z) / (1 - t), where `predict(z, t)` gives the clean embedding x.

The linear part is solved exactly: over a step from t to u with x held constant,
z(u) = (1 - u)/(1 - t) z + (u - t)/(1 - t) x, which is also what Euler gives on this path.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

Predict = Callable[[Tensor, float], Tensor]
OnStep = Callable[[int, float, Tensor, Tensor], None]  # step, time, state before the step, prediction
Solver = Callable[[Predict, Tensor, list[float], OnStep | None], Tensor]


def velocity(x: Tensor, z: Tensor, t: float) -> Tensor:
    """v = (x - z) / (1 - t): the velocity that a clean-embedding prediction induces (appendix)."""
    return (x - z) / (1 - t)


def euler(predict: Predict, z: Tensor, grid: list[float], on_step: OnStep | None = None) -> Tensor:
    """First order, one evaluation a step (paper, Algorithm 2)."""
    for k, (t, u) in enumerate(zip(grid, grid[1:], strict=False)):
        x = predict(z, t)
        if on_step:
            on_step(k, t, z, x)
        z = z + (u - t) * velocity(x, z, t)
    return z


def heun(predict: Predict, z: Tensor, grid: list[float], on_step: OnStep | None = None) -> Tensor:
    """Second order, two evaluations a step but the last, where the velocity at t = 1 is not defined."""
    for k, (t, u) in enumerate(zip(grid, grid[1:], strict=False)):
        x = predict(z, t)
        if on_step:
            on_step(k, t, z, x)
        v = velocity(x, z, t)
        ahead = z + (u - t) * v
        z = ahead if u >= 1 else z + (u - t) * 0.5 * (v + velocity(predict(ahead, u), ahead, u))
    return z


def multistep(predict: Predict, z: Tensor, grid: list[float], on_step: OnStep | None = None) -> Tensor:
    """Second order, one evaluation a step: x is taken as linear in t through the last two predictions.

    With x(s) = x + slope (s - t) the ODE integrates to the constant-x formula plus
    slope * [(u - t) + (1 - u) ln((1 - u)/(1 - t))], where the logarithm's term ends at 0. The first step has no past and holds
    x constant. The last of a logit-normal grid is so long that extrapolating over all of it would do harm, so there x goes
    on for no longer than the two predictions lie apart; ending with x held costs more than any other step (measured).
    """
    past: tuple[float, Tensor] | None = None
    for k, (t, u) in enumerate(zip(grid, grid[1:], strict=False)):
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


SOLVERS: dict[str, Solver] = {"euler": euler, "heun": heun, "multistep": multistep}
