"""The contract every system fulfills; trainer, sampler, evaluation and export know nothing else of a method."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from jpeg_dlm.collectives import all_mean
from jpeg_dlm.config import Config, ModelConfig, ObjectiveConfig, SamplerConfig
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.flow.latent_sampler import LatentSampler, Watch
from jpeg_dlm.flow.latent_sampler import refuse_given as refuse_given  # part of the contract too
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

FREE = -1  # in `given`: a position the sampler fills


@dataclass(frozen=True)
class Likelihood:
    """An upper bound of each row's negative log-likelihood in nats, or an estimate of it, and how many tokens it is for."""

    nats_B: Tensor
    tokens_B: Tensor


@dataclass(frozen=True)
class Latents:
    """Clean latents on the scale on which noise is N(0, I), and what decodes latents of that scale to token ids.

    `predict(z_t, t)` estimates the clean latents behind z_t = t z + (1 - t) eps in one evaluation of the method's network,
    with no earlier estimate to go by; None for a method without such a network.
    """

    z_BND: Tensor
    decode: Callable[[Tensor], Tensor]
    predict: Callable[[Tensor, float], Tensor] | None = None


class Method(nn.Module, ABC):
    """A generative model of token rows."""

    title: str  # as the paper's tables name it
    groups: ClassVar[dict[str, type]] = {"model": ModelConfig, "objective": ObjectiveConfig, "sampler": SamplerConfig}
    uses_encoder: ClassVar[bool] = False
    exact_likelihood: ClassVar[bool] = False  # whether `likelihood` is the model's own, not a bound with random times
    loss_weights: dict[str, float]  # the trainer minimizes the weighted sum; other terms are only reported

    @classmethod
    @abstractmethod
    def from_config(cls, config: Config, encoder: nn.Module | None = None) -> Self:
        """The method with fresh weights; `encoder` is the frozen text encoder, for methods that use one."""

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """This system under the conditions of a preset of JPEG-DLM: same data and budget, sizes that compare."""
        return dataclasses.replace(base, method=name)

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        """`base` with the sizes of a published checkpoint, read from its tensors."""
        raise UsageError(f"There is no published layout of {cls.title} to import.")

    @classmethod
    def first_stage(cls, config: Config) -> Config | None:
        """What must be trained before this method, as a config of its own; None: nothing."""
        return None

    @classmethod
    def student_config(cls, teacher: Config, path: Path, tokenizer: Path | None, encoder: Path | None) -> Config:
        """The config of this method as one that goes on from a trained model in `path`."""
        raise UsageError(f"{cls.title} does not go on from a trained model: leave out --teacher.")

    @classmethod
    def trained_stage(cls, config: Config) -> Path | None:
        """Where the model lies that this method begins with, if it is one that was trained already; None: there is none."""
        return None

    def start_from(self, stage: Method, batches: Iterable[Batch]) -> None:
        """Take over what the trained first stage learned, before the first step; `batches` are rows to measure it on."""
        raise UsageError(f"{self.title} has no first stage.")

    @abstractmethod
    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Named loss terms of one batch."""

    @abstractmethod
    def sample(self, sampler: Any, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None) -> Tensor:
        """Token ids (B, L), a row for each of the noise; `given_BL` holds ids to keep and FREE elsewhere."""

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """All trainable parameters, by group."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def latent_sampler(self) -> LatentSampler | None:
        """Algorithm 2 of JPEG-DLM on this method's networks; None for a method that samples in another way."""
        return None

    def features(self, batch: Batch) -> Tensor:
        """h = E(x) from the cache or the frozen encoder, for methods that use one."""
        if batch.features_BLF is not None:
            return batch.features_BLF
        encoder = getattr(self, "encoder", None)
        if encoder is None:
            raise ValueError("this model was loaded without its text encoder")
        with torch.no_grad():
            return encoder(batch.tokens_BL, batch.mask_BL)

    def reconstruction(self, batch: Batch) -> Tensor | None:
        """Share of tokens that survive the method's own encoding and decoding; None if it has none."""
        return None

    def latent_space(self, batch: Batch) -> Latents | None:
        """The latents of a batch of text; None for a method that learns no latent space."""
        return None

    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood | None:
        """How probable the model finds rows; None if it cannot say."""
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
        if own[name].is_floating_point() != tensor.is_floating_point():
            raise CheckpointError(f"'{origin}' has {tensor.dtype} for '{name}' where {own[name].dtype} is needed: restore it.")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def masked_mean(x_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Mean over real tokens of the global batch; padding does not count."""
    if mask_BL is None:
        return x_BL.mean()
    return (x_BL * mask_BL).sum() / all_mean(mask_BL.float().sum()).clamp_min(1)


def linear_ramp(start: float, end: float, step: int, total: int) -> float:
    """From start at step 0 to end at the last step."""
    if total <= 1:
        return end
    return start + (end - start) * min(step, total - 1) / (total - 1)


def rounded_up_share(total: int, share: float, most: int) -> int:
    """`share` of `total`, at least 1 and at most `most`: how defaults given as a percentage become steps."""
    return max(1, min(most, math.ceil(total * share)))
