"""FSDP2: every process keeps an equal part of the weights, their averages, gradients and optimizer state.

Weights are gathered when a step begins and let go when it ends, not layer by layer: a network runs up to three times in a step
(self-conditioning), and less often on a process none of whose rows is chosen for it, so gathering as layers need it would
cost more and could wait for a process that does not take part. What is divided is all that lives between steps: of 20 bytes
a parameter (weight, average, gradient and two of Adam) each process keeps its part, and 4 more within a step.

Not sharded: the frozen encoder, which belongs to no checkpoint, and parameters that are single numbers, which FSDP2 refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from jpeg_dlm.collectives import all_mean, all_sum
from jpeg_dlm.methods.base import FROZEN, Trainable
from jpeg_dlm.training.dist import Ranks
from jpeg_dlm.training.parts import divided_like, is_divided, local, whole


def repeated_layers(method: Trainable) -> list[nn.Module]:
    """The layers that networks are stacks of; those of the frozen encoder do not count."""
    lists = [m for name, m in method.named_modules() if isinstance(m, nn.ModuleList) and not name.startswith(FROZEN)]
    return [layer for layers in lists for layer in layers if any(layer.children())]


def shard(method: Trainable, ranks: Ranks) -> None:
    """Spread a method over the processes, in place; all start from the weights of the main one."""
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
    """Within the block every process has whole weights, so that one can use them without the others."""
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
    """Whole tensors in main memory, one after the other; processes that do not keep them only take part."""
    kept = {}
    for name in sorted(tensors):  # in one order on all processes, which that of a dictionary filled from a set is not
        full = whole(tensors[name])
        if keep:
            kept[name] = full.detach().cpu()
    return kept


def divided(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors divided as those of the same name are; names that are unknown stay for others to refuse."""
    return {name: divided_like(tensor, own[name]) if name in own else tensor for name, tensor in tensors.items()}


# ---------------------------------------------------------------- gradients


@torch.no_grad()
def average_unsharded(parameters: Iterable[Tensor]) -> None:
    """Mean over processes of the gradients that FSDP2 does not reduce."""
    for p in parameters:
        if p.grad is not None and not is_divided(p.grad):
            p.grad.copy_(all_mean(p.grad))


@torch.no_grad()
def clip_grad_norm(parameters: Collection[Tensor], limit: float) -> Tensor:
    """`clip_grad_norm_` of torch over whole and sharded parameters together; returns the norm of all."""
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
