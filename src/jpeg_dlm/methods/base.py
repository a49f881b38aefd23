"""The contract of methods: `Trainable` is all that the trainer knows of one, `Method` what sampling and evaluation know too."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.errors import CheckpointError, UsageError
from jpeg_dlm.flow.control import Control
from jpeg_dlm.flow.latent_sampler import Ability, LatentSampler, Watch, Writer
from jpeg_dlm.flow.path import interpolate, per_sample
from jpeg_dlm.machine.collectives import all_mean
from jpeg_dlm.methods.jpeg_dlm_config import GROUPS
from jpeg_dlm.methods.registry import systems_that
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.wording import either


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, which of them are real (None: all), and the encoder's features where they were cached.

    For models with a context, `before` holds the K rows before each one in its document, oldest first, row after row, and
    `present_BK` which of them exist.
    """

    tokens_BL: Tensor
    mask_BL: Tensor | None = None
    features_BLF: Tensor | None = None
    before: Batch | None = None
    present_BK: Tensor | None = None

    @property
    def real_BL(self) -> Tensor:
        """The mask of real tokens."""
        return torch.ones_like(self.tokens_BL, dtype=torch.bool) if self.mask_BL is None else self.mask_BL

    @property
    def token_shares(self) -> Tensor:
        """The weight of each position in `masked_mean`."""
        if self.mask_BL is None:
            return torch.full(self.tokens_BL.shape, 1 / self.tokens_BL.numel(), device=self.tokens_BL.device)
        return self.mask_BL / all_mean(self.mask_BL.float().sum()).clamp_min(1)

    def first(self, rows: int) -> Batch:
        """Return the first rows."""
        return Batch(self.tokens_BL[:rows], None if self.mask_BL is None else self.mask_BL[:rows])

    def accuracy(self, tokens_BL: Tensor) -> Tensor:
        """Return the share of real tokens that equal these."""
        return masked_mean((tokens_BL == self.tokens_BL).float(), self.mask_BL)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate; `name` is the key the config gives a rate to, which `factor` multiplies."""

    name: str
    parameters: dict[str, nn.Parameter]
    factor: float = 1.0


FROZEN = "encoder."  # the frozen encoder is stored once beside a model, never among its tensors

FREE = -1  # in `given`: a position the sampler fills

FILLS_IN: frozenset[Ability] = frozenset({"prompts", "templates"})  # `sample` keeps given tokens
GUIDED: frozenset[Ability] = frozenset({"prompts", "templates", "guides", "edits"})  # `sample` also takes a `Control`
GUIDED_LONG: frozenset[Ability] = frozenset({*GUIDED, "long text"})  # and blocks may have a context


@dataclass(frozen=True)
class Likelihood:
    """An upper bound of each row's negative log-likelihood in nats, or an estimate of it, and how many tokens it is for."""

    nats_B: Tensor
    tokens_B: Tensor

    @classmethod
    def over(cls, nats_BL: Tensor, real_BL: Tensor) -> Likelihood:
        """Return the sums over the real tokens of each row."""
        return cls((nats_BL * real_BL).sum(1), real_BL.sum(1))


@dataclass(frozen=True)
class Latents:
    """Clean latents on the scale on which noise is N(0, I), and the functions that use latents of that scale."""

    z_BND: Tensor
    decode: Callable[[Tensor], Tensor]  # latents to token ids
    predict: Callable[[Tensor, float], Tensor] | None = None  # one estimate of z from z_t = t z + (1 - t) eps, if there is any
    logits: Callable[[Tensor, Tensor], Tensor] | None = None  # of a decoder that reads tokens too, if it does


def linear_time(ratio: float) -> float:
    """Return the time of the linear path at which noise and signal have the ratio sigma / alpha."""
    return 1 / (1 + ratio)


def linear_state(z_BND: Tensor, eps_BND: Tensor, ratio: float) -> Tensor:
    """Return t z + (1 - t) eps at that time."""
    return interpolate(z_BND, eps_BND, per_sample(linear_time(ratio), z_BND))


@dataclass(frozen=True)
class LatentView:
    """Functions that studies of the latent space use, in the standardized coordinates in which a model generates.

    Noise is given as sigma / alpha = SNR**-0.5, the same number on every path. The self-conditioning scale is 1 (paper).
    """

    encode: Callable[[Batch], Tensor]  # clean latents (B, N, D)
    predict: Callable[[Tensor, float], Tensor]  # one prediction of the clean latents behind a state, with no earlier one
    decode: Callable[[Tensor], Tensor]  # the decoding module alone: the most probable token at every position
    noisy: Callable[[Tensor, Tensor, float], Tensor] = linear_state  # the state of the model's own path with this noise
    branch: Callable[[Tensor], Tensor] | None = None  # what sampling does to its last state before decoding


@dataclass(frozen=True)
class Publication:
    """Facts about the authors' own checkpoints of a system: how to recognize and read them."""

    algo: tuple[str, ...] = ()  # patterns of its names in config.algo.name of Lightning's hyperparameters (Duo, FLM)
    parameterization: str = ""  # its name in config.parameterization there (MDLM)
    hub: str = ""  # its name in model_type, architectures or auto_map of a config on the Hugging Face hub
    keys: frozenset[str] = frozenset()  # keys that its config alone has
    tensors: tuple[str, ...] = ()  # names, or their ends, of tensors that it has
    fixed: Mapping[tuple[str, ...], str | bool] = field(default_factory=dict)  # must hold where it is said: no variant of it
    untold: tuple[str, ...] = ("data.token_len", "model.heads")  # options that leave no trace in the tensors
    preset: str = "owt1024"  # where options start from, unless the vocabulary is BERT's


class Trainable(nn.Module, ABC):
    """Interface of everything that the trainer trains: a system, a student of one, or a stage before it."""

    title: str  # as the paper's tables name it
    groups: ClassVar[dict[str, type]] = GROUPS
    rate_group: ClassVar[str] = "flow"  # key of the learning rate in the config, unless `parameter_groups` says otherwise
    uses_encoder: ClassVar[bool] = False
    uses_context: ClassVar[bool] = False  # whether `model.context_blocks` rows before each row are given in a batch
    has_phases: ClassVar[bool] = False  # whether training ends in another way than it begins, after a share of its steps
    loss_weights: dict[str, float]  # the trainer minimizes the weighted sum; other terms are only reported

    # ------------------------------------------------------------ from options to a first step

    @classmethod
    def from_config(cls, config: Config, encoder: nn.Module | None = None) -> Self:
        """Build the method with fresh weights; `encoder` is the frozen text encoder, for methods that use one."""
        return cls(config, encoder) if cls.uses_encoder else cls(config)

    @classmethod
    def needs_encoder(cls, config: Config) -> bool:
        """Return True if a model of this config takes features of a frozen encoder."""
        return cls.uses_encoder

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Return this method's config under the conditions of a preset of JPEG-DLM: same data and budget, similar sizes."""
        return dataclasses.replace(base, method=name)

    @classmethod
    def first_stage(cls, config: Config) -> Config | None:
        """Return the config of what must be trained before this method; None: nothing."""
        return None

    @classmethod
    def with_stage_steps(cls, config: Config, steps: int) -> Config:
        """Return `config` with so many optimizer steps for its first stage."""
        raise UsageError(f"{cls.title} has no first stage.")

    @classmethod
    def student_config(cls, teacher: Config, path: Path, tokenizer: Path | None, encoder: Path | None) -> Config:
        """Return the config of this method as one that goes on from a trained model in `path`."""
        raise UsageError(f"{cls.title} does not go on from a trained model: leave out --teacher.")

    @classmethod
    def trained_stage(cls, config: Config) -> Path | None:
        """Return the path of a model that was trained already and that this method begins with; None: there is none."""
        return None

    def start_from(self, stage: Trainable, batches: Iterable[Batch]) -> None:
        """Take over what the trained first stage learned, before the first step; `batches` are rows to measure it on."""
        raise UsageError(f"{self.title} has no first stage.")

    # ------------------------------------------------------------ steps

    @abstractmethod
    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Compute the named loss terms of one batch."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return all trainable parameters, by group."""
        trained = {n: p for n, p in self.named_parameters() if p.requires_grad and not n.startswith(FROZEN)}
        return [ParameterGroup(self.rate_group, trained)]

    def after_step(self, step: int, total: int) -> None:
        """Do what follows an optimizer step, such as a target network's moving average."""

    def forward(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Compute `losses` for DistributedDataParallel; terms without a weight leave the graph, or it would wait for them."""
        return {name: x if self.loss_weights.get(name) else x.detach() for name, x in self.losses(batch, noise).items()}

    def total_loss(self, losses: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum of the terms that have a weight."""
        terms = [weight * losses[name] for name, weight in self.loss_weights.items() if weight and name in losses]
        if not terms:
            raise ValueError("no loss term has a weight")
        return sum(terms[1:], start=terms[0])

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    # ------------------------------------------------------------ what held-out text tells

    def features(self, batch: Batch) -> Tensor:
        """Return h = E(x) from the cache or the frozen encoder, for methods that use one."""
        if batch.features_BLF is not None:
            return batch.features_BLF
        encoder = getattr(self, "encoder", None)
        if encoder is None:
            raise ValueError("this model was loaded without its text encoder")
        with torch.no_grad():
            return encoder(batch.tokens_BL, batch.mask_BL)

    def reconstruction(self, batch: Batch, sampler: Any = None) -> Tensor | None:
        """Return the share of tokens that survive encoding and decoding with these options; None if the method has neither."""
        return None

    def latent_space(self, batch: Batch) -> Latents | None:
        """Return the latents of a batch of text; None for a method that learns no latent space."""
        return None

    # ------------------------------------------------------------ files

    def export_state(self) -> dict[str, Tensor]:
        """Return the tensors that sampling needs, under the names of published checkpoints where there are any."""
        return {name: t for name, t in self.state_dict().items() if not name.startswith(FROZEN)}

    def import_state(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Load what `export_state` returned."""
        copy_tensors({name: t for name, t in self.state_dict().items() if not name.startswith(FROZEN)}, tensors, origin)


class Method(Trainable):
    """A generative model of token rows: it also writes."""

    supports: frozenset[Ability] = frozenset()  # requests that `sample` fulfils
    exact_likelihood: ClassVar[bool] = False  # whether `likelihood` is the model's own, not a bound with random times
    publication: ClassVar[Publication | None] = None  # of the authors' checkpoints that `config_of` reads

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        """Return `base` with the sizes of a published checkpoint, read from its tensors."""
        raise UsageError(f"There is no published layout of {cls.title} to import.")

    @abstractmethod
    def sample(
        self, sampler: Any, noise: RowNoise, watch: Watch | None = None, given_BL: Tensor | None = None,
        control: Control | None = None,
    ) -> Tensor:  # fmt: skip
        """Write token ids (B, L), a row for each of the noise; `given_BL` holds ids to keep and FREE elsewhere.

        `control` is passed only to methods that support guides or edits; the others may leave it out of their signature.
        """

    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood | None:
        """Compute how probable the model finds rows; None if it cannot say."""
        return None

    @property
    def latent_sampler(self) -> LatentSampler | None:
        """Algorithm 2 of JPEG-DLM on this method's networks; None for a method that samples in another way."""
        return None

    def latent_view(self) -> LatentView | None:
        """Return what studies of the latent space use; None for a method that does not denoise latents."""
        return None


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


def require(ability: Ability, writer: Writer, condition: str = "") -> None:
    """Refuse a request that a writer does not take, and name the methods that do, and on which condition."""
    if ability in writer.supports:
        return
    if writer.latent_sampler is not None and writer.latent_sampler.logits is None:
        raise UsageError(f"{writer.title} has no gradient and takes no {ability}: use the model that it was exported from.")
    able = systems_that(lambda system: ability in system.supports)
    instead = " ".join(["use", either(able), *filter(None, [condition])]) if able else "no method does"
    who = f"This model of {writer.title}" if condition else writer.title
    raise UsageError(f"{who} does not take {ability}: {instead}.")


def masked_mean(x_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return the mean over real tokens of the global batch."""
    if mask_BL is None:
        return x_BL.mean()
    return (x_BL * mask_BL).sum() / all_mean(mask_BL.float().sum()).clamp_min(1)


def linear_ramp(start: float, end: float, step: int, total: int) -> float:
    """Return the value at a step of a line from `start` at step 0 to `end` at the last step."""
    if total <= 1:
        return end
    return start + (end - start) * min(step, total - 1) / (total - 1)


def rounded_up_share(total: int, share: float, most: int) -> int:
    """Return a share of `total` steps, rounded up, at least 1 and at most `most`."""
    return max(1, min(most, math.ceil(total * share)))
