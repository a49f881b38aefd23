"""All options of the project as frozen dataclasses, and checks for combinations that cannot work; never imports torch.

The help text of a field names its source: (paper), (released) for the authors' inference code, (measured) here, or
(assumed) where no source states it. The groups `model`, `objective` and `sampler` belong to the method.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal

from typing_extensions import TypeVar  # typing's has no defaults before Python 3.13

from jpeg_dlm.util.errors import UsageError

LARGEST_INT = (1 << 63) - 1  # largest 64-bit integer, which every library accepts
LARGEST_STEPS = 10**9  # upper bound on numbers of steps (assumed)
LOGITS_AT_ONCE = 1 << 23  # 32 MB: larger blocks are returned to the system, which clears them again each time (assumed)

Checks = list[tuple[bool, str]]  # conditions, each with the error message if it does not hold


BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


def opt(default: Any, help: str, **bounds: float) -> Any:
    """Return a dataclass field with a default, a help text and bounds (`ge`, `gt`, `le`, `lt`), which `validate` checks."""
    if unknown := bounds.keys() - BOUNDS.keys():
        raise TypeError(f"unknown bounds {sorted(unknown)}")
    return field(default=default, metadata={"help": help, "bounds": bounds})


def bound_checks(group: Any, name: str) -> Checks:
    """Return a check for every bound of the options of a group."""
    return [
        (BOUNDS[kind][0](getattr(group, f.name), limit), f"{name}.{f.name} must be {BOUNDS[kind][1]} {limit:,}")
        for f in fields(group)
        for kind, limit in f.metadata.get("bounds", {}).items()
    ]


@dataclass(frozen=True)
class DataConfig:
    """Source of the text, tokenizer, and packing of tokens into blocks."""

    source: str = opt("", "text file, folder, JSONL, prepared folder, named corpus or hf:DATASET")
    field: str = opt("", "field of records that holds the text, with dots for nested ones; empty: 'text', else the first text")
    source_field: str = opt("", "field of records that holds a pair's source; empty: 'source', else 'input'")
    target_field: str = opt("", "field of records that holds a pair's target; empty: 'target', else 'output'")
    tokenizer: str = opt("bpe", "'bpe' (pieces) or 'words', trained on the corpus, 't5', a hub name or a folder")
    vocab_size: int = opt(4096, "number of token ids; for 'bpe' and 'words' also the size to train", ge=8, le=1 << 20)
    token_len: int = opt(128, "L, tokens per block (paper: 128 / 1024)", ge=1, le=1 << 16)
    source_len: int = opt(
        0, "S, tokens of the source that each row is the target of; 0: text without sources", ge=0, le=1 << 16
    )
    packing: Literal["continuous", "sentences", "padded"] = opt(
        "continuous", "documents cut anywhere, between sentences, or one padded row"
    )
    whole: bool = opt(False, "with 'padded': leave out documents longer than one row, so that every row starts a document")
    known: bool = opt(False, "leave out documents with words that the tokenizer lacks")
    frame: bool = opt(False, "frame each block with begin and end tokens and mark line boundaries (released, LM1B)")
    detokenize: Literal["none", "lm1b", "wikitext", "ptb", "lambada", "papers"] = opt(
        "none", "undo the corpus's own tokenization first, by the rules of MDLM and Duo"
    )
    holdout: float = opt(0.02, "share of the text kept for evaluation, unless the source names a held-out split", gt=0, lt=0.5)
    cache_features: bool = opt(False, "cache the frozen encoder's features of all blocks on disk")

    @property
    def rows_end(self) -> bool:
        """True if the text of a row ends at its first end token; in other packings it only separates documents."""
        return self.packing == "padded"

    @property
    def row_len(self) -> int:
        """Tokens of a source and its target."""
        return self.source_len + self.token_len


@dataclass(frozen=True)
class EncoderConfig:
    """The frozen text encoder E."""

    kind: Literal["small", "hf", "random"] = opt("small", "trained here, of transformers by `name`, or for tests")
    name: str = opt("", "hub name or folder for 'hf'; folder of a trained encoder for 'small'")
    revision: str = opt("", "hub revision for 'hf'")
    layer: int = opt(-1, "hidden layer whose states are the features; -1 is the last (paper)", ge=-1000, le=1000)
    feature_dim: int = opt(512, "F, width of the features", ge=1, le=1 << 16)
    scale: Literal["none", "fixed", "per_channel"] = opt("per_channel", "divide features by 0.2 (ELF), or by stored statistics")
    depth: int = opt(4, "layers of the 'small' encoder", ge=1, le=1024)
    heads: int = opt(4, "attention heads of the 'small' encoder", ge=1, le=1024)


def head_checks(hidden: int, heads: int) -> Checks:
    """Return checks that attention heads divide the width into even parts, as rotary positions need."""
    return [
        (hidden % heads == 0, f"model.hidden {hidden} is not divisible by model.heads {heads}"),
        (hidden // heads % 2 == 0, "model.hidden / model.heads must be even for rotary positions"),
    ]


def codec_checks(m: Any, token_len: int) -> Checks:
    """Return the checks of a model with a Perceiver codec and a transformer over its latents."""
    too_long = f"model.latent_len {m.latent_len} exceeds data.token_len {token_len}: latents compress tokens, so lower it"
    uneven = f"model.latent_dim {m.latent_dim} is not divisible by model.codec_heads {m.codec_heads}"
    even = m.latent_dim % m.codec_heads == 0
    return [(m.latent_len <= token_len, too_long), (even, uneven), *head_checks(m.hidden, m.heads)]


class StepSampler:
    """Options of a sampler that evaluates its network once per step."""

    steps: int

    def label(self) -> str:
        """Return the name in tables."""
        return f"{self.steps} steps"

    def evaluations(self, token_len: int) -> int:
        """Return the network evaluations of one sample."""
        return self.steps


@dataclass(frozen=True)
class TrainConfig:
    """Budget, batch, optimizer, precision, logs and checkpoints."""

    steps: int = opt(0, "optimizer steps; 0 derives them from `epochs`", ge=0, le=LARGEST_STEPS)
    epochs: float = opt(20.0, "passes over the data when `steps` is 0 (paper: 20 / 5)", ge=0, le=1e6)
    batch: int = opt(384, "rows per micro-batch on one device (paper: 384 / 24)", ge=1, le=1 << 16)
    accumulation: int = opt(2, "micro-batches per optimizer step (paper)", ge=1, le=1 << 16)
    devices: int = opt(8, "number of devices the batch is meant for (paper); a run uses the devices it gets", ge=1, le=1 << 16)
    lr: float = opt(1e-3, "learning rate of the flow group: DiT and token projection (paper)", gt=0, le=10)
    optimizer: Literal["adamw", "muon"] = opt("adamw", "AdamW (paper), or Muon for hidden matrices (ELF)")
    codec_lr: float = opt(3e-4, "learning rate of compressor and decompressor (paper: 3e-4 / 2e-4)", gt=0, le=10)
    beta2: float = opt(0.999, "AdamW beta 2 (paper); beta 1 is 0.9", ge=0, lt=1)
    adam_eps: float = opt(1e-8, "AdamW epsilon (COSMOS: 1e-6)", gt=0, le=1)
    weight_decay: float = opt(0.01, "AdamW weight decay of matrices (paper)", ge=0, le=10)
    clip: float = opt(1.0, "largest gradient norm (paper)", gt=0, le=1e9)
    warmup: int = opt(0, "linear warm-up steps; 0 is min(2500, 5%) (assumed)", ge=0, le=LARGEST_STEPS)
    schedule: Literal["constant", "cosine", "linear"] = opt("constant", "learning rate after warm-up (assumed)")
    lr_floor: float = opt(0.0, "final rate of cosine and linear, as a share of the peak (COSMOS: 0.5)", ge=0, le=1)
    ema: float = opt(0.999, "moving average of the weights that are sampled from (paper)", ge=0, lt=1)
    ema_warmup: bool = opt(False, "limit the decay at step n to (1 + n) / (10 + n), so that early weights are forgotten soon")
    precision: Literal["auto", "fp32", "bf16"] = opt("auto", "autocast type; 'auto' is bf16 where it is fast (paper)")
    compile: bool = opt(False, "compile the networks with torch.compile")
    checkpoint_layers: bool = opt(False, "keep only the inputs of layers and recompute the rest in backward")
    sharding: Literal["none", "fsdp"] = opt("none", "'fsdp' shards all state of training over the processes (FSDP2)")
    seed: int = opt(42, "seed of everything random (paper)", ge=0, le=LARGEST_INT)
    nonfinite: Literal["stop", "skip"] = opt("stop", "what to do when a loss or gradient is not finite")
    log: Literal["none", "tensorboard", "wandb", "trackio"] = opt("none", "dashboard that also receives metrics.jsonl")
    log_every: int = opt(10, "steps between lines of metrics.jsonl", ge=1, le=LARGEST_STEPS)
    eval_every: int = opt(500, "steps between held-out losses and sample texts; 0 is never", ge=0, le=LARGEST_STEPS)
    save_every: int = opt(500, "steps between checkpoints", ge=1, le=LARGEST_STEPS)
    encoder_steps: int = opt(0, "steps of the 'small' encoder before the run; 0: it exists", ge=0, le=LARGEST_STEPS)
    init: str = opt("", "model folder, run or checkpoint of the same method whose weights a new run starts from")


def logit_rows(chunk: int, vocab_size: int) -> int:
    """Return the number of token positions whose logits exist at once: `chunk`, or the default if it is 0."""
    return chunk or max(1, LOGITS_AT_ONCE // vocab_size)


ModelOptions = TypeVar("ModelOptions", default=Any)
ObjectiveOptions = TypeVar("ObjectiveOptions", default=Any)
SamplerOptions = TypeVar("SamplerOptions", default=Any)


@dataclass(frozen=True, kw_only=True)
class Config(Generic[ModelOptions, ObjectiveOptions, SamplerOptions]):
    """A whole experiment; `methods.registry.groups_of` names the classes of `model`, `objective` and `sampler`."""

    preset: str = opt("lm1b", "name of the preset this started from")
    method: str = opt("jpeg-dlm", "name of the method")
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    model: ModelOptions
    objective: ObjectiveOptions
    train: TrainConfig = field(default_factory=TrainConfig)
    sampler: SamplerOptions

    @property
    def rate(self) -> float | None:
        """The compression rate r = N / L, or None for a method without compressed latents."""
        latent_len = getattr(self.model, "latent_len", None)
        return None if latent_len is None else latent_len / self.data.token_len


def with_files(config: Config, tokenizer: Path | None, encoder: Path | None) -> Config:
    """Return the config of a training that uses the tokenizer and encoder of a trained model."""
    data = replace(config.data, tokenizer=str(tokenizer)) if tokenizer else config.data
    return replace(config, data=data, encoder=replace(config.encoder, name=str(encoder)) if encoder else config.encoder)


# ---------------------------------------------------------------- combinations that cannot work

GROUP_NAMES = ("data", "encoder", "model", "objective", "train", "sampler")


def validate(config: Config) -> Config:
    """Raise `UsageError` for a number out of bounds or an impossible combination of options, else return the config."""
    d, e, t = config.data, config.encoder, config.train
    groups = {name: getattr(config, name) for name in GROUP_NAMES}
    _require(check for name, group in groups.items() for check in bound_checks(group, name))
    # After the bounds, on which these rely.
    _require(check for group in groups.values() if hasattr(group, "checks") for check in group.checks(config))
    uneven = f"encoder.feature_dim {e.feature_dim} must be a multiple of 2 * encoder.heads {e.heads}"
    _require(
        [
            (e.kind != "small" or e.feature_dim % (2 * e.heads) == 0, uneven),
            (not d.whole or d.packing == "padded", "data.whole needs data.packing padded, which has one row per document"),
            (not d.source_len or d.packing == "padded" and not d.frame, "data.source_len needs padded rows without a frame"),
            (not d.frame or d.token_len >= 4, "data.frame needs data.token_len of at least 4"),
            (t.steps > 0 or t.epochs > 0, "train.steps or train.epochs must be positive"),
        ]
    )
    return config


def _require(checks: Iterable[tuple[bool, str]]) -> None:
    """Raise `UsageError` with the sentence of the first check that does not hold."""
    for ok, sentence in checks:
        if not ok:
            starts_with_option = "." in sentence.split()[0]  # option names keep their case
            raise UsageError((sentence if starts_with_option else sentence[0].upper() + sentence[1:]) + ".")
