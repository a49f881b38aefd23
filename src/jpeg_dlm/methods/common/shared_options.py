"""Checks and labels that options of several methods share. This module never imports torch."""

from __future__ import annotations

from typing import Any

from jpeg_dlm.config import Checks, Config, head_checks


def codec_checks(m: Any, token_len: int) -> Checks:
    """Return the checks of a model with a Perceiver codec and a transformer over its latents."""
    return [
        (
            m.latent_len <= token_len,
            f"model.latent_len {m.latent_len} exceeds data.token_len {token_len}: latents compress tokens, so lower it",
        ),
        (
            m.codec_heads >= 1 and m.latent_dim % m.codec_heads == 0,
            f"model.latent_dim {m.latent_dim} is not divisible by model.codec_heads {m.codec_heads}",
        ),
        *head_checks(m.hidden, m.heads),
        (
            min(m.latent_dim, m.hidden, m.codec_layers, m.depth, m.bottleneck_dim, m.proj_dim) >= 1,
            "model sizes must be at least 1",
        ),
        (m.mlp_ratio > 0 and m.codec_mlp_ratio > 0, "model.mlp_ratio and model.codec_mlp_ratio must be positive"),
        (0 <= m.dropout < 1, "model.dropout must lie in [0, 1)"),
    ]


def embedder_checks(m: Any) -> Checks:
    """Return the checks of the tokens that tell a latent transformer its time, scale and mode."""
    return [
        (m.freq_dim >= 2 and m.freq_dim % 2 == 0, "model.freq_dim must be even"),
        (min(m.time_tokens, m.sc_tokens, m.mode_tokens) >= 1, "each kind of prefix token is needed at least once"),
    ]


def self_condition_checks(o: Any) -> Checks:
    """Return the checks of self-conditioning with a guidance scale."""
    return [
        (0 <= o.sc_prob <= 1, "objective.sc_prob must lie between 0 and 1"),
        (0 < o.w_min <= o.w_max, "objective.w_min must be positive and at most objective.w_max"),
    ]


class StepSampler:
    """A sampler that evaluates its network once per step."""

    steps: int

    def checks(self, config: Config) -> Checks:
        return [(self.steps >= 1, "sampler.steps must be at least 1")]

    def label(self) -> str:
        """Return the name in tables."""
        return f"{self.steps} steps"

    def evaluations(self, token_len: int) -> int:
        """Return the network evaluations of one sample."""
        return self.steps
