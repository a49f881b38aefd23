"""FSDP2: every process keeps an equal part of the weights, their averages, gradients and optimizer state.

Weights are gathered for a whole step, not layer by layer: with self-conditioning a network runs up to three times in a step,
and less often on a process none of whose rows is selected, which others would wait for. Of the 20 bytes per parameter that
live between steps each process keeps its part; a step needs 4 more. Not sharded: the frozen encoder, which is in no
checkpoint, and scalar parameters, which FSDP2 does not support.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from jpeg_dlm.machine.collectives import all_mean, all_sum
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.base import FROZEN, Trainable
from jpeg_dlm.training.parts import divided_like, is_divided, local, whole


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


def is_sharded(method: nn.Module) -> bool:
    return isinstance(method, FSDPModule)


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


# ---------------------------------------------------------------- tensors


def gathered(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Copy full tensors to CPU memory one by one; a collective call whose result only processes with `keep` hold."""
    kept = {}
    for name in sorted(tensors):  # in the same order on all processes
        full = whole(tensors[name])
        if keep:
            kept[name] = full.detach().to("cpu", copy=full is tensors[name])  # gathering has already copied the others
    return kept


def divided(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shard full tensors like those of the same name in `own`; leave unknown names for the caller to reject."""
    return {name: divided_like(tensor, own[name]) if name in own else tensor for name, tensor in tensors.items()}


# ---------------------------------------------------------------- gradients


@torch.no_grad()
def average_unsharded(parameters: Iterable[Tensor]) -> None:
    """Average over processes the gradients that FSDP2 does not reduce."""
    for p in parameters:
        if p.grad is not None and not is_divided(p.grad):
            p.grad.copy_(all_mean(p.grad))


@torch.no_grad()
def clip_grad_norm(parameters: Collection[Tensor], limit: float) -> Tensor:
    """Clip like torch's `clip_grad_norm_`, over sharded and unsharded parameters together; return the total norm."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(is_divided(g) for g in gradients):
        return nn.utils.clip_grad_norm_(parameters, limit)
    squares = {True: [], False: []}
    for g in gradients:
        squares[is_divided(g)].append(local(g).float().square().sum())
    total = all_sum(torch.stack(squares[True]).sum()) + sum(squares[False])
    norm = total.sqrt()
    torch._foreach_mul_([local(g) for g in gradients], (limit / (norm + 1e-6)).clamp(max=1.0))  # 1e-6: as torch does
    return norm
