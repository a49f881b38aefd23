"""What all processes do together: differentiable sums and means, shares of work, and answers of the main process.

With one process these are the identity; every process must call them in the same order.

DDP averages the gradients of W ranks, 1/W sum_s dl_s/dx * sum_r dx_r/dtheta through a global x = sum_r x_r, so rank r must
backpropagate sum_s dl_s/dx: the backward of a sum over ranks is the same sum of the incoming gradients. Both directions
communicate, so every rank must backpropagate through each result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from jpeg_dlm.errors import JpegDlmError, reason_of

FAIL_TOGETHER_S = 60.0  # within which processes fail alike (assumed)

Item = TypeVar("Item")
Value = TypeVar("Value")


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


def shared(items: Sequence[Item], work: Callable[[Item], Value]) -> list[Value]:
    """Return `work(item)` of all items, in order; each process does its share of them and gets the others' results."""
    if world_size() == 1:
        return [work(item) for item in items]
    each: list[Any] = [None] * world_size()
    dist.all_gather_object(each, [work(item) for item in items[dist.get_rank() :: len(each)]])
    return [each[i % len(each)][i // len(each)] for i in range(len(items))]


def on_main(make: Callable[[], Value]) -> Value:
    """Return on every process what `make` gives on the main one, or raise its error on every process."""
    if world_size() == 1:
        return make()
    own: Exception | None = None
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as error:
            own = error
            answer[1] = error if isinstance(error, JpegDlmError) else RuntimeError(reason_of(error))
    dist.broadcast_object_list(answer, 0)
    if error := own or answer[1]:
        raise error
    return answer[0]


def main_first(make: Callable[[], Value]) -> Value:
    """Run `make` on the main process and then on the others, which find what the main process stored."""
    if world_size() > 1 and dist.get_rank() > 0:
        barrier()
        return make()
    made = make()
    barrier()
    return made


def failed_together(name: str) -> bool:
    """Return True if every process calls this with the same name soon, and none waits for the others in a collective."""
    if world_size() == 1:
        return True
    store, until = _get_default_store(), time.monotonic() + FAIL_TOGETHER_S
    store.add(name, 1)
    while store.add(name, 0) < world_size():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
