"""All options of the project as frozen dataclasses, and checks for combinations that cannot work; never imports torch.

The help text of a field names its source: (paper), (released) for the authors' inference code, (measured) here, or
(assumed) where no source states it. The groups `model`, `objective` and `sampler` belong to the method.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm.errors import UsageError

LARGEST_INT = (1 << 63) - 1  # largest 64-bit integer, which every library accepts
LARGEST_SIZE = 1 << 24  # upper bound on all sizes of a model (assumed: far beyond every published one)
LOGITS_AT_ONCE = 1 << 23  # 32 MB: larger blocks are returned to the system, which clears them again each time (assumed)

Checks = list[tuple[bool, str]]  # conditions, each with the error message if it does not hold


def opt(default: Any, help: str, earlier: Any = None) -> Any:
    """Return a dataclass field with a default and a help text; `earlier` is its value in stored configs that lack it."""
    return field(default=default, metadata={"help": help} | ({} if earlier is None else {"earlier": earlier}))


@dataclass(frozen=True)
class DataConfig:
    """Source of the text, tokenizer, and packing of tokens into blocks."""

    source: str = opt("", "text file, folder, JSONL, prepared folder, named corpus or hf:DATASET")
    field: str = opt("", "field of records that holds the text, with dots for nested ones; empty: 'text', else the first text")
    tokenizer: str = opt(
        "bpe",
        "'bpe' or 'words' (trained on the corpus: pieces of words, or its most frequent words), 't5', a hub name or a folder",
    )
    vocab_size: int = opt(4096, "number of token ids; for 'bpe' and 'words' also the size to train")
    token_len: int = opt(128, "L, tokens per block (paper: 128 / 1024)")
    packing: Literal["continuous", "sentences", "padded"] = opt(
        "continuous", "how documents fill blocks: cut anywhere, cut between sentences, or one padded row each"
    )
    whole: bool = opt(False, "with 'padded': leave out documents longer than one row, so that every row starts a document")
    known: bool = opt(False, "leave out documents with words that the tokenizer lacks")
    frame: bool = opt(False, "frame each block with begin and end tokens and mark line boundaries (released, LM1B)")
    detokenize: Literal["none", "lm1b"] = opt("none", "undo the corpus's own tokenization first, by the rules of MDLM and Duo")
    holdout: float = opt(0.02, "share of the text kept for evaluation, unless the source names a held-out split")
    holdout_by: Literal["tokens", "documents"] = opt(
        "tokens", "unit of the share: text, which may cut long documents, or whole documents", earlier="documents"
    )
    cache_features: bool = opt(False, "cache the frozen encoder's features of all blocks on disk")

    @property
    def rows_end(self) -> bool:
        """True if the text of a row ends at its first end token; in other packings it only separates documents."""
        return self.packing == "padded"

    def options(self) -> dict[str, Any]:
        """Return the options by name, `field` only if it is set, so that indexes and folder names from before it stay."""
        return {name: value for name, value in asdict(self).items() if name != "field" or value}


@dataclass(frozen=True)
class EncoderConfig:
    """The frozen text encoder E."""

    kind: Literal["small", "hf", "flan-t5-small", "random", "none"] = opt(
        "small",
        "'small': trained by this project; 'hf': transformers, by `name`; 'flan-t5-small': pinned package; 'random': for "
        "tests; 'none': token embeddings that jpeg-dlm learns itself",
    )
    name: str = opt("", "hub name or folder for 'hf'; folder of a trained encoder for 'small'")
    revision: str = opt("", "hub revision for 'hf'")
    layer: int = opt(-1, "hidden layer whose states are the features; -1 is the last (paper)")
    layers: tuple[int, ...] = opt(
        (), "several hidden layers, such as 2,4,-1: the features are the mean of their normalized states; empty: `layer` alone"
    )
    feature_dim: int = opt(512, "F, width of the features")
    scale: Literal["none", "fixed", "per_channel"] = opt(
        "per_channel", "standardization of features: none, by `std`, or by statistics stored with the encoder"
    )
    std: float = opt(0.2, "feature deviation for scale 'fixed' (ELF's constant for T5-small)")
    depth: int = opt(4, "layers of the 'small' encoder")
    heads: int = opt(4, "attention heads of the 'small' encoder")
    causal: bool = opt(False, "features of a token see no later token, as model.codec causal needs; of 'small' and 'random'")
    mask_prob: float = opt(0.3, "share of tokens masked while pretraining the 'small' encoder (assumed)")
    keep_weight: float = opt(0.2, "weight of predicting unmasked tokens, which preserves token identity (measured)")


def head_checks(hidden: int, heads: int) -> Checks:
    """Return checks that attention heads divide the width into even parts, as rotary positions need."""
    return [
        (heads >= 1 and hidden % heads == 0, f"model.hidden {hidden} is not divisible by model.heads {heads}"),
        (heads >= 1 and hidden // max(heads, 1) % 2 == 0, "model.hidden / model.heads must be even for rotary positions"),
    ]


@dataclass(frozen=True)
class TrainConfig:
    """Budget, batch, optimizer, precision, logs and checkpoints."""

    steps: int = opt(0, "optimizer steps; 0 derives them from `epochs`")
    epochs: float = opt(20.0, "passes over the data when `steps` is 0 (paper: 20 / 5)")
    batch: int = opt(384, "rows per micro-batch on one device (paper: 384 / 24)")
    accumulation: int = opt(2, "micro-batches per optimizer step (paper)")
    devices: int = opt(8, "number of devices the batch is meant for (paper); a run uses the devices it gets")
    lr: float = opt(1e-3, "learning rate of the flow group: DiT and token projection (paper)")
    optimizer: Literal["adamw", "muon"] = opt(
        "adamw", "AdamW (paper), or Muon for matrices with Nesterov-Adam for the rest (ELF)"
    )
    codec_lr: float = opt(3e-4, "learning rate of compressor and decompressor (paper: 3e-4 / 2e-4)")
    beta1: float = opt(0.9, "AdamW beta 1 (paper)")
    beta2: float = opt(0.999, "AdamW beta 2 (paper)")
    adam_eps: float = opt(1e-8, "AdamW epsilon (COSMOS: 1e-6)")
    weight_decay: float = opt(0.01, "AdamW weight decay of matrices (paper)")
    clip: float = opt(1.0, "largest gradient norm (paper)")
    warmup: int = opt(0, "linear warm-up steps; 0 is min(2500, 5%) (assumed)")
    schedule: Literal["constant", "cosine", "linear"] = opt("constant", "learning rate after warm-up (assumed)")
    lr_floor: float = opt(0.0, "final rate of the cosine and linear schedules, as a share of the peak rate (COSMOS: 0.5)")
    ema: float = opt(0.999, "moving average of the weights that are sampled from (paper)")
    ema_warmup: bool = opt(False, "limit the decay at step n to (1 + n) / (10 + n), so that early weights are forgotten soon")
    precision: Literal["auto", "fp32", "bf16"] = opt(
        "auto", "autocast type; 'auto' is bf16 on CUDA (paper) and the faster type on a CPU; sensitive parts stay fp32"
    )
    compile: bool = opt(False, "compile the networks with torch.compile")
    checkpoint_layers: bool = opt(False, "keep only the inputs of layers and recompute the rest in backward")
    sharding: Literal["none", "fsdp"] = opt(
        "none", "'fsdp' shards weights, gradients, averages and optimizer state over the processes (FSDP2)"
    )
    timeout_s: float = opt(600.0, "longest wait in seconds for another process in training, not in text preparation (assumed)")
    seed: int = opt(42, "seed of everything random (paper)")
    nonfinite: Literal["stop", "skip"] = opt("stop", "what to do when a loss or gradient is not finite")
    log: Literal["none", "tensorboard", "wandb", "trackio"] = opt(
        "none", "dashboard that also receives the metrics; metrics.jsonl and metrics.png are always written"
    )
    log_every: int = opt(10, "steps between lines of metrics.jsonl")
    eval_every: int = opt(500, "steps between held-out losses and sample texts; 0 is never")
    diagnose: bool = opt(
        False, "at each evaluation, also compare the denoiser with the best linear one and samples with the training text"
    )
    save_every: int = opt(500, "steps between checkpoints")
    keep: int = opt(2, "number of checkpoints to keep")
    encoder_steps: int = opt(0, "pretraining steps of the 'small' encoder before the run; 0: it must exist already")
    encoder_lr: float = opt(3e-3, "learning rate of that pretraining (measured)")
    init: str = opt("", "model folder, run or checkpoint of the same method whose weights a new run starts from")
    spike_alarm: float = opt(
        10.0, "warn when the loss exceeds its recent median by this multiple of its spread; 0 is off (measured)"
    )
    collapse_alarm: float = opt(
        0.05, "warn when rank or variance of the latents falls below this share of its best; 0 is off (assumed)"
    )


def logit_rows(chunk: int, vocab_size: int) -> int:
    """Return the number of token positions whose logits exist at once: `chunk`, or the default if it is 0."""
    return chunk or max(1, LOGITS_AT_ONCE // vocab_size)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment; `methods.registry.groups_of` names the classes of `model`, `objective` and `sampler`."""

    preset: str = opt("lm1b", "name of the preset this started from")
    method: str = opt("jpeg-dlm", "name of the method")
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    model: Any
    objective: Any
    train: TrainConfig = field(default_factory=TrainConfig)
    sampler: Any

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


def _within_bounds(config: Config) -> bool:
    """Return True if all numbers are in range; called before checks multiply sizes and before networks are built."""
    sizes = [value for group in (config.model, config.encoder, config.data) for value in vars(group).values()]
    others = [value for group in (config.objective, config.train, config.sampler) for value in vars(group).values()]
    return all(
        abs(value) <= limit
        for limit, values in ((LARGEST_SIZE, sizes), (LARGEST_INT, others))
        for value in values
        if isinstance(value, int)
    )


def validate(config: Config) -> Config:
    """Raise `UsageError` for an impossible combination of options, else return the config unchanged."""
    d, e, t = config.data, config.encoder, config.train
    checks: Checks = [
        (
            _within_bounds(config),
            f"sizes of model, encoder and data must be at most {LARGEST_SIZE:,}, other numbers below 2^63",
        ),
        (d.token_len >= 1, "data.token_len must be at least 1"),
        *(check for group in (config.model, config.objective, config.sampler) for check in group.checks(config)),
        (e.feature_dim >= 1, "encoder.feature_dim must be at least 1"),
        (
            e.kind != "small" or (e.heads >= 1 and e.feature_dim % (2 * e.heads) == 0),
            f"encoder.feature_dim {e.feature_dim} must be a multiple of 2 * encoder.heads {e.heads}",
        ),
        (
            not e.causal or e.kind not in ("hf", "flan-t5-small"),
            f"encoder.causal needs an encoder that is trained so, and '{e.kind}' attends in both directions: use "
            "--encoder.kind small",
        ),
        (e.kind != "none" or not d.cache_features, "encoder.kind none has nothing to cache: use --data.cache-features false"),
        (e.scale != "fixed" or e.std > 0, "encoder.std must be positive"),
        (d.vocab_size >= 8, "data.vocab_size must be at least 8"),
        (0 < d.holdout < 0.5, "data.holdout must lie between 0 and 0.5"),
        (not d.whole or d.packing == "padded", "data.whole needs data.packing padded, which has one row per document"),
        (not d.frame or d.token_len >= 4, "data.frame needs data.token_len of at least 4"),
        (min(t.batch, t.accumulation, t.devices) >= 1, "train.batch, train.accumulation and train.devices must be at least 1"),
        (t.steps >= 0 and (t.steps > 0 or t.epochs > 0), "train.steps or train.epochs must be positive"),
        (min(t.lr, t.codec_lr, t.encoder_lr) > 0, "learning rates must be positive"),
        (t.clip > 0 and t.adam_eps > 0, "train.clip and train.adam_eps must be positive"),
        (t.timeout_s > 0, "train.timeout_s must be positive"),
        (t.spike_alarm >= 0, "train.spike_alarm must not be negative"),
        (0 <= t.collapse_alarm < 1, "train.collapse_alarm must lie in [0, 1)"),
        (0 <= t.lr_floor <= 1, "train.lr_floor must lie between 0 and 1"),
        (0 <= t.ema < 1, "train.ema must lie in [0, 1)"),
        (t.keep >= 1 and t.save_every >= 1 and t.log_every >= 1, "train.keep, save_every and log_every must be at least 1"),
    ]
    for ok, sentence in checks:
        if not ok:
            starts_with_option = "." in sentence.split()[0]  # option names keep their case
            raise UsageError((sentence if starts_with_option else sentence[0].upper() + sentence[1:]) + ".")
    return config
