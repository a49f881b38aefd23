"""Shared parts of the systems on the transformer of `nn.ddit`: options, presets, noise schedule, times, and drawing tokens.

Sources are (MDLM), (SEDD) and (Duo) for the three public code bases, and (paper) for the settings of the comparison.
Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from jpeg_dlm.config import Checks, Config, DataConfig, TrainConfig, opt
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.layout import repeated, shapes_of
from jpeg_dlm.nn.ddit import DditConfig
from jpeg_dlm.util.rng import RowNoise

T_MIN_SAMPLING = 1e-5  # last time of samplers (MDLM, SEDD, Duo)

PAPER_STEPS = {"lm1b": 128, "owt1024": 1024}  # sampling steps of all systems on the shared transformer (paper)
POSITIONS_AT_ONCE = 1024  # assumed: positions whose logits exist at once while sampling (GPT-2's ids: 0.2 GB)

# Tokenizer, number of ids and mask id of the paper's checkpoints; GPT-2 has no mask token, so an id is added for it.
PAPER_TOKENIZERS = {"lm1b": ("bert-base-uncased", 30_522, 103), "owt1024": ("gpt2", 50_257, -1)}

CE_CHUNK = "token positions whose logits exist at once, recomputed in backward; 0 keeps all"

# Tensors by which a checkpoint of the shared transformer with a noise level is known.
DIFFUSION_TENSORS = ("backbone.vocab_embed.embedding", "backbone.sigma_map.mlp.0.weight")


@dataclass(frozen=True)
class ExtendedDdit(DditConfig):
    """Sizes of the shared transformer, whose ids may exceed the tokenizer's."""

    extra_ids: int = opt(
        0, "extra ids of the process after the tokenizer's, never written (Duo, FLM: 1 for GPT-2, a pad)", ge=0, le=1 << 20
    )


@dataclass(frozen=True)
class MaskedDdit(DditConfig):
    """Sizes of the shared transformer with a mask token."""

    mask_id: int = opt(
        -1, "id of the mask token; -1 adds an id for it after the tokenizer's (MDLM: GPT-2 -1, BERT 103)", ge=-1, le=1 << 20
    )

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
    reduction: Literal["token_mean", "sequence_sum"] = opt(
        "token_mean", "mean over tokens (MDLM, Duo), or sum over a row's tokens and mean over rows (SEDD)"
    )
    ce_chunk: int = opt(0, CE_CHUNK, ge=0, le=1 << 30)


# ---------------------------------------------------------------- conditions of a preset


def ddit_model(base: Config) -> dict[str, Any]:
    """Return sizes of the shared transformer that match a preset's DiT: same width, depth and heads."""
    m = base.model
    dropout = 0.1 if base.preset in PAPER_TOKENIZERS else 0.0  # short runs repeat little of their data
    sizes = {"hidden": m.hidden, "depth": m.depth, "heads": m.heads, "freq_dim": m.freq_dim}
    return sizes | {"cond_dim": min(128, m.hidden), "dropout": dropout}


def paper_data(base: Config, tokenizer: str | None = None) -> tuple[DataConfig, int]:
    """Return a preset's data with the tokenizer of the paper's comparison (or the named one), and its mask id.

    Documents are joined, cut anywhere, and rows are framed (MDLM, Duo); what is left of a document begins the next row.
    """
    if base.preset not in PAPER_TOKENIZERS:
        return base.data, -1
    rows = {row[0]: row for row in PAPER_TOKENIZERS.values()}
    name, vocab_size, mask_id = rows[tokenizer] if tokenizer else PAPER_TOKENIZERS[base.preset]
    return replace(base.data, tokenizer=name, vocab_size=vocab_size, packing="continuous", frame=True), mask_id


def ddit_training(base: Config, steps: int = 1_000_000) -> TrainConfig:
    """Return the recipe of MDLM and Duo at the paper's sizes; a small preset keeps its own budget and learning rate."""
    if base.preset not in PAPER_TOKENIZERS:
        return replace(base.train, weight_decay=0.0, ema_warmup=True)
    batch, accumulation = (64, 1) if base.preset == "lm1b" else (16, 4)  # 512 rows per step on 8 devices
    fixed = {"lr": 3e-4, "weight_decay": 0.0, "warmup": 2500, "schedule": "constant", "ema": 0.9999, "ema_warmup": True}
    return replace(base.train, steps=steps, batch=batch, accumulation=accumulation, seed=1, **fixed)


def adapted(base: Config, name: str, steps: int = 1_000_000, **groups: Any) -> Config:
    """Adapt such a system to a preset of JPEG-DLM: the recipe of the comparison, or the budget of a small preset."""
    shared = {"data": paper_data(base)[0], "model": DditConfig(**ddit_model(base)), "train": ddit_training(base, steps)}
    return replace(base, method=name, **shared | groups)


def sampler_steps(base: Config) -> int:
    """Return the sampler steps of a preset: the paper's, or two per token for short rows, where more change little."""
    return PAPER_STEPS.get(base.preset, min(128, 2 * base.data.token_len))


def ddit_sizes(tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, int]]:
    """Return (number of ids, options of `DditConfig`) from the tensors `backbone.*` of a published checkpoint.

    The weights do not determine the number of heads: published models have heads of 64 channels, so this is assumed.
    """
    shape = shapes_of(tensors, "the layout of the shared transformer")
    vocab, hidden = shape("backbone.vocab_embed.embedding")
    sizes = {"hidden": hidden, "depth": repeated(tensors, "backbone.blocks"), "heads": max(1, hidden // 64)}
    if "backbone.sigma_map.mlp.0.weight" in tensors:
        cond_dim, freq_dim = shape("backbone.sigma_map.mlp.0.weight")
        sizes |= {"cond_dim": cond_dim, "freq_dim": freq_dim}
    return vocab, sizes


def published_config(tensors: Mapping[str, Tensor], base: Config, extra_ids: int = 0) -> Config:
    """Return `base` with the sizes of a published checkpoint; its vocabulary size identifies tokenizer and row length."""
    ids, sizes = ddit_sizes(tensors)
    vocab = ids - extra_ids
    data = replace(base.data, vocab_size=vocab)
    for preset, (tokenizer, known, _) in PAPER_TOKENIZERS.items():
        if known == vocab:
            data = replace(data, tokenizer=tokenizer, token_len=128 if preset == "lm1b" else 1024)
    return replace(base, data=data, model=replace(base.model, **sizes))


# ---------------------------------------------------------------- the log-linear schedule


class LogLinear:
    """The schedule alpha_t = 1 - (1 - eps) t, the share of tokens without noise, with eps = 1e-3 (MDLM, SEDD, Duo)."""

    def __init__(self, eps: float = 1e-3) -> None:
        self.eps = eps

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


def sampling_times(steps: int) -> list[float]:
    """Return evenly spaced times from 1 down to the last time (MDLM, SEDD, Duo)."""
    return torch.linspace(1, T_MIN_SAMPLING, steps + 1, dtype=torch.float64).tolist()


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


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Set logits outside the nucleus of mass top_p to -inf; the token that crosses top_p stays (Holtzman et al.)."""
    if top_p >= 1:
        return logits
    p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    struck = p.cumsum(-1) - p >= top_p
    return logits.masked_fill(torch.zeros_like(struck).scatter_(-1, order, struck), -torch.inf)
