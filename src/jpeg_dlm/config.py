"""All options of the project as frozen dataclasses, and checks for combinations that cannot work.

The help text of a field names its source: (paper), (released) for the authors' inference code, (measured) here, or
(assumed) where no source states it. This module never imports torch, so that `--help` is fast.

The groups `model`, `objective` and `sampler` belong to the method: those of JPEG-DLM are here, every other method defines
its own in its file. Each group lists its conditions in `checks`; a sampler group also has `label` and `evaluations`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from jpeg_dlm.errors import UsageError

LARGEST_INT = (1 << 63) - 1  # largest 64-bit integer, which every library accepts
LARGEST_SIZE = 1 << 24  # upper bound on all sizes of a model (assumed: far beyond every published one)
LOGITS_AT_ONCE = 1 << 23  # 32 MB: larger blocks are returned to the system, which clears them again each time (assumed)
FAST_EVALUATIONS = 12  # network evaluations of the fast sampler, including the decode evaluation

Checks = list[tuple[bool, str]]  # conditions, each with the error message if it does not hold


def opt(default: Any, help: str, earlier: Any = None) -> Any:
    """Return a dataclass field with a default and a help text; `earlier` is its value in stored configs that lack it."""
    return field(default=default, metadata={"help": help} | ({} if earlier is None else {"earlier": earlier}))


@dataclass(frozen=True)
class DataConfig:
    """Source of the text, tokenizer, and packing of tokens into blocks."""

    source: str = opt("", "text file, folder, JSONL, prepared folder, named corpus or hf:DATASET")
    tokenizer: str = opt("bpe", "'bpe' (trained on the corpus), 't5', or a hub name or folder of a tokenizer")
    vocab_size: int = opt(4096, "number of token ids; for 'bpe' also the size to train")
    token_len: int = opt(128, "L, tokens per block (paper: 128 / 1024)")
    packing: Literal["continuous", "sentences", "padded"] = opt(
        "continuous", "how documents fill blocks: cut anywhere, cut between sentences, or one padded row each"
    )
    whole: bool = opt(False, "with 'padded': leave out documents longer than one row, so that every row starts a document")
    frame: bool = opt(False, "frame each block with begin and end tokens and mark line boundaries (released, LM1B)")
    detokenize: Literal["none", "lm1b"] = opt("none", "undo the corpus's own tokenization first")
    holdout: float = opt(0.02, "share of the text kept for evaluation")
    holdout_by: Literal["tokens", "documents"] = opt(
        "tokens", "unit of the share: text, which may cut long documents, or whole documents", earlier="documents"
    )
    cache_features: bool = opt(False, "cache the frozen encoder's features of all blocks on disk")

    @property
    def rows_end(self) -> bool:
        """True if the text of a row ends at its first end token; in other packings it only separates documents."""
        return self.packing == "padded"


@dataclass(frozen=True)
class EncoderConfig:
    """The frozen text encoder E."""

    kind: Literal["small", "hf", "flan-t5-small", "random"] = opt(
        "small",
        "'small': trained by this project; 'hf': transformers, by `name`; 'flan-t5-small': pinned package; 'random': for tests",
    )
    name: str = opt("", "hub name or folder for 'hf'; folder of a trained encoder for 'small'")
    revision: str = opt("", "hub revision for 'hf'")
    layer: int = opt(-1, "hidden layer whose states are the features; -1 is the last (paper)")
    feature_dim: int = opt(512, "F, width of the features")
    scale: Literal["none", "fixed", "per_channel"] = opt(
        "per_channel", "standardization of features: none, by `std`, or by statistics stored with the encoder"
    )
    std: float = opt(0.2, "feature deviation for scale 'fixed' (ELF's constant for T5-small)")
    depth: int = opt(4, "layers of the 'small' encoder")
    heads: int = opt(4, "attention heads of the 'small' encoder")
    mask_prob: float = opt(0.3, "share of tokens masked while pretraining the 'small' encoder (assumed)")
    keep_weight: float = opt(0.2, "weight of predicting unmasked tokens, which preserves token identity (measured)")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of compressor, decompressor, token projection and DiT."""

    latent_len: int = opt(32, "N, latent positions; the rate r is N / L (paper: 32 / 512)")
    latent_dim: int = opt(512, "D, latent width (paper)")
    bottleneck_dim: int = opt(128, "feature and latent bottleneck (paper)")
    codec_layers: int = opt(6, "layers of compressor and of decompressor (paper)")
    codec_heads: int = opt(8, "attention heads of the codec (paper)")
    codec_mlp_ratio: float = opt(4.0, "codec feed-forward ratio (released)")
    proj_dim: int = opt(512, "inner width of the token projection W (released)")
    hidden: int = opt(768, "H, width of the DiT (paper)")
    depth: int = opt(12, "layers of the DiT (paper)")
    heads: int = opt(12, "attention heads of the DiT (paper)")
    mlp_ratio: float = opt(4.0, "SwiGLU ratio before the two-thirds rule (paper)")
    freq_dim: int = opt(256, "sinusoid width of time and guidance-scale embeddings (released)")
    time_tokens: int = opt(4, "prefix tokens carrying t (paper)")
    sc_tokens: int = opt(4, "prefix tokens carrying the guidance scale w (paper)")
    mode_tokens: int = opt(4, "prefix tokens for the mode, denoise or decode (paper)")
    dropout: float = opt(0.0, "dropout of codec and DiT (paper: 0)")
    shared: bool = opt(True, "one network for both branches; false is the paper's 'sep. nets' ablation")
    decode_residual: bool = opt(False, "z_hat = z_c + head in the decode branch: helps small budgets, not in the paper")
    denoise_skip: bool = opt(
        False, "x = c_skip(t) z_t + c_out(t) head in the denoise branch, after EDM: helps small budgets, not in the paper"
    )
    position_scale: float = opt(0.0, "scale of codec position tables; 0 means D**-0.5 (released)")

    def checks(self, config: Config) -> Checks:
        d, m = config.data, self
        return [
            (d.token_len >= 1 and m.latent_len >= 1, "data.token_len and model.latent_len must be at least 1"),
            (
                m.latent_len <= d.token_len,
                f"model.latent_len {m.latent_len} exceeds data.token_len {d.token_len}: latents compress tokens, so lower it",
            ),
            (
                m.codec_heads >= 1 and m.latent_dim % m.codec_heads == 0,
                f"model.latent_dim {m.latent_dim} is not divisible by model.codec_heads {m.codec_heads}",
            ),
            *head_checks(m.hidden, m.heads),
            (m.freq_dim >= 2 and m.freq_dim % 2 == 0, "model.freq_dim must be even"),
            (
                min(m.latent_dim, m.hidden, m.codec_layers, m.depth, m.bottleneck_dim, m.proj_dim) >= 1,
                "model sizes must be at least 1",
            ),
            (m.mlp_ratio > 0 and m.codec_mlp_ratio > 0, "model.mlp_ratio and model.codec_mlp_ratio must be positive"),
            (0 <= m.dropout < 1, "model.dropout must lie in [0, 1)"),
            (min(m.time_tokens, m.sc_tokens, m.mode_tokens) >= 1, "each kind of prefix token is needed at least once"),
        ]


def head_checks(hidden: int, heads: int) -> Checks:
    """Return checks that attention heads divide the width into even parts, as rotary positions need."""
    return [
        (heads >= 1 and hidden % heads == 0, f"model.hidden {hidden} is not divisible by model.heads {heads}"),
        (heads >= 1 and hidden // max(heads, 1) % 2 == 0, "model.hidden / model.heads must be even for rotary positions"),
    ]


@dataclass(frozen=True)
class ObjectiveConfig:
    """Losses, corruption, self-conditioning and regularizers of joint training."""

    sigma: float = opt(0.8, "corruption of features in the decode branch (paper: 0.8, OWT-128 1.0)")
    jep_weight: float = opt(1.0, "weight of the joint-embedding prediction loss (paper)")
    flow_weight: float = opt(1.0, "weight of the flow matching loss (paper)")
    feat_weight: float = opt(1.0, "weight of the feature reconstruction loss (paper)")
    ce_weight: float = opt(1.0, "weight of the token cross-entropy (paper)")
    sigreg_weight: float = opt(0.1, "weight of SIGReg (paper)")
    var_weight: float = opt(0.2, "weight of the variance hinge (paper)")
    cov_weight: float = opt(0.002, "weight of the covariance term (paper)")
    sigreg_late: float = opt(
        0.0, "weight to which SIGReg grows linearly between 5% and 15% of training, once tokens decode; 0 is no change"
    )
    sigreg_slices: int = opt(256, "M, random directions of SIGReg (assumed; LeJEPA uses 256 to 1024)")
    sigreg_knots: int = opt(17, "quadrature knots of SIGReg (LeJEPA)")
    sigreg_t_max: float = opt(3.0, "largest frequency of SIGReg (LeJEPA)")
    reg_space: Literal["raw", "standardized"] = opt("raw", "which z_c the regularizers use (assumed)")
    reg_max_rows: int = opt(4096, "latent vectors per step for the regularizers, with at least one per row; 0 is all (assumed)")
    time_mean: float = opt(-1.5, "mean of logit(t) (paper)")
    time_std: float = opt(0.8, "deviation of logit(t) (paper)")
    time_uniform: float = opt(0.0, "share of times drawn uniformly instead, to cover late times (not in the paper)")
    flow_draws: int = opt(1, "noise draws per row in the flow loss of a step; they share the codec's work (assumed; paper: 1)")
    flow_weighting: Literal["none", "residual"] = opt(
        "none", "'residual' divides the flow loss by the residual variance of the best linear estimate at t, after EDM"
    )
    flow_loss: Literal["x", "v"] = opt("x", "error of the clean embedding or of the velocity (paper: x)")
    v_floor: float = opt(0.05, "smallest 1 - t in the velocity loss (ELF)")
    ce_time_min: float = opt(1.0, "token loss also on denoise predictions with t above this; 1 is off (paper)")
    sc_prob: float = opt(0.5, "probability of self-conditioning, per example (paper)")
    w_min: float = opt(0.5, "smallest guidance scale in training (ELF)")
    w_max: float = opt(5.0, "largest guidance scale in training (ELF)")
    target_ema_start: float = opt(0.995, "momentum of the target compressor at the first step (paper)")
    target_ema_end: float = opt(0.999, "momentum of the target compressor at the last step (paper)")
    standardize_momentum: float = opt(0.99, "momentum of the latent statistics (paper)")
    standardize_steps: int = opt(0, "steps until the latent statistics freeze; 0 is min(10%, 2000) (assumed)")
    ce_chunk: int = opt(0, "token positions whose logits exist at once; 0 is as many as fit 32 MB (assumed)")

    def checks(self, config: Config) -> Checks:
        o = self
        return [
            (0 <= o.target_ema_start <= 1 and 0 <= o.target_ema_end <= 1, "moving averages must lie in [0, 1]"),
            (o.sigma >= 0 and o.time_std > 0, "objective.sigma must not be negative and objective.time_std must be positive"),
            (0 <= o.time_uniform <= 1, "objective.time_uniform must lie between 0 and 1"),
            (o.flow_draws >= 1, "objective.flow_draws must be at least 1"),
            (
                o.flow_weighting == "none" or o.flow_loss == "x",
                "objective.flow_weighting 'residual' needs objective.flow_loss x, as 'v' has its own weighting",
            ),
            (
                o.sigreg_late >= 0 and (o.sigreg_weight > 0 or o.sigreg_late == 0),
                "objective.sigreg_late must not be negative, and needs a positive objective.sigreg_weight to start from",
            ),
            (0 <= o.sc_prob <= 1, "objective.sc_prob must lie between 0 and 1"),
            (0 < o.w_min <= o.w_max, "objective.w_min must be positive and at most objective.w_max"),
            (o.sigreg_slices >= 1 and o.sigreg_knots >= 3, "SIGReg needs at least 1 slice and 3 knots"),
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
    spike_alarm: float = opt(
        10.0, "warn when the loss exceeds its recent median by this multiple of its spread; 0 is off (measured)"
    )
    collapse_alarm: float = opt(
        0.05, "warn when rank or variance of the latents falls below this share of its best; 0 is off (assumed)"
    )


@dataclass(frozen=True)
class SamplerConfig:
    """Options of Algorithm 2, which turns noise into tokens."""

    steps: int = opt(32, "K, solver steps (paper: 32, OWT-128 64)")
    solver: Literal["euler", "heun", "multistep"] = opt("euler", "ODE solver (paper: Euler)")
    grid: Literal["quantile", "random", "uniform", "stored"] = opt(
        "quantile", "placement of the K+1 times (released); 'stored' uses `times`"
    )
    w: float = opt(3.0, "self-conditioning guidance scale (paper: 3 on LM1B and OWT-128, 2 on OWT-1024)")
    grid_mean: float = opt(-1.5, "mean of logit(t) of the grid (released)")
    grid_std: float = opt(0.8, "deviation of logit(t) of the grid (released)")
    protocol: Literal["default", "released"] = opt(
        "default", "'released' draws random numbers in the order of the authors' code"
    )
    times: tuple[float, ...] = opt((), "K+1 times from 0 to 1, found by `jpeg-dlm tune` and stored with a model")
    fast_solver: Literal["euler", "heun", "multistep"] = opt("multistep", "solver of the fast sampler (measured)")
    fast_w: float = opt(0.0, "guidance scale of the fast sampler; 0 is w")

    def checks(self, config: Config) -> Checks:
        times = self.times
        return [
            (self.steps >= 1, "sampler.steps must be at least 1"),
            (self.w > 0 and self.grid_std > 0, "sampler.w and sampler.grid_std must be positive"),
            (self.fast_w >= 0, "sampler.fast_w must not be negative"),
            (
                not times or (len(times) > 1 and times[0] == 0 and times[-1] == 1),
                "sampler.times must begin with 0 and end with 1",
            ),
            (all(t < u for t, u in pairwise(times)), "sampler.times must increase"),
            (
                self.grid != "stored" or self.protocol == "default",
                "sampler.grid 'stored' is not in the released protocol: choose another grid",
            ),
            (
                self.grid != "stored" or bool(times),
                "sampler.grid 'stored' needs sampler.times: find them with  jpeg-dlm tune, or choose another grid",
            ),
            (
                self.grid != "stored" or self.steps == len(times) - 1,
                f"sampler.grid 'stored' has {len(times) - 1} steps, not {self.steps}: leave sampler.steps at that, or choose "
                "another grid",
            ),
        ]

    def fast(self) -> SamplerConfig:
        """Return the fast sampler: the stored times, or as many steps of the grid as `FAST_EVALUATIONS` allow.

        A few random times may leave large gaps, so quantiles of the same distribution replace them. A sampler that is
        already as fast, such as that of a distilled student, is returned unchanged.
        """
        if not self.times and self.evaluations(0) <= FAST_EVALUATIONS:
            return self
        sampler = replace(self, solver=self.fast_solver, w=self.fast_w or self.w, protocol="default")
        if self.times:
            return replace(sampler, grid="stored", steps=len(self.times) - 1)
        grid = "quantile" if self.grid == "random" else self.grid
        return replace(sampler, grid=grid, steps=steps_within(FAST_EVALUATIONS, self.fast_solver))

    def label(self) -> str:
        """Return the name in tables."""
        return f"{self.steps} {self.solver} steps"

    def evaluations(self, token_len: int) -> int:
        """Return the network evaluations of one sample: K (Heun: two per step except the last) and the decode evaluation."""
        return (2 * self.steps - 1 if self.solver == "heun" else self.steps) + 1


def logit_rows(chunk: int, vocab_size: int) -> int:
    """Return the number of token positions whose logits exist at once: `chunk`, or the default if it is 0."""
    return chunk or max(1, LOGITS_AT_ONCE // vocab_size)


def steps_within(evaluations: int, solver: str) -> int:
    """Return the largest number of steps that fits into `evaluations`, including the decode evaluation."""
    steps = evaluations // 2 if solver == "heun" else evaluations - 1
    if steps < 1:
        raise UsageError("A sampler needs at least 2 network evaluations: one step and the decode evaluation.")
    return steps


@dataclass(frozen=True)
class Config:
    """A whole experiment."""

    preset: str = opt("lm1b", "name of the preset this started from")
    method: str = opt("jpeg-dlm", "name of the method")
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    model: Any = field(default_factory=ModelConfig)  # `groups_of(method)` names the classes of these three
    objective: Any = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sampler: Any = field(default_factory=SamplerConfig)

    @property
    def rate(self) -> float | None:
        """The compression rate r = N / L, or None for a method without compressed latents."""
        latent_len = getattr(self.model, "latent_len", None)
        return None if latent_len is None else latent_len / self.data.token_len


def groups_of(method: str) -> dict[str, type]:
    """Return the classes of the option groups of a method."""
    if method == Config.method:  # known without importing torch
        return {"model": ModelConfig, "objective": ObjectiveConfig, "sampler": SamplerConfig}
    from jpeg_dlm.methods.registry import method_class

    return dict(method_class(method).groups)


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
