"""AdamW or Muon with one learning rate per group, selective weight decay, a shared schedule, and weight averaging."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.base import ParameterGroup, rounded_up_share
from jpeg_dlm.training.muon import Muon
from jpeg_dlm.training.parts import is_divided, local

# Learned tokens, queries and position tables are inputs, not maps, and get no weight decay (as in JiT and ELF).
NOT_DECAYED = (
    "latents", "base_query", "tokens", "no_context", "context_kind", "pos_emb.weight", "pos_latent.weight", "embedding.weight",
)  # fmt: skip


def is_decayed(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.endswith(NOT_DECAYED)


def learning_rate(group: str, train: TrainConfig) -> float:
    """Return the peak learning rate of a group."""
    return train.codec_lr if group == "codec" else train.lr


def build_optimizer(groups: list[ParameterGroup], train: TrainConfig) -> Optimizer:
    """Build the optimizer of the config; parameters of equal group, decay and update rule share an entry of `param_groups`."""
    muon = train.optimizer == "muon"
    param_groups = []
    for group in groups:
        rate = learning_rate(group.name, train) * group.factor
        kinds: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
        for name, p in group.parameters.items():
            # Sharded and whole parameters cannot share a fused update.
            kinds.setdefault((not is_decayed(name, p), muon and p.ndim == 2, is_divided(p)), []).append(p)
        for (undecayed, matrix, _), chosen in sorted(kinds.items()):
            shared = {"name": group.name, "peak": rate, "lr": rate, "weight_decay": 0.0 if undecayed else train.weight_decay}
            param_groups.append({"params": chosen} | shared | ({"matrix": matrix} if muon else {}))
    betas = (train.beta1, train.beta2)
    return Muon(param_groups, betas) if muon else AdamW(param_groups, betas=betas, eps=train.adam_eps, fused=True)


def schedule_factor(step: int, train: TrainConfig) -> float:
    """Return the fraction of the peak rate at optimizer step `step`: linear warm-up, then the schedule."""
    warmup = train.warmup or rounded_up_share(train.steps, 0.05, most=2500)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    shapes = {"cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)), "linear": lambda x: 1 - x, "constant": lambda x: 1.0}
    return train.lr_floor + (1 - train.lr_floor) * shapes[train.schedule](min(1.0, progress))


def set_learning_rates(optimizer: Optimizer, factor: float) -> dict[str, float]:
    """Scale the peak rate of every group by the same factor; return the rates for the log."""
    rates = {}
    for group in optimizer.param_groups:
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
        torch._foreach_lerp_(list(map(local, self.shadow.values())), list(map(local, self.parameters.values())), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the live weights and the average; calling it twice restores both."""
        for name, p in self.parameters.items():
            live, average = local(p), local(self.shadow[name])
            kept = live.clone()
            live.copy_(average)
            average.copy_(kept)
