"""Options of COSMOS, shared by its two stages, and their values under a preset of JPEG-DLM.

(COSMOS) marks values of its public code, (paper) values stated in the comparison with JPEG-DLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.methods.common.shared_options import StepSampler, codec_checks

PAPER_PRESETS = ("lm1b", "owt1024", "owt128")


@dataclass(frozen=True)
class CosmosModel:
    """Sizes of the codec, as in JPEG-DLM (paper), and of the diffusion network."""

    latent_len: int = opt(64, "N, latent positions; the rate r is N / L (paper: 128, 64, 32, 16)")
    latent_dim: int = opt(512, "D, latent width (paper)")
    bottleneck_dim: int = opt(128, "feature bottleneck of the codec (paper: the architecture of JPEG-DLM)")
    codec_layers: int = opt(6, "layers of compressor and of decompressor (paper)")
    codec_heads: int = opt(8, "attention heads of the codec (paper)")
    codec_mlp_ratio: float = opt(4.0, "codec feed-forward ratio (COSMOS)")
    proj_dim: int = opt(512, "inner width of the token projection, as in JPEG-DLM (assumed)")
    hidden: int = opt(768, "H, width of the diffusion network (COSMOS)")
    depth: int = opt(12, "layers of the diffusion network (COSMOS)")
    heads: int = opt(12, "attention heads of the diffusion network (COSMOS)")
    mlp_ratio: float = opt(4.0, "SwiGLU inner width over H (COSMOS)")
    dropout: float = opt(0.0, "dropout of the codec (paper: the architecture of JPEG-DLM; COSMOS: 0.1)")
    position_scale: float = opt(0.0, "scale of codec position tables; 0 means D**-0.5 (COSMOS)")

    def checks(self, config: Config) -> Checks:
        return [(self.latent_len >= 1, "model sizes must be at least 1"), *codec_checks(self, config.data.token_len)]


@dataclass(frozen=True)
class CosmosObjective:
    """Augmentations and budget of stage one; noise and self-conditioning of stage two."""

    codec_steps: int = opt(0, "optimizer steps of stage one; 0: train.steps, as in stage two (COSMOS: 200k)")
    codec_clip: float = opt(10.0, "largest gradient norm of stage one (COSMOS)")
    mask_share: float = opt(0.5, "share of rows in which some tokens are hidden from the compressor (paper)")
    mask_prob: float = opt(0.3, "probability of hiding a token of those rows (paper)")
    noise_share: float = opt(0.5, "share of rows whose features get Gaussian noise (paper)")
    noise_scale: float = opt(0.7, "delta in delta * h + sqrt(1 - delta**2) * eps of those rows (paper)")
    latent_mask_prob: float = opt(0.4, "probability of zeroing a coordinate of the latents, not rescaled (paper)")
    ce_chunk: int = opt(0, "token positions whose logits exist at once, recomputed in backward; 0 keeps all (assumed)")
    schedule_d: float = opt(5.0, "d of the tan-d noise schedule (paper)")
    t_min: float = opt(1e-5, "smallest time in training (COSMOS)")
    sc_prob: float = opt(0.5, "probability of self-conditioning, one coin per batch (COSMOS)")

    def checks(self, config: Config) -> Checks:
        o = self
        return [
            (o.codec_steps >= 0, "objective.codec_steps must not be negative"),
            (o.codec_clip > 0, "objective.codec_clip must be positive"),
            (
                min(o.mask_share, o.noise_share) >= 0 and o.mask_share + o.noise_share <= 1,
                "objective.mask_share and objective.noise_share must not be negative and at most 1 together",
            ),
            (
                0 <= o.mask_prob <= 1 and 0 <= o.noise_scale <= 1 and 0 <= o.latent_mask_prob < 1,
                "objective.mask_prob, noise_scale and latent_mask_prob must lie between 0 and 1",
            ),
            (o.schedule_d > 0, "objective.schedule_d must be positive"),
            (0 <= o.t_min < 1, "objective.t_min must lie in [0, 1)"),
            (0 <= o.sc_prob <= 1, "objective.sc_prob must lie between 0 and 1"),
        ]


@dataclass(frozen=True)
class CosmosSampler(StepSampler):
    """Options of the reverse SDE and of decoding."""

    steps: int = opt(200, "Euler steps of the reverse SDE (paper)")
    t_end: float = opt(0.05, "time at which the reverse SDE ends; it begins at 1 (COSMOS)")
    result: Literal["mean", "x0"] = opt("mean", "what is decoded: the mean of the last step (COSMOS) or its clean prediction")

    def checks(self, config: Config) -> Checks:
        return [*super().checks(config), (0 < self.t_end < 1, "sampler.t_end must lie between 0 and 1")]

    def label(self) -> str:
        return f"{self.steps} SDE steps"


GROUPS: dict[str, type] = {"model": CosmosModel, "objective": CosmosObjective, "sampler": CosmosSampler}


def cosmos_preset(base: Config) -> Config:
    """Adapt COSMOS to a preset: JPEG-DLM's data, encoder and sizes, with COSMOS's own recipe at the paper's sizes."""
    model = CosmosModel(**{f.name: getattr(base.model, f.name) for f in fields(CosmosModel)})
    objective, train = CosmosObjective(ce_chunk=base.objective.ce_chunk), base.train
    if base.preset in PAPER_PRESETS:
        objective = replace(objective, codec_steps=200_000)
        batch, accumulation = (64, 1) if base.data.token_len <= 128 else (16, 4)  # 512 rows per step on 8 devices (COSMOS)
        train = replace(
            train, steps=500_000, batch=batch, accumulation=accumulation, lr=2e-4, codec_lr=2e-4, beta2=0.98,
            adam_eps=1e-6, weight_decay=1e-5, clip=1.0, warmup=1000, schedule="constant", ema=0.9999,
        )  # fmt: skip
    encoder = replace(base.encoder, scale="per_channel")  # (COSMOS); also correct for layers with another scale than ELF's
    return replace(
        base, method="cosmos", encoder=encoder, model=model, objective=objective, train=train, sampler=CosmosSampler()
    )


def codec_stage(config: Config) -> Config:
    """Return the config of stage one of a run of COSMOS."""
    o, train = config.objective, config.train
    floor = 0.5 if config.preset in PAPER_PRESETS else 0.0  # (COSMOS: from 2e-4 to 1e-4)
    train = replace(train, steps=o.codec_steps or train.steps, clip=o.codec_clip, schedule="cosine", lr_floor=floor)
    return replace(config, method="cosmos-codec", train=train)
