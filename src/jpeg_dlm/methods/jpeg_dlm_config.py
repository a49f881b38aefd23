"""Options of JPEG-DLM, with the paper's defaults. This module never imports torch, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from jpeg_dlm.config import Checks, Config, codec_checks, head_checks, opt


@dataclass(frozen=True)
class CodecSizes:
    """Sizes of compressor, decompressor and token projection, which COSMOS has too (paper)."""

    latent_len: int = opt(32, "N, latent positions; the rate r is N / L (paper: 32 / 512)", ge=1, le=1 << 16)
    latent_dim: int = opt(512, "D, latent width (paper)", ge=1, le=1 << 16)
    bottleneck_dim: int = opt(128, "feature and latent bottleneck (paper)", ge=1, le=1 << 16)
    codec_layers: int = opt(6, "layers of compressor and of decompressor (paper)", ge=1, le=1000)
    codec_heads: int = opt(8, "attention heads of the codec (paper)", ge=1, le=1024)
    proj_dim: int = opt(512, "inner width of the token projection W (released)", ge=1, le=1 << 16)
    position_scale: float = opt(0.0, "scale of codec position tables; 0 means D**-0.5 (released)", ge=0, le=1000)


@dataclass(frozen=True)
class DitSizes:
    """Sizes of the DiT and its projections, which ELF has too."""

    bottleneck_dim: int = opt(128, "feature and latent bottleneck (paper, ELF)", ge=1, le=1 << 16)
    proj_dim: int = opt(512, "inner width of the token projection (released, ELF)", ge=1, le=1 << 16)
    hidden: int = opt(768, "H, width of the DiT (paper; ELF-M 1056, ELF-L 1280)", ge=1, le=1 << 16)
    depth: int = opt(12, "layers of the DiT (paper; ELF-M 24, ELF-L 32)", ge=1, le=1000)
    heads: int = opt(12, "attention heads of the DiT (paper; ELF-M and ELF-L 16)", ge=1, le=1024)
    freq_dim: int = opt(256, "sinusoid width of time and guidance-scale embeddings (released)", ge=2, le=1 << 16)
    time_tokens: int = opt(4, "prefix tokens carrying t (paper)", ge=1, le=1024)
    sc_tokens: int = opt(4, "prefix tokens carrying the guidance scale w (paper)", ge=1, le=1024)
    mode_tokens: int = opt(4, "prefix tokens for the mode, denoise or decode (paper)", ge=1, le=1024)

    def checks(self, config: Config) -> Checks:
        return [*head_checks(self.hidden, self.heads), (self.freq_dim % 2 == 0, "model.freq_dim must be even")]


@dataclass(frozen=True)
class JpegDlmModel(DitSizes, CodecSizes):
    """Sizes of compressor, decompressor, token projection and DiT."""

    shared: bool = opt(True, "one network for both branches; false is the paper's 'sep. nets' ablation")
    decode_residual: bool = opt(False, "z_hat = z_c + head in the decode branch: helps small budgets, not in the paper")
    denoise_skip: bool = opt(False, "x = c_skip(t) z_t + c_out(t) head, after EDM: helps small budgets, not in the paper")
    context_blocks: int = opt(0, "blocks before in a document whose latents the DiT sees (not in the paper)", ge=0, le=1000)
    source: Literal["features", "latents"] = opt("features", "what the DiT sees of a pair's source (not in the paper)")

    def checks(self, config: Config) -> Checks:
        d = config.data
        several = not self.context_blocks or (d.packing == "padded" and not d.whole and not d.frame)
        remedy = "use --data.packing padded without data.whole and data.frame"
        context = (several, f"model.context_blocks needs documents of several rows: {remedy}")
        both = (not (self.context_blocks and d.source_len), "model.context_blocks and data.source_len exclude each other")
        same = self.source == "features" or d.source_len in (0, d.token_len)
        latents = (same, "model.source latents needs data.source_len to be data.token_len: one codec compresses both")
        return [*codec_checks(self, d.token_len), *super().checks(config), context, both, latents]


@dataclass(frozen=True)
class JpegDlmObjective:
    """Losses, corruption, self-conditioning and regularizers of joint training; flow and token losses have weight 1 (paper)."""

    sigma: float = opt(0.8, "corruption of features in the decode branch (paper: 0.8, OWT-128 1.0)", ge=0, le=1000)
    swap: float = opt(0.0, "share of random tokens in the decode branch, for rare words (not in the paper)", ge=0, lt=1)
    jep_weight: float = opt(1.0, "weight of the joint-embedding prediction loss (paper)", ge=0, le=1e6)
    feat_weight: float = opt(1.0, "weight of the feature reconstruction loss (paper)", ge=0, le=1e6)
    sigreg_weight: float = opt(0.1, "weight of SIGReg (paper)", ge=0, le=1e6)
    var_weight: float = opt(0.2, "weight of the variance hinge (paper)", ge=0, le=1e6)
    cov_weight: float = opt(0.002, "weight of the covariance term (paper)", ge=0, le=1e6)
    sigreg_late: float = opt(0.0, "weight of SIGReg after growth from 5% to 15% of training; 0: no growth", ge=0, le=1e6)
    sigreg_slices: int = opt(256, "M, random directions of SIGReg (assumed; LeJEPA uses 256 to 1024)", ge=1, le=1 << 20)
    sigreg_vectors: int = opt(0, "B, factor of SIGReg; 0: the latents of a micro-batch on all devices", ge=0, le=1 << 40)
    time_mean: float = opt(-1.5, "mean of logit(t) (paper)", ge=-100, le=100)
    time_std: float = opt(0.8, "deviation of logit(t) (paper)", gt=0, le=100)
    time_uniform: float = opt(0.0, "share of times drawn uniformly instead, to cover late times (not in the paper)", ge=0, le=1)
    flow_draws: int = opt(1, "noise draws per row in a step's flow loss, of one encoding (paper: 1)", ge=1, le=10_000)
    ce_time_min: float = opt(1.0, "token loss also on denoise predictions with t above this; 1 is off (paper)", ge=0, le=1)
    target_ema_start: float = opt(0.995, "momentum of the target compressor at the first step (paper)", ge=0, le=1)
    target_ema_end: float = opt(0.999, "momentum of the target compressor at the last step (paper)", ge=0, le=1)
    standardize_steps: int = opt(0, "steps until the latent statistics freeze; 0 is min(10%, 2000) (assumed)", ge=0, le=10**9)
    ce_chunk: int = opt(0, "token positions whose logits exist at once; 0 is as many as fit 32 MB (assumed)", ge=0, le=1 << 30)

    def checks(self, config: Config) -> Checks:
        can_grow = self.sigreg_weight > 0 or self.sigreg_late == 0
        return [(can_grow, "objective.sigreg_late needs a positive objective.sigreg_weight to start from")]


@dataclass(frozen=True)
class SamplerConfig:
    """Options of Algorithm 2, which turns noise into tokens."""

    steps: int = opt(32, "K, solver steps (paper: 32, OWT-128 64)", ge=1, le=100_000)
    solver: Literal["euler", "sde"] = opt("euler", "Euler steps (paper), or 'sde': each adds fresh noise first (ELF)")
    grid: Literal["quantile", "random", "uniform"] = opt("quantile", "placement of the K+1 times (released)")
    w: float = opt(3.0, "self-conditioning guidance scale (paper: 3 on LM1B and OWT-128, 2 on OWT-1024)", gt=0, le=1000)
    gamma: float = opt(1.5, "distance that 'sde' goes back in time, in steps (ELF: 1.5 at 32 steps, 2 at 8)", ge=0, le=1000)
    source_scale: float = opt(1.0, "guidance over the source of a pair; 1 is none (ELF: 2)", ge=0, le=1000)
    grid_mean: float = opt(-1.5, "mean of logit(t) of the grid (released)", ge=-100, le=100)
    grid_std: float = opt(0.8, "deviation of logit(t) of the grid (released)", gt=0, le=100)
    noise_scale: float = opt(1.0, "factor of the first noise; less gives less diverse text (not in the paper)", ge=0, le=1e3)

    frontier: ClassVar[Mapping[str, Sequence[float]]] = {"noise_scale": (0.6, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6)}  # assumed

    def label(self) -> str:
        """Return the name in tables."""
        return f"{self.steps} {self.solver} steps" + (f", scale {self.source_scale:g}" if self.source_scale != 1 else "")

    def evaluations(self, token_len: int) -> int:
        """Return the network evaluations of one sample: K steps, twice if the source guides, and the decode evaluation."""
        return self.steps * (1 if self.source_scale == 1 else 2) + 1


JpegDlmConfig = Config[JpegDlmModel, JpegDlmObjective, SamplerConfig]
GROUPS = {"model": JpegDlmModel, "objective": JpegDlmObjective, "sampler": SamplerConfig}
