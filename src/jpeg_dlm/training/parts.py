"""Tensors of which each process holds a part (`DTensor`), next to ordinary ones, for which all of this is the identity.

`DTensor` is imported only where one exists: its package takes 0.7 s to load (measured), and sampling never needs it.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_divided(tensor: Any) -> TypeGuard[Any]:
    """Whether a tensor is a `DTensor`."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This process's part, which shares its memory with the tensor."""
    return tensor.to_local() if is_divided(tensor) else tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process; they must call this together."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


@torch.no_grad()
def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on every process, divided as `like` is."""
    if not is_divided(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def whole_from(part: Tensor, like: Tensor) -> Tensor:
    """All of what every process has a part of, divided as `like` is; they must call this together."""
    if not is_divided(like):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
