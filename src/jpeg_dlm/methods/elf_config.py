"""Options of ELF, and their values under a preset of JPEG-DLM. Sources: (ELF) is its paper and code, (paper) the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jpeg_dlm.config import Checks, Config, TrainConfig, head_checks, opt
from jpeg_dlm.methods.common.shared_options import StepSampler, embedder_checks, self_condition_checks

# Half an epoch of 512 rows per step: on OpenWebText 95,000 / 5 / 2 (ELF), on OWT-128 eight times as many shorter rows, and on
# LM1B about 8.3 M rows of 128 (assumed).
WARMUP = {"lm1b": 8_100, "owt1024": 9_500, "owt128": 76_000}
PUBLISHED_FEATURES = 512  # channels of T5-small
SMALL_STEPS = 32  # least solver steps of small presets: bigram perplexity in nats 8.6, with 8 steps 9.0 (measured)


@dataclass(frozen=True)
class ElfModel:
    """Sizes of the network; the latents are the encoder's features, of width encoder.feature_dim."""

    bottleneck_dim: int = opt(128, "bottleneck of the input projection (ELF)")
    proj_dim: int = opt(512, "inner width of the unembedding (ELF)")
    hidden: int = opt(768, "H, width (ELF-B; M 1056, L 1280)")
    depth: int = opt(12, "layers (ELF-B; M 24, L 32)")
    heads: int = opt(12, "attention heads (ELF-B; M and L 16)")
    mlp_ratio: float = opt(4.0, "SwiGLU ratio before the two-thirds rule (ELF)")
    freq_dim: int = opt(256, "sinusoid width of time and guidance-scale embeddings (ELF)")
    time_tokens: int = opt(4, "prefix tokens carrying t (ELF)")
    sc_tokens: int = opt(4, "prefix tokens carrying the guidance scale w (ELF)")
    mode_tokens: int = opt(4, "prefix tokens telling denoise from decode (ELF)")

    def checks(self, config: Config) -> Checks:
        m = self
        return [
            *head_checks(m.hidden, m.heads),
            *embedder_checks(m),
            (min(m.hidden, m.depth, m.bottleneck_dim, m.proj_dim) >= 1 and m.mlp_ratio > 0, "model sizes must be positive"),
        ]


@dataclass(frozen=True)
class ElfObjective:
    """Options of the two modes, their noise, and self-conditioning."""

    noise_scale: float = opt(2.0, "deviation of the noise at t = 0 (ELF)")
    time_mean: float = opt(-1.5, "mean of logit(t) (ELF)")
    time_std: float = opt(0.8, "deviation of logit(t) (ELF)")
    v_floor: float = opt(0.05, "smallest 1 - t in a velocity (ELF)")
    decode_prob: float = opt(0.2, "share of rows in decode mode (ELF)")
    decode_noise_scale: float = opt(5.0, "deviation of the decode mode's noise (ELF: 5, conditional tasks 1)")
    decode_mean: float = opt(0.8, "mean of logit(lambda), the share of clean features in a token to decode (ELF)")
    decode_std: float = opt(0.8, "deviation of logit(lambda), drawn for each token (ELF)")
    sc_prob: float = opt(0.5, "probability of self-conditioning, per row in denoise mode (ELF)")
    w_min: float = opt(0.5, "smallest guidance scale in training (ELF)")
    w_max: float = opt(5.0, "largest guidance scale in training (ELF)")
    ce_chunk: int = opt(0, "token positions whose logits exist at once, recomputed in backward; 0 keeps all (assumed)")

    def checks(self, config: Config) -> Checks:
        o = self
        return [
            (o.noise_scale > 0 and o.decode_noise_scale >= 0, "objective.noise_scale must be positive"),
            (o.time_std > 0 and o.decode_std >= 0, "objective.time_std must be positive and objective.decode_std not negative"),
            (0 < o.v_floor <= 1, "objective.v_floor must lie in (0, 1]"),
            (0 < o.decode_prob < 1, "objective.decode_prob must lie between 0 and 1: rows of both modes are needed"),
            *self_condition_checks(o),
        ]


@dataclass(frozen=True)
class ElfSampler(StepSampler):
    """Options of the solver that turns noise into features."""

    steps: int = opt(32, "K, solver steps (paper: 32, OWT-128 64)")
    solver: Literal["ode", "sde"] = opt("ode", "'sde' adds fresh noise before each step except the last (paper: ode)")
    gamma: float = opt(1.5, "how far 'sde' goes back in time, in steps (ELF: 1.5 at 32 steps, 1 at 64, 2 at 8 and 16)")
    w: float = opt(3.0, "self-conditioning guidance scale (ELF)")
    grid: Literal["random", "quantile", "uniform"] = opt("random", "how the K+1 times are placed (ELF: random)")
    grid_mean: float = opt(-1.5, "mean of logit(t) of the grid (ELF)")
    grid_std: float = opt(0.8, "deviation of logit(t) of the grid (ELF)")

    def checks(self, config: Config) -> Checks:
        return [
            *super().checks(config),
            (self.gamma >= 0, "sampler.gamma must not be negative"),
            (self.w > 0 and self.grid_std > 0, "sampler.w and sampler.grid_std must be positive"),
        ]

    def label(self) -> str:
        return f"{self.steps} {self.solver.upper()} steps"

    def evaluations(self, token_len: int) -> int:
        """Add the decode evaluation."""
        return self.steps + 1


GROUPS: dict[str, type] = {"model": ElfModel, "objective": ElfObjective, "sampler": ElfSampler}


def elf_preset(base: Config) -> Config:
    """Adapt ELF to a preset: its encoder, tokens and DiT, with ELF's recipe at the paper's sizes or a small preset's budget."""
    m = base.model
    model = ElfModel(
        m.bottleneck_dim, m.proj_dim, m.hidden, m.depth, m.heads, m.mlp_ratio,
        m.freq_dim, m.time_tokens, m.sc_tokens, m.mode_tokens,
    )  # fmt: skip
    sampler = ElfSampler(base.sampler.steps, gamma=gamma_for(base.sampler.steps))
    objective = ElfObjective(ce_chunk=base.objective.ce_chunk)
    if base.preset in WARMUP:
        train = paper_training(base)
    else:  # better texts than AdamW at the preset's rate and noise of scale 2 (measured on smoke)
        train = replace(base.train, optimizer="muon", lr=1e-2, weight_decay=0.0)
        # Narrow features bear less noise: matched with their own noisy versions, 73% of the tokens of a 128-wide encoder
        # are identified at the published 5, and 90% at 2.5, as with 512 independent channels at 5 (measured).
        decode_noise = objective.decode_noise_scale * (base.encoder.feature_dim / PUBLISHED_FEATURES) ** 0.5
        objective = replace(objective, noise_scale=1.0, decode_noise_scale=decode_noise)
        # With a few steps, random times leave gaps, and samples were worse than shuffled text (measured).
        steps = max(SMALL_STEPS, base.sampler.steps)
        sampler = ElfSampler(steps, gamma=gamma_for(steps), grid="uniform")
    return replace(base, method="elf", model=model, objective=objective, sampler=sampler, train=train)


def gamma_for(steps: int) -> float:
    """Return ELF's gamma for a number of steps, or for the next lower number that ELF lists."""
    return 2.0 if steps < 32 else 1.5 if steps < 64 else 1.0


def paper_training(base: Config) -> TrainConfig:
    """Return ELF's recipe: 512 rows per step, 5 epochs, Muon at 1e-3 * 512/256, constant after warm-up, no decay.

    ELF has published no settings for LM1B and OWT-128: those of OpenWebText are assumed for them.
    """
    batch, accumulation = (16, 4) if base.preset == "owt1024" else (64, 1)  # on 8 devices
    return replace(
        base.train, epochs=5, batch=batch, accumulation=accumulation, devices=8, optimizer="muon", lr=2e-3, weight_decay=0.0,
        warmup=WARMUP[base.preset], schedule="constant", ema=0.9999, ema_warmup=False,
    )  # fmt: skip
