"""The contract every system fulfills; trainer, sampler, evaluation and export know nothing else of a method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config, SamplerConfig
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.rng import RowNoise


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, which of them are real (None: all), and the encoder's features where they were cached."""

    tokens_BL: Tensor
    mask_BL: Tensor | None = None
    features_BLF: Tensor | None = None


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate; `name` is the key the config gives a rate to."""

    name: str
    parameters: dict[str, nn.Parameter]


FROZEN = "encoder."  # the frozen encoder is stored once beside a model, never among its tensors

# What a sampler tells while it works: step, number of steps, time, and a function that decodes the current prediction.
Watch = Callable[[int, int, float, Callable[[], Tensor]], None]


class Method(nn.Module, ABC):
    """A generative model of token rows."""

    loss_weights: dict[str, float]  # the trainer minimizes the weighted sum; other terms are only reported

    @classmethod
    @abstractmethod
    def from_config(cls, config: Config, encoder: nn.Module | None = None) -> Self:
        """The method with fresh weights; `encoder` is the frozen text encoder, for methods that use one."""

    @abstractmethod
    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Named loss terms of one batch."""

    @abstractmethod
    def sample(self, n: int, sampler: SamplerConfig, noise: RowNoise, watch: Watch | None = None) -> Tensor:
        """Token ids (n, L)."""

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """All trainable parameters, by group."""

    def reconstruction(self, batch: Batch) -> Tensor | None:
        """Share of tokens that survive the method's own encoding and decoding; None if it has none."""
        return None

    def after_step(self, step: int, total: int) -> None:
        """What follows an optimizer step, such as a target network's moving average."""

    def export_state(self) -> dict[str, Tensor]:
        """The tensors that sampling needs, under the names of published checkpoints where there are any."""
        return {name: t for name, t in self.state_dict().items() if not name.startswith(FROZEN)}

    def import_state(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """The inverse of `export_state`."""
        copy_tensors({name: t for name, t in self.state_dict().items() if not name.startswith(FROZEN)}, tensors, origin)

    def forward(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """`losses`, under the name that DistributedDataParallel calls; terms without a weight are cut from the graph.

        It waits for the gradient of every parameter that it finds behind an output.
        """
        return {name: x if self.loss_weights.get(name) else x.detach() for name, x in self.losses(batch, noise).items()}

    def total_loss(self, losses: dict[str, Tensor]) -> Tensor:
        """The weighted sum of the terms that have a weight."""
        terms = [weight * losses[name] for name, weight in self.loss_weights.items() if weight and name in losses]
        if not terms:
            raise ValueError("no loss term has a weight")
        return sum(terms[1:], start=terms[0])


@torch.no_grad()
def copy_tensors(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], origin: str) -> None:
    """Fill `own` in place; missing, extra and misshapen tensors are refused before anything changes."""
    for problem, names in (("lacks", own.keys() - tensors.keys()), ("has the unknown", tensors.keys() - own.keys())):
        if names:
            raise CheckpointError(
                f"'{origin}' {problem} tensor '{min(names)}' (one of {len(names)}): it is of another model or method."
            )
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise CheckpointError(
                f"'{origin}' has {tuple(tensor.shape)} for '{name}' where the config needs {tuple(own[name].shape)}: "
                "use the config it was trained with."
            )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def linear_ramp(start: float, end: float, step: int, total: int) -> float:
    """From start at step 0 to end at the last step."""
    if total <= 1:
        return end
    return start + (end - start) * min(step, total - 1) / (total - 1)


def rounded_up_share(total: int, share: float, most: int) -> int:
    """`share` of `total`, at least 1 and at most `most`: how defaults given as a percentage become steps."""
    return max(1, min(most, math.ceil(total * share)))
