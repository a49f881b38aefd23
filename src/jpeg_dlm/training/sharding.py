"""FSDP2: every process keeps an equal part of the weights, their averages, gradients and optimizer state.

Weights are gathered for a whole step, not layer by layer: with self-conditioning a network runs up to three times in a step,
and less often on a process none of whose rows is selected, which others would wait for. Of the 20 bytes per parameter that
live between steps each process keeps its part; a step needs 4 more. Not sharded: the frozen encoder, which is in no
checkpoint, and scalar parameters, which FSDP2 does not support.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from jpeg_dlm.methods.base import FROZEN, Trainable
from jpeg_dlm.util.distributed import Ranks, all_mean, all_sum


def repeated_layers(method: Trainable) -> list[nn.Module]:
    """Return the repeated layers of all networks except the frozen encoder."""
    lists = [m for name, m in method.named_modules() if isinstance(m, nn.ModuleList) and not name.startswith(FROZEN)]
    return [layer for layers in lists for layer in layers if any(layer.children())]


def shard(method: Trainable, ranks: Ranks) -> None:
    """Shard a method over the processes in place; all start from the weights of the main process."""
    for tensor in method.state_dict().values():
        torch_dist.broadcast(tensor, 0)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    ignored = {p for name, p in method.named_parameters() if p.ndim == 0 or name.startswith(FROZEN)}
    for module in (*repeated_layers(method), method):
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=ignored).set_reshard_after_backward(False)


@contextlib.contextmanager
def unsharded(method: nn.Module) -> Iterator[None]:
    """Gather the weights on every process within the block, so that each can run the method on its own."""
    parts = [m for m in method.modules() if isinstance(m, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


# ---------------------------------------------------------------- tensors, of which each process may hold a shard


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard, which shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that is equal on every process the way `like` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def host_copies(tensors: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Copy full tensors to the host; a collective call for sharded ones, whose result only processes with `keep` hold."""
    copies = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            copies[name] = full.detach().to("cpu", non_blocking=full.is_cuda, copy=full is tensor)  # into pinned memory
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


# ---------------------------------------------------------------- gradients


@torch.no_grad()
def clip_grad_norm(parameters: Collection[Tensor], limit: float) -> Tensor:
    """Clip like torch's `clip_grad_norm_`, over sharded and unsharded parameters together; return the total norm.

    The gradients that FSDP2 does not reduce are first averaged over the processes.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(isinstance(g, DTensor) for g in gradients):
        return nn.utils.clip_grad_norm_(parameters, limit)
    squares = {True: [], False: []}
    for g in gradients:
        if not isinstance(g, DTensor):
            g.copy_(all_mean(g))
        squares[isinstance(g, DTensor)].append(local_shard(g).float().square().sum())
    norm = (all_sum(torch.stack(squares[True]).sum()) + sum(squares[False])).sqrt()
    torch._foreach_mul_([local_shard(g) for g in gradients], (limit / (norm + 1e-6)).clamp(max=1.0))  # 1e-6: as torch does
    return norm
