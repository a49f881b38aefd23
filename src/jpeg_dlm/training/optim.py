"""AdamW or Muon with one learning rate per group, selective weight decay, a shared schedule, and weight averaging."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.base import ParameterGroup, rounded_up_share
from jpeg_dlm.training.sharding import local_shard, shard_like
from jpeg_dlm.util.errors import CheckpointError

MOMENTUM = 0.95  # of Muon (ELF)
BETA1 = 0.9  # of AdamW (paper)
SLOTS = {AdamW: {"step", "exp_avg", "exp_avg_sq"}, Muon: {"momentum_buffer"}}  # state of a parameter

# Learned tokens, queries and position tables are inputs, not maps, and get no weight decay (as in JiT and ELF).
TABLES = ("pos_emb.weight", "pos_latent.weight", "embedding.weight")
NOT_DECAYED = ("latents", "base_query", "tokens", "context_kind", *TABLES)


def build_optimizers(groups: list[ParameterGroup], matrices: Collection[str], train: TrainConfig) -> list[Optimizer]:
    """Return AdamW, or with `train.optimizer` muon that of the hidden `matrices` and AdamW for all other parameters.

    Parameters of equal group, decay and kind share an entry of `param_groups`.
    """
    kinds: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # for Muon or not
    for group in groups:
        rate = (train.codec_lr if group.name == "codec" else train.lr) * group.factor
        alike: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
        for name, p in group.parameters.items():
            is_matrix, undecayed = train.optimizer == "muon" and name in matrices, p.ndim < 2 or name.endswith(NOT_DECAYED)
            # Sharded and whole parameters cannot share a fused update.
            alike.setdefault((undecayed, is_matrix, isinstance(p, DTensor)), []).append(p)
        for (undecayed, is_matrix, _), chosen in sorted(alike.items()):
            decay = 0.0 if undecayed else train.weight_decay
            kinds[is_matrix].append({"params": chosen, "name": group.name, "peak": rate, "lr": rate, "weight_decay": decay})
    optimizers: list[Optimizer] = []
    if kinds[True]:
        optimizers.append(Muon(kinds[True], momentum=MOMENTUM))
    if kinds[False]:
        optimizers.append(AdamW(kinds[False], betas=(BETA1, train.beta2), eps=train.adam_eps, fused=True))
    return optimizers


def apply_gradients(optimizers: list[Optimizer], finite: Tensor) -> None:
    """Update the weights, or leave weights and state as they are if a number of the step is not finite."""
    for optimizer in optimizers:
        if isinstance(optimizer, AdamW):
            optimizer.found_inf = finite.logical_not().float()  # pyright: ignore[reportAttributeAccessIssue] - read on the device
        elif not finite:  # waits for the device
            continue
        optimizer.step()


# ---------------------------------------------------------------- state in checkpoints


def optimizer_state(optimizers: list[Optimizer], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of every parameter that had a gradient, as tensors named 'slot/parameter'; rates are in the config."""
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    return {f"{slot}/{name}": t for name, p in parameters.items() for slot, t in states.get(p, {}).items()}


def load_optimizer_state(optimizers: list[Optimizer], parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_state` returned."""
    owners = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for optimizer in optimizers:
        optimizer.state.clear()
    for key, value in tensors.items():
        slot, _, name = key.partition("/")
        p = parameters.get(name)
        if p is None or slot not in SLOTS[type(owners[p])] or value.shape not in (p.shape, torch.Size([])):
            raise CheckpointError(f"The optimizer state '{key}' is of another model or optimizer: use the run's own config.")
        copy = value.to(p.device, copy=True)
        owners[p].state[p][slot] = shard_like(copy, p) if value.shape == p.shape else copy


# ---------------------------------------------------------------- learning rates


def schedule_factor(step: int, train: TrainConfig) -> float:
    """Return the fraction of the peak rate at optimizer step `step`: linear warm-up, then the schedule."""
    warmup = train.warmup or rounded_up_share(train.steps, 0.05, most=2500)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    shapes = {"cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)), "linear": lambda x: 1 - x, "constant": lambda x: 1.0}
    return train.lr_floor + (1 - train.lr_floor) * shapes[train.schedule](min(1.0, progress))


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> dict[str, float]:
    """Scale the peak rate of every group by the same factor; return the rates for the log."""
    rates = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["peak"] * factor
        rates[f"lr_{group['name']}"] = group["lr"]
    return rates


class WeightEma:
    """Exponential moving average of the trainable weights, used for sampling and export (paper).

    With `warmup`, the decay of update n is at most (1 + n) / (10 + n) (MDLM, SEDD, Duo, FLM).
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, warmup: bool = False) -> None:
        self.decay, self.parameters, self.warmup = decay, parameters, warmup
        self.shadow = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, n: int) -> None:
        """Average in the weights after optimizer step n, counted from 1."""
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        averages, weights = (list(map(local_shard, of.values())) for of in (self.shadow, self.parameters))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the live weights and the average; calling it twice restores both."""
        for name, p in self.parameters.items():
            live, average = local_shard(p), local_shard(self.shadow[name])
            kept = live.clone()
            live.copy_(average)
            average.copy_(kept)
