"""Differentiable sums and means over all processes; with one process they are the identity.

Gradients: distributed data parallel training averages the gradients of W ranks, so it descends L = 1/W sum_s l_s, where
l_s is the loss that rank s computes. Let every rank hold the global statistic x = sum_r x_r(theta). Then

    dL/dtheta (through x) = 1/W sum_s dl_s/dx * sum_r dx_r/dtheta = 1/W sum_r [ sum_s dl_s/dx ] dx_r/dtheta

DDP takes the outer average, so rank r must backpropagate the bracket: the backward of a sum over ranks is the same sum of
the incoming gradients. When all ranks compute one global loss f(x), the bracket is W f'(x), the average cancels the W, and
every rank applies the gradient that a single process would compute on the whole batch. An identity backward would be W
times too small.

Both directions communicate, so every rank must call these in the same order and backpropagate through each result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        out = t.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_sum(grad)


def all_sum(t: Tensor) -> Tensor:
    """Return the elementwise sum of `t` over all processes; differentiable, `t` is not modified."""
    return _AllSum.apply(t) if world_size() > 1 else t  # pyright: ignore[reportReturnType]


def all_mean(t: Tensor) -> Tensor:
    """Return the elementwise mean of `t` over all processes; differentiable."""
    return all_sum(t) / world_size() if world_size() > 1 else t


def barrier() -> None:
    """Wait until every process has reached this call."""
    if world_size() > 1:
        dist.barrier()
