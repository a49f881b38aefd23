"""Likelihood of latents by the probability-flow ODE, and the bound on tokens that it gives.

A state with the amplitude r of its signal is y = r x + eps with eps ~ N(0, I). On the linear path y = z_t / (1 - t) and
r = t / (1 - t), and the ODE dz/dt = (x(z, t) - z) / (1 - t) of a denoiser x becomes dy/dr = x(y, r): regular at both ends, and
y is N(0, I) at r = 0. With the Jacobian J of x in y,

    log p(y_R) = log N(y_0; 0, I) - integral of tr J dr from 0 to R

Tokens s with latents x have q(y_R | s) = N(R x, I): noise of width 1 / R around the latents. For any decoder p(s | y),

    -log p(s) <= E_q[ |y_0|**2 / 2 - |eps|**2 / 2 + integral of tr J dr - log p(s | y_R) ]

Hutchinson's estimate of tr J is v J v with random signs v. Shapes: B batch, the others are of any latents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

Predict = Callable[[Tensor, float], Tensor]  # x(y, r)

FIRST, BEND = 1e-3, 0.3  # where r begins, and where its steps begin to grow, for latents of unit variance (assumed)


def signal_grid(steps: int, last: float, unit: float = 1.0) -> list[float]:
    """Return amplitudes from almost 0 to `last`, evenly spaced at first and then with a constant ratio.

    `unit` is the amplitude from which on latents can be told from noise.
    """
    ends = math.asinh(FIRST / BEND), math.asinh(last / unit / BEND)
    return (unit * BEND * torch.linspace(*ends, steps + 1, dtype=torch.float64).sinh()).tolist()


def prediction_and_trace(predict: Predict, y: Tensor, r: float, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return x(y, r) and an unbiased estimate of the trace of its Jacobian in each row (B)."""
    with torch.inference_mode(False), torch.enable_grad():
        y = y.detach().clone().requires_grad_()
        x = predict(y, r)
        (back,) = torch.autograd.grad(x, y, signs)
    return x.detach(), (back * signs).flatten(1).double().sum(1)


def to_noise(predict: Predict, y: Tensor, grid: Sequence[float], signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return y at the beginning of a rising grid and the integral of tr J over it (B), by classical Runge-Kutta steps."""
    total_B = y.new_zeros(len(y), dtype=torch.float64)
    for r, s in pairwise(reversed(grid)):
        h, middle = s - r, (r + s) / 2
        a, trace_a = prediction_and_trace(predict, y, r, signs)
        b, trace_b = prediction_and_trace(predict, y + h / 2 * a, middle, signs)
        c, trace_c = prediction_and_trace(predict, y + h / 2 * b, middle, signs)
        d, trace_d = prediction_and_trace(predict, y + h * c, s, signs)
        y = y + h / 6 * (a + 2 * b + 2 * c + d)
        total_B -= h / 6 * (trace_a + 2 * trace_b + 2 * trace_c + trace_d)
    return y, total_B


def code_nats(
    predict: Predict, x: Tensor, eps: Tensor, signs: Tensor, grid: Sequence[float], given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y_R of latents x and log q(y_R | s) - log p(y_R) (B); latents where `given` is True are known and cost nothing."""
    y = grid[-1] * x + eps
    if given is None:
        y_0, trace_B = to_noise(predict, y, grid, signs)
    else:  # known latents go straight to their own noise
        y_0, trace_B = to_noise(lambda y, r: torch.where(given, x, predict(y, r)), y, grid, signs)
        y_0 = torch.where(given, eps, y_0)
    return y, half_squares(y_0) - half_squares(eps) + trace_B


def half_squares(y: Tensor) -> Tensor:
    """Return half the squared length of each row (B) in float64."""
    return y.flatten(1).double().square().sum(1) / 2
