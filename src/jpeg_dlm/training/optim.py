"""AdamW with one learning rate per group, decay only where it helps, and the shared schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.base import ParameterGroup, rounded_up_share

# Learned tokens, queries and position tables are inputs, not maps: they are not pulled to zero (practice of JiT and ELF).
NOT_DECAYED = ("latents", "base_query", "tokens", "pos_emb.weight", "pos_latent.weight", "embedding.weight")


def is_decayed(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.endswith(NOT_DECAYED)


def learning_rate(group: str, train: TrainConfig) -> float:
    """The peak rate the config gives a group."""
    return train.codec_lr if group == "codec" else train.lr


def build_optimizer(groups: list[ParameterGroup], train: TrainConfig) -> AdamW:
    param_groups = []
    for group in groups:
        for decayed in (True, False):
            chosen: list[nn.Parameter] = [p for n, p in group.parameters.items() if is_decayed(n, p) is decayed]
            if chosen:
                rate = learning_rate(group.name, train)
                decay = train.weight_decay if decayed else 0.0
                param_groups.append({"params": chosen, "name": group.name, "peak": rate, "lr": rate, "weight_decay": decay})
    return AdamW(param_groups, betas=(train.beta1, train.beta2), fused=True)


def schedule_factor(step: int, train: TrainConfig) -> float:
    """The share of the peak rate at optimizer step `step`: linear warm-up, then the schedule."""
    warmup = train.warmup or rounded_up_share(train.steps, 0.05, most=2500)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    if train.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if train.schedule == "linear":
        return 1 - min(1.0, progress)
    return 1.0


def set_learning_rates(optimizer: AdamW, factor: float) -> dict[str, float]:
    """Scale every group by the same factor; returns the rates for the log."""
    rates = {}
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
        rates[f"lr_{group['name']}"] = group["lr"]
    return rates


class WeightEma:
    """A moving average of trainable weights, without warm-up; what is sampled from and exported (paper)."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay, self.parameters = decay, parameters
        self.shadow = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.shadow.values()), list(self.parameters.values()), 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the live weights and the average; calling it twice restores both."""
        for name, p in self.parameters.items():
            kept = p.detach().clone()
            p.copy_(self.shadow[name])
            self.shadow[name].copy_(kept)
