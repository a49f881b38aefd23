"""Options of JPEG-DLM, with the paper's defaults. This module never imports torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.flow.sampler_config import SamplerConfig
from jpeg_dlm.methods.common.shared_options import codec_checks, embedder_checks, self_condition_checks


@dataclass(frozen=True)
class JpegDlmModel:
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
    decoder: Literal["projection", "autoregressive", "two_pass"] = opt(
        "projection", "features to tokens: W at each position (paper), W behind a causal Transformer over tokens (CoDAR), or "
        "W twice, the second time behind a bidirectional Transformer that reads the first tokens (assumed)",
    )  # fmt: skip
    decoder_layers: int = opt(3, "layers of a contextual decoder (LDLM and TEncDM: 3)")
    decoder_hidden: int = opt(0, "width of a contextual decoder, with codec_heads heads; 0 is latent_dim (assumed)")
    decoder_corrupt: float = opt(
        0.3, "share of the tokens it reads in training that are random, so that it needs the latents (AURORA-LM drops 0.3)"
    )
    context_blocks: int = opt(0, "preceding blocks of a document whose clean latents the DiT also sees (not in the paper: 0)")
    codec: Literal["perceiver", "causal"] = opt(
        "perceiver", "'causal': latent n depends on tokens up to the end of its span, (n + 1) L / N, alone (paper: perceiver)"
    )

    @property
    def decoder_width(self) -> int:
        return self.decoder_hidden or self.latent_dim

    def checks(self, config: Config) -> Checks:
        d, m = config.data, self
        return [
            (d.token_len >= 1 and m.latent_len >= 1, "data.token_len and model.latent_len must be at least 1"),
            *codec_checks(m, d.token_len),
            *embedder_checks(m),
            (m.decoder_layers >= 1 and m.decoder_hidden >= 0, "model.decoder_layers must be at least 1, and no size negative"),
            (0 <= m.decoder_corrupt <= 1, "model.decoder_corrupt must lie between 0 and 1"),
            (
                m.decoder == "projection" or m.decoder_width % (2 * max(1, m.codec_heads)) == 0,
                f"a contextual decoder's width {m.decoder_width} must be an even number for each of model.codec_heads "
                f"{m.codec_heads}: change model.decoder_hidden",
            ),
            (m.context_blocks >= 0, "model.context_blocks must not be negative"),
            (
                m.codec == "perceiver" or config.encoder.causal,
                "model.codec 'causal' needs features that see no later token: use --encoder.causal true",
            ),
            (
                m.codec == "perceiver" or m.decoder == "projection",
                f"model.decoder '{m.decoder}' reads features ahead, which model.codec 'causal' rules out: use one of the two",
            ),
            (
                not m.context_blocks or (d.packing == "padded" and not d.whole and not d.frame),
                "model.context_blocks needs documents of several rows: use --data.packing padded without data.whole and "
                "data.frame",
            ),
        ]


@dataclass(frozen=True)
class JpegDlmObjective:
    """Losses, corruption, self-conditioning and regularizers of joint training."""

    sigma: float = opt(0.8, "corruption of features in the decode branch (paper: 0.8, OWT-128 1.0)")
    swap: float = opt(
        0.0, "share of tokens that random ones replace in the decode branch, so that the codec learns rare words (not in the "
        "paper: 0)",
    )  # fmt: skip
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
    sigreg_vectors: int = opt(
        0, "B, by which SIGReg multiplies a distance; 0 is the latents of a micro-batch on all devices (LeJEPA's code)"
    )
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
    ce_time_mean: Literal["all", "late"] = opt(
        "all", "rows over which that token loss is a mean: all, so that late rows count by their share, or late rows only"
    )
    flow_to_compressor: float = opt(0.0, "weight of the flow loss's gradient in the context compressor (paper: 0)")
    flow_to_compressor_warmup: float = opt(0.0, "share of training over which that weight rises along a sigmoid (LDLM)")
    flow_to_compressor_side: Literal["both", "input"] = opt(
        "both", "where it enters: noisy input and target, or the input alone, with a stop-gradient on the target (assumed)"
    )
    flow_to_compressor_values: Literal["context", "target"] = opt(
        "context", "latents that the flow learns then: the context compressor's, or the target's with its gradient (assumed)"
    )
    flow_to_compressor_norm: Literal["running", "batch"] = opt(
        "running", "standardization in that gradient; with 'batch', smaller latents do not lower the loss (REPA-E)"
    )
    ce_to_codec: bool = opt(True, "false: the token loss stops at the decompressed features and trains only W (LDLM)")
    decoder_noise: float = opt(0.0, "deviation of noise on standardized latents before the decompressor in training (LDLM: 3)")
    time_adaptive: bool = opt(False, "draw times so that the flow loss is linear in their quantile, in training (LDLM)")
    sc_prob: float = opt(0.5, "probability of self-conditioning, per example (paper)")
    w_min: float = opt(0.5, "smallest guidance scale in training (ELF)")
    w_max: float = opt(5.0, "largest guidance scale in training (ELF)")
    target_ema_start: float = opt(0.995, "momentum of the target compressor at the first step (paper)")
    target_ema_end: float = opt(0.999, "momentum of the target compressor at the last step (paper)")
    standardize_momentum: float = opt(0.99, "momentum of the latent statistics (paper)")
    standardize_steps: int = opt(0, "steps until the latent statistics freeze; 0 is min(10%, 2000) (assumed)")
    context_drop: float = opt(0.15, "share of rows that are trained without their context, if model.context_blocks (assumed)")
    ce_chunk: int = opt(0, "token positions whose logits exist at once; 0 is as many as fit 32 MB (assumed)")

    def checks(self, config: Config) -> Checks:
        o = self
        return [
            (0 <= o.target_ema_start <= 1 and 0 <= o.target_ema_end <= 1, "moving averages must lie in [0, 1]"),
            (o.sigma >= 0 and o.time_std > 0, "objective.sigma must not be negative and objective.time_std must be positive"),
            (0 <= o.swap < 1, "objective.swap must lie between 0 and 1"),
            (0 <= o.time_uniform <= 1, "objective.time_uniform must lie between 0 and 1"),
            (o.flow_draws >= 1, "objective.flow_draws must be at least 1"),
            (
                o.flow_to_compressor >= 0 and o.decoder_noise >= 0,
                "objective.flow_to_compressor and objective.decoder_noise must not be negative",
            ),
            (0 <= o.flow_to_compressor_warmup <= 1, "objective.flow_to_compressor_warmup must lie between 0 and 1"),
            (
                config.encoder.kind != "none" or (o.ce_to_codec and o.ce_weight > 0),
                "encoder.kind none needs objective.ce_weight and objective.ce_to_codec: the token loss keeps embeddings apart",
            ),
            (
                o.flow_weighting == "none" or o.flow_loss == "x",
                "objective.flow_weighting 'residual' needs objective.flow_loss x, as 'v' has its own weighting",
            ),
            (
                o.sigreg_late >= 0 and (o.sigreg_weight > 0 or o.sigreg_late == 0),
                "objective.sigreg_late must not be negative, and needs a positive objective.sigreg_weight to start from",
            ),
            *self_condition_checks(o),
            (0 <= o.context_drop <= 1, "objective.context_drop must lie between 0 and 1"),
            (
                o.sigreg_slices >= 1 and o.sigreg_knots >= 3 and o.sigreg_vectors >= 0,
                "SIGReg needs at least 1 slice and 3 knots, and objective.sigreg_vectors must not be negative",
            ),
        ]


GROUPS = {"model": JpegDlmModel, "objective": JpegDlmObjective, "sampler": SamplerConfig}
