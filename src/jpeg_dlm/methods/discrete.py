"""Shared parts of the systems on the transformer of `nn.ddit`: options, presets, noise schedule, times, and drawing tokens.

Sources are (MDLM), (SEDD) and (Duo) for the three public code bases, and (paper) for the settings of the comparison.
Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from jpeg_dlm.config import Checks, Config, StepSampler, TrainConfig, opt
from jpeg_dlm.methods.base import FILL, Batch, Method
from jpeg_dlm.methods.layout import repeated, shapes_of
from jpeg_dlm.nn.ddit import DditConfig
from jpeg_dlm.util.rng import RowNoise

T_MIN_SAMPLING = 1e-5  # last time of samplers (MDLM, SEDD, Duo)

POSITIONS_AT_ONCE = 1024  # assumed: positions whose logits exist at once while sampling (GPT-2's ids: 0.2 GB)

PAPER_TOKENIZERS = {"lm1b": "bert-base-uncased", "owt1024": "gpt2"}  # of the comparison (paper)
VOCABULARIES = {"bert-base-uncased": (30_522, 103), "gpt2": (50_257, -1)}  # number of ids, mask; GPT-2 gets an id for it

Reduction = Literal["token_mean", "sequence_sum"]

CE_CHUNK = "token positions whose logits exist at once, recomputed in backward; 0 keeps all"

# Tensors by which a checkpoint of the shared transformer with a noise level is known.
DIFFUSION_TENSORS = ("backbone.vocab_embed.embedding", "backbone.sigma_map.mlp.0.weight")


@dataclass(frozen=True)
class ExtendedDdit(DditConfig):
    """Sizes of the shared transformer, whose ids may exceed the tokenizer's."""

    extra_ids: int = opt(0, "ids after the tokenizer's, never written (Duo, FLM: 1 for GPT-2, a pad)", ge=0, le=1 << 20)


@dataclass(frozen=True)
class MaskedDdit(DditConfig):
    """Sizes of the shared transformer with a mask token."""

    mask_id: int = opt(-1, "mask token; -1 adds an id after the tokenizer's (MDLM: GPT-2 -1, BERT 103)", ge=-1, le=1 << 20)

    def checks(self, config: Config) -> Checks:
        return [*super().checks(config), (self.mask_id < config.data.vocab_size, "model.mask_id must be -1 or an id")]


def with_mask(mask_id: int, vocab_size: int) -> tuple[int, int]:
    """Return (number of ids of the network, id of the mask) for a tokenizer with `vocab_size` ids."""
    return (vocab_size + 1, vocab_size) if mask_id == -1 else (vocab_size, mask_id)


@dataclass(frozen=True)
class DiscreteObjective:
    """Times and reduction of the loss."""

    t_min: float = opt(1e-3, "smallest time in training (MDLM, SEDD, Duo)", gt=0, lt=1)
    stratified: bool = opt(True, "one time in each of as many intervals as the global batch has rows (Duo); else independent")
    reduction: Reduction = opt("token_mean", "mean over tokens (MDLM, Duo), or over rows of the sum of a row's tokens (SEDD)")
    ce_chunk: int = opt(0, CE_CHUNK, ge=0, le=1 << 30)


@dataclass(frozen=True, kw_only=True)
class TokenSampler:
    """How a network's distributions over tokens are sharpened: for less diverse, more fluent text."""

    temperature: float = opt(1.0, "divides the logits; 0 leaves the most probable token alone", ge=0, le=1e6)
    top_p: float = opt(
        1.0, "keep the fewest tokens with at least this probability; 1 is off (paper, AR: nucleus, p not stated)", gt=0, le=1
    )

    frontier: ClassVar[Mapping[str, Sequence[float]]] = {"temperature": (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)}  # assumed

    def sharpening(self) -> str:
        """Return the end of a label: what differs from the network's own distributions."""
        if self.temperature == 0:
            return ", greedy"
        temperature = f", temperature {self.temperature:g}" if self.temperature != 1 else ""
        return temperature + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")

    def sharpened(self, logits: Tensor) -> Tensor:
        """Return the logits (..., V) of sharper distributions: temperature, then top-p of what that gives."""
        return nucleus(cooled(logits, self.temperature), self.top_p)


@dataclass(frozen=True)
class DditSampler(TokenSampler, StepSampler):
    """Steps of a sampler on the shared transformer."""

    steps: int = opt(128, "steps from noise to text (paper: 128 on LM1B, 1024 on OWT)", ge=1, le=100_000)

    def label(self) -> str:
        return super().label() + self.sharpening()


@dataclass(frozen=True)
class AncestralSampler(DditSampler):
    """Random steps on evenly spaced times, and a last evaluation that leaves no noise."""

    def evaluations(self, token_len: int) -> int:
        """Add the last evaluation."""
        return self.steps + 1


# ---------------------------------------------------------------- presets and published checkpoints


class DditMethod(Method):
    """A system on the shared transformer."""

    supports = FILL
    sources = "before"
    tokenizer: ClassVar[str] = ""  # at the paper's sizes, if it is not that of the comparison

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Take the data and recipe of the comparison, or of a small preset, and its DiT's width, depth and heads.

        Documents are joined, cut anywhere, and rows are framed (MDLM, Duo); what is left of a document begins the next row.
        """
        m, paper = base.model, base.preset in PAPER_TOKENIZERS
        data, mask_id = base.data, -1
        if paper:
            tokenizer = cls.tokenizer or PAPER_TOKENIZERS[base.preset]
            vocab_size, mask_id = VOCABULARIES[tokenizer]
            data = replace(data, tokenizer=tokenizer, vocab_size=vocab_size, packing="continuous", frame=True)
        options = {
            "hidden": m.hidden,
            "depth": m.depth,
            "heads": m.heads,
            "freq_dim": m.freq_dim,
            "cond_dim": min(128, m.hidden),
            "dropout": 0.1 if paper else 0.0,  # short runs repeat little of their data
            "mask_id": mask_id,
            "extra_ids": int(base.preset == "owt1024"),  # (Duo, FLM)
            "ce_chunk": base.objective.ce_chunk,
            # The paper's steps, or two per token for short rows, where more change little.
            "steps": data.token_len if paper else min(128, 2 * data.token_len),
        }
        groups = {group: kind(**own_options(kind, options)) for group, kind in cls.groups.items()}
        return replace(base, method=name, data=data, train=ddit_training(base), **groups)

    @classmethod
    def config_of(cls, tensors: Mapping[str, Tensor], base: Config) -> Config:
        """Return `base` with the sizes of a published checkpoint, whose number of ids names its tokenizer.

        One id may be no token's: a mask or padding. The weights do not determine the number of heads: published models have
        heads of 64 channels, so this is assumed.
        """
        shape = shapes_of(tensors, "the layout of the shared transformer")
        ids, hidden = shape("backbone.vocab_embed.embedding")
        options = {"hidden": hidden, "depth": repeated(tensors, "backbone.blocks"), "heads": max(1, hidden // 64)}
        if "backbone.sigma_map.mlp.0.weight" in tensors:
            options["cond_dim"], options["freq_dim"] = shape("backbone.sigma_map.mlp.0.weight")
        masked, extended = hasattr(base.model, "mask_id"), hasattr(base.model, "extra_ids")
        data, mask_id = replace(base.data, vocab_size=min(ids, base.data.vocab_size) if extended else ids - masked), -1
        for tokenizer, (vocab_size, own_mask) in VOCABULARIES.items():
            spare = [own_mask == -1] if masked else [0, 1] if extended else [0]
            if ids - vocab_size in spare:
                data, mask_id = replace(data, tokenizer=tokenizer, vocab_size=vocab_size), own_mask
        options |= {"mask_id": mask_id, "extra_ids": ids - data.vocab_size}
        return replace(base, data=data, model=replace(base.model, **own_options(base.model, options)))


def own_options(group: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that a group, or its class, has."""
    return {f.name: options[f.name] for f in fields(group) if f.name in options}


def ddit_training(base: Config) -> TrainConfig:
    """Return the recipe of MDLM and Duo at the paper's sizes; a small preset keeps its own budget and learning rate."""
    if base.preset not in PAPER_TOKENIZERS:
        return replace(base.train, weight_decay=0.0, ema_warmup=True)
    batch, accumulation = (64, 1) if base.preset == "lm1b" else (16, 4)  # 512 rows per step on 8 devices
    fixed = {"lr": 3e-4, "weight_decay": 0.0, "warmup": 2500, "schedule": "constant", "ema": 0.9999, "ema_warmup": True}
    return replace(base.train, steps=1_000_000, batch=batch, accumulation=accumulation, seed=1, **fixed)


# ---------------------------------------------------------------- the log-linear schedule


class LogLinear:
    """The schedule alpha_t = 1 - (1 - eps) t, the share of tokens without noise (MDLM, SEDD, Duo)."""

    eps = 1e-3

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - (1 - self.eps) * t

    def dalpha(self, t: Tensor) -> Tensor:
        """Return d alpha / dt, a constant."""
        return torch.full_like(t, self.eps - 1)

    def sigma(self, t: Tensor) -> Tensor:
        """Return the total noise -log alpha, which conditions the networks."""
        return -torch.log1p(-(1 - self.eps) * t)

    def dsigma(self, t: Tensor) -> Tensor:
        return (1 - self.eps) / self.alpha(t)

    def time(self, alpha: Tensor) -> Tensor:
        """Return the inverse of `alpha`, which is above 1 for shares that the schedule never reaches."""
        return (1 - alpha) / (1 - self.eps)


def training_times(noise: RowNoise, objective: DiscreteObjective) -> Tensor:
    """Draw t (B) in [t_min, 1], stratified over the global batch or independent."""
    u = noise.stratified("time") if objective.stratified else noise.uniform("time")
    return (1 - objective.t_min) * u + objective.t_min


def sampling_times(steps: int) -> Tensor:
    """Return evenly spaced times from 1 down to the last time (MDLM, SEDD, Duo), in float64."""
    return torch.linspace(1, T_MIN_SAMPLING, steps + 1, dtype=torch.float64)


def with_source(noisy: Tensor, clean: Tensor) -> Tensor:
    """Return noisy rows (B, L, ...) whose first positions are those of a clean source (B, S, ...)."""
    return torch.cat([clean, noisy[:, clean.shape[1] :]], 1) if clean.shape[1] else noisy


def reduce_loss(nll_BL: Tensor, batch: Batch, reduction: str, first: int = 0) -> Tensor:
    """Reduce the losses of the tokens from position `first` to one number per batch, without padding."""
    if reduction == "token_mean":
        return batch.token_mean(nll_BL, first)
    return (nll_BL if batch.mask_BL is None else nll_BL * batch.mask_BL[:, first:]).sum(1).mean()


def draw_tokens(p: Tensor, u: Tensor) -> Tensor:
    """Draw a token from each distribution p (..., V), normalized or not, by inverting its CDF at u (...) in [0, 1)."""
    total = p.double().cumsum(-1)
    end = total[..., -1:]
    # Rounding may turn u * sum into the sum itself, which would select a token of probability 0.
    place = (u.double()[..., None] * end).minimum(end.nextafter(torch.zeros_like(end)))
    return torch.searchsorted(total, place, right=True).squeeze(-1).clamp_max(p.shape[-1] - 1)


def cooled(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits (..., V) by a temperature; 0, the limit, leaves only the first of the largest."""
    if temperature == 1:
        return logits
    if temperature == 0:
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(-1, logits.argmax(-1, keepdim=True), False)
        return logits.masked_fill(others, -torch.inf)
    return (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, so that exponentials stay finite


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Set logits outside the nucleus of mass top_p to -inf; the token that crosses top_p stays (Holtzman et al.)."""
    if top_p >= 1:
        return logits
    p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    struck = p.cumsum(-1) - p >= top_p
    return logits.masked_fill(torch.zeros_like(struck).scatter_(-1, order, struck), -torch.inf)
