"""Differentiable sums and means over all processes; with one process they are the identity.

DDP averages the gradients of W ranks, 1/W sum_s dl_s/dx * sum_r dx_r/dtheta through a global x = sum_r x_r, so rank r must
backpropagate sum_s dl_s/dx: the backward of a sum over ranks is the same sum of the incoming gradients. Both directions
communicate, so every rank must call these in the same order and backpropagate through each result.
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
