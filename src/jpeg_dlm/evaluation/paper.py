"""Figures the paper gives for its three set-ups, as data to stand beside ours."""

from __future__ import annotations

from typing import TypedDict


class PaperFigures(TypedDict, total=False):
    """What the tables state; a figure the paper does not give for a set-up is absent."""

    dit_and_projection: str  # parameters, as printed
    total: str  # the same with compressor and decompressor
    macs_compressed_T: float  # "sampling compute", in units of 1e12 multiply-accumulates a sample
    macs_full_T: float  # the same with one latent per token
    global_batch: int  # rows of an optimizer step
    gen_ppl: float
    entropy: float  # nats
    mauve: float
    speed: float  # throughput relative to an autoregressive model without KV cache


PAPER: dict[str, PaperFigures] = {
    "lm1b": {
        "dit_and_projection": "105M",
        "total": "154M",
        "macs_compressed_T": 0.13,
        "macs_full_T": 0.40,
        "global_batch": 6144,
        "gen_ppl": 96.76,
        "entropy": 4.263,
        "mauve": 0.951,
        "speed": 9.13,
    },
    "owt1024": {
        "dit_and_projection": "105M",
        "total": "154M",
        "macs_compressed_T": 1.68,
        "macs_full_T": 3.56,
        "global_batch": 384,
        "gen_ppl": 34.52,
        "entropy": 5.067,
        "mauve": 0.801,
        "speed": 33.49,
    },
    "owt128": {"gen_ppl": 48.00, "entropy": 4.064, "mauve": 0.912},  # row "Base" of the ablations
}


def paper_figures(preset: str) -> PaperFigures:
    """The paper's figures for a preset; empty for the presets that are ours."""
    return PAPER.get(preset, {})
