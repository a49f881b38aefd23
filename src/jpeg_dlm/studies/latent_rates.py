"""Compression rates of a study: the number of latents at each, and the rate that it really is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jpeg_dlm.config import Config

RATES = (1.0, 0.5, 0.25, 0.125)  # (paper)


def latent_lens(base: Config, rates: Sequence[float] = RATES) -> tuple[dict[float, int], list[str]]:
    """Return the number of latents at each rate, and a sentence for each rate that leaves none."""
    tokens = base.data.token_len
    found = {rate: round(rate * tokens) for rate in rates if rate * tokens >= 1}
    left_out = [f"r = {rate:g} is left out: {tokens} tokens leave less than one latent." for rate in rates if rate not in found]
    return found, left_out


def with_latents(base: Config, latent_len: int) -> Config:
    """Return the config with another number of latents."""
    return replace(base, model=replace(base.model, latent_len=latent_len))


def rate_facts(config: Config) -> dict[str, Any]:
    """Return what pictures over the rate show of a config."""
    return {"rate": config.rate, "latent_len": config.model.latent_len}


def rate_label(latent_len: int, token_len: int) -> str:
    """Return the exact rate N / L, which differs from the nominal one if it does not divide L."""
    rate = latent_len / token_len
    return f"r = {rate:g}" if rate in RATES else f"r = {latent_len}/{token_len}"
