"""The contract of methods: `Trainable` is all that the trainer knows of one, `Method` what sampling and evaluation know too."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config, TrainConfig
from jpeg_dlm.flow.guidance import Guidance
from jpeg_dlm.flow.path import interpolate, per_sample
from jpeg_dlm.flow.sampler import Capability, TextSampler, Watch
from jpeg_dlm.methods.layout import CheckpointSignature, copy_tensors
from jpeg_dlm.methods.registry import method_class, names
from jpeg_dlm.util.distributed import all_mean
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise


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
    source: Batch | None = None  # of pairs, for methods that read it beside the row
    source_len: int = 0  # of pairs, for the others: tokens at the beginning of rows that are not noised and have no loss
    # Real tokens at each position of an average micro-batch of the optimizer step; None: of this batch.
    step_counts_L: Tensor | None = None

    @property
    def real_BL(self) -> Tensor:
        """The mask of real tokens."""
        return torch.ones_like(self.tokens_BL, dtype=torch.bool) if self.mask_BL is None else self.mask_BL

    @property
    def token_shares(self) -> Tensor:
        """The weight of each position in `token_mean`."""
        if self.mask_BL is None:
            return torch.full(self.tokens_BL.shape, 1 / self.tokens_BL.numel(), device=self.tokens_BL.device)
        return self.mask_BL / self._mean_count(self.mask_BL)

    def token_mean(self, x_BL: Tensor, first: int = 0) -> Tensor:
        """Return the mean over the real tokens from position `first`, where x_BL begins, of the whole optimizer step.

        Micro-batches and processes with more real tokens weigh more, so the mean does not depend on how a step is split.
        """
        if self.mask_BL is None:
            return x_BL.mean()
        mask_BL = self.mask_BL[:, first:]
        return (x_BL * mask_BL).sum() / self._mean_count(mask_BL, first)

    def token_weight(self) -> Tensor | float:
        """Return the number of real tokens of this micro-batch relative to the mean of the optimizer step."""
        if self.mask_BL is None or self.step_counts_L is None:
            return 1.0
        return all_mean(self.mask_BL.float().sum()) / self._mean_count(self.mask_BL)

    def _mean_count(self, mask_BL: Tensor, first: int = 0) -> Tensor:
        counts = all_mean(mask_BL.float().sum()) if self.step_counts_L is None else self.step_counts_L[first:].sum()
        return counts.clamp_min(1)

    def joined(self) -> Batch:
        """Return rows with their sources before them, of which only the targets are real tokens."""
        if self.source is None:
            return self
        tokens_BL = torch.cat([self.source.tokens_BL, self.tokens_BL], 1)
        mask_BL = torch.cat([torch.zeros_like(self.source.real_BL), self.real_BL], 1)
        return Batch(tokens_BL, mask_BL, source_len=self.source.tokens_BL.shape[1])

    def accuracy(self, tokens_BL: Tensor) -> Tensor:
        """Return the share of real tokens that equal these, which may be of the first rows only."""
        rows = slice(len(tokens_BL))
        same_BL = (tokens_BL == self.tokens_BL[rows]).float()
        return masked_mean(same_BL, None if self.mask_BL is None else self.mask_BL[rows])


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate; `name` is the key the config gives a rate to, which `factor` multiplies."""

    name: str
    parameters: dict[str, nn.Parameter]
    factor: float = 1.0


ENCODER_LR = 3e-3  # of the small encoder's pretraining (measured)

FROZEN = "encoder."  # the frozen encoder is stored once beside a model, never among its tensors

FREE = -1  # in `given`: a position the sampler fills

FILL: frozenset[Capability] = frozenset({"prompts", "templates"})  # `sample` keeps given tokens
GUIDE: frozenset[Capability] = frozenset({"prompts", "templates", "guides", "edits"})  # `sample` also takes `Guidance`
GUIDE_LONG: frozenset[Capability] = frozenset({*GUIDE, "long text"})  # and blocks may have a context


@dataclass(frozen=True)
class Likelihood:
    """An upper bound of each row's negative log-likelihood in nats, or an estimate of it, and how many tokens it is for."""

    nats_B: Tensor
    tokens_B: Tensor

    @classmethod
    def over(cls, nats_BL: Tensor, real_BL: Tensor) -> Likelihood:
        """Return the sums over the real tokens of each row."""
        return cls((nats_BL * real_BL).sum(1), real_BL.sum(1))

    def plus(self, nats_B: Tensor) -> Likelihood:
        """Return it with more nats for each row."""
        return Likelihood(self.nats_B + nats_B, self.tokens_B)


def linear_time(ratio: float) -> float:
    """Return the time of the linear path at which noise and signal have the ratio sigma / alpha."""
    return 1 / (1 + ratio)


def linear_state(z_BND: Tensor, eps_BND: Tensor, ratio: float) -> Tensor:
    """Return t z + (1 - t) eps at that time."""
    return interpolate(z_BND, eps_BND, per_sample(linear_time(ratio), z_BND))


@dataclass(frozen=True)
class LatentModel:
    """Functions of the latent space of a method, in the standardized coordinates in which it generates.

    Noise is given as sigma / alpha = SNR**-0.5, the same number on every path. The self-conditioning scale is 1 (paper).
    """

    encode: Callable[[Batch], Tensor]  # clean latents (B, N, D)
    predict: Callable[[Tensor, float], Tensor]  # one prediction of the clean latents behind a state, with no earlier one
    decode: Callable[[Tensor], Tensor]  # the decoding module alone: the most probable token at every position
    logits: Callable[[Tensor], Tensor]  # of clean latents, as sampling decodes them
    noisy: Callable[[Tensor, Tensor, float], Tensor] = linear_state  # the state of the model's own path with this noise
    branch: Callable[[Tensor], Tensor] | None = None  # what sampling does to its last state before decoding

    def tokens(self, z_BND: Tensor) -> Tensor:
        """Decode latents as sampling does."""
        return self.decode(self.branch(z_BND) if self.branch else z_BND)


class Trainable(nn.Module, ABC):
    """Interface of everything that the trainer trains: a system, a student of one, or a stage before it."""

    title: str  # as the paper's tables name it
    groups: ClassVar[dict[str, type]]  # classes of the options `model`, `objective` and `sampler`
    rate_group: ClassVar[str] = "flow"  # key of the learning rate in the config, unless `parameter_groups` says otherwise
    uses_encoder: ClassVar[bool] = False  # whether `__init__` takes a frozen text encoder after the config
    sources: ClassVar[Literal["none", "beside", "before"]] = "none"  # of pairs: `Batch.source`, or tokens before rows
    uses_context: ClassVar[bool] = False  # whether `model.context_blocks` rows before each row are given in a batch
    learns_latents: ClassVar[bool] = False  # whether evaluations measure its latents
    has_phases: ClassVar[bool] = False  # whether training ends in another way than it begins, after a share of its steps
    loss_weights: dict[str, float]  # the trainer minimizes the weighted sum; other terms are only reported
    token_heads: ClassVar[tuple[str, ...]] = ("lm_head", "unembed", "output_layer.linear")  # names, or their ends, of layers

    # ------------------------------------------------------------ from options to a first step

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Return this method's config under the conditions of a preset of JPEG-DLM: same data and budget, similar sizes."""
        return dataclasses.replace(base, method=name)

    @classmethod
    def stages(cls, config: Config) -> list[Config]:
        """Return the configs of what is trained before this method, in order: its encoder, unless a trained one is named."""
        own_encoder = cls.uses_encoder and config.encoder.kind == "small" and not config.encoder.name
        return [encoder_stage(config)] if own_encoder else []

    @classmethod
    def with_stage_steps(cls, config: Config, steps: int) -> Config:
        """Return `config` with so many optimizer steps for the stage before it that is not the encoder."""
        raise UsageError(f"{cls.title} has no stage before it.")

    def start_from(self, stage: Trainable, batches: Iterable[Batch]) -> None:
        """Take over the weights of a trained model, before the first step; `batches` are rows to measure it on."""
        if type(stage) is not type(self):
            raise UsageError(f"{self.title} cannot start from a model of {stage.title}: name one of its own method.")
        self.import_state(stage.export_state(), f"the trained {stage.title}")

    # ------------------------------------------------------------ steps

    @abstractmethod
    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Compute the named loss terms of one batch."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return all trainable parameters, by group."""
        trained = {n: p for n, p in self.named_parameters() if p.requires_grad and not n.startswith(FROZEN)}
        return [ParameterGroup(self.rate_group, trained)]

    def hidden_matrices(self) -> frozenset[str]:
        """Return the names of the parameters that map vectors to vectors: what Muon may orthogonalize.

        Embeddings, position tables, learned tokens, heads over the vocabulary, scalar gates, norms and biases are none.
        """
        linear = {n: m for n, m in self.named_modules() if isinstance(m, nn.Linear) and not n.endswith(self.token_heads)}
        return frozenset(f"{name}.weight" for name, layer in linear.items() if min(layer.weight.shape) > 1)

    def after_step(self, step: int, total: int) -> None:
        """Do what follows an optimizer step, such as a target network's moving average."""

    def forward(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Compute `losses` for DistributedDataParallel; terms without a weight leave the graph, or it would wait for them."""
        return {name: x if self.loss_weights.get(name) else x.detach() for name, x in self.losses(batch, noise).items()}

    def total_loss(self, losses: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum of the terms that have a weight."""
        terms = (weight * losses[name] for name, weight in self.loss_weights.items() if weight and name in losses)
        return sum(terms, start=torch.zeros((), device=self.device))

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

    def latent_model(self) -> LatentModel | None:
        """Return the functions of its latent space; None for a method that denoises no latents."""
        return None

    # ------------------------------------------------------------ files

    def export_state(self) -> dict[str, Tensor]:
        """Return the tensors that sampling needs, under the names of published checkpoints where there are any."""
        return {name: t for name, t in self.state_dict().items() if not name.startswith(FROZEN)}

    def import_state(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Load what `export_state` returned."""
        copy_tensors(self.export_state(), tensors, origin)


def encoder_stage(config: Config) -> Config:
    """Return the config of the encoder's pretraining within a run, the same for every method."""
    t, plain = config.train, TrainConfig()
    fixed = {"schedule": "cosine", "warmup": 0, "lr_floor": 0.0, "compile": False, "optimizer": "adamw", "init": ""}
    fixed |= {"lr": ENCODER_LR, "weight_decay": plain.weight_decay, "adam_eps": plain.adam_eps}
    train = dataclasses.replace(t, steps=t.encoder_steps, **fixed)
    return dataclasses.replace(config, method="encoder", train=train)


class Method(Trainable):
    """A generative model of token rows: it also writes."""

    config: Config
    supports: frozenset[Capability] = frozenset()  # requests that `sample` fulfils
    exact_likelihood: ClassVar[bool] = False  # whether `likelihood` is the model's own, not a bound with random times
    signature: ClassVar[CheckpointSignature | None] = None  # of the authors' checkpoints that `config_of` reads

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        """Return `base` with the sizes of a published checkpoint, read from its tensors."""
        raise UsageError(f"There is no published layout of {cls.title} to import.")

    @abstractmethod
    def sample(
        self,
        sampler: Any,
        noise: RowNoise,
        watch: Watch | None = None,
        fixed_BL: Tensor | None = None,
        guidance: Guidance | None = None,
        source: Batch | None = None,
    ) -> Tensor:
        """Write token ids (B, L), a row for each of the noise; `fixed_BL` holds ids to keep and FREE elsewhere.

        `guidance` is passed only to methods that support guides or edits, and `source` to those that read sources beside rows;
        the others may leave them out of their signature.
        """

    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood | None:
        """Compute how probable the model finds rows; None if it cannot say."""
        return None


def require_capability(capability: Capability, writer: TextSampler, condition: str = "") -> None:
    """Refuse a request that a model does not take; `condition` says which models of its method do."""
    if capability not in writer.supports:
        remedy = condition or "docs/methods.md lists what each system takes"
        raise UsageError(f"This model of {writer.title} does not take {capability}: {remedy}.")


def system_class(name: str) -> type[Method]:
    """Return the class of a method that writes."""
    cls = method_class(name)
    if not issubclass(cls, Method):
        raise UsageError(f"'{name}' writes no text: choose one of {', '.join(names('system'))}.")
    return cls


def masked_mean(x_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return the mean over chosen tokens of this micro-batch on all processes."""
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
