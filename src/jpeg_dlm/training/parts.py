"""Functions on sharded tensors (`DTensor`), of which each process holds a part; ordinary tensors pass unchanged.

`DTensor` is imported only where one exists: its package takes 0.7 s to load (measured), and sampling never needs it.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_divided(tensor: Any) -> TypeGuard[Any]:
    """Return True for a `DTensor`."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this process's part, which shares memory with the tensor."""
    return tensor.to_local() if is_divided(tensor) else tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every process; a collective call."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


@torch.no_grad()
def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that is equal on every process the way `like` is sharded."""
    if not is_divided(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def whole_from(part: Tensor, like: Tensor) -> Tensor:
    """Gather the full tensor from parts that are sharded like `like`; a collective call."""
    if not is_divided(like):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
