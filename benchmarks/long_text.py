"""Tokens per second of texts of 100, 1,000 and 10,000 tokens: blocks with a context window, beside AR with a KV cache.

python benchmarks/run.py long_text              # about two minutes on one core

Networks have the sizes of the preset `captions` at twice its length and random weights, and write one text with one thread.
JPEG-DLM pays the same for every block of 32 tokens: its evaluations, the decoding, and the encoding of the block for the next
one. AR pays for each token, and more the longer the text is. Seconds are of the processor, which other processes disturb less
than the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from jpeg_dlm.config import Config
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.evaluation.table import Table
from jpeg_dlm.methods.base import Batch, Method
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.sampling.long_text import BlockwiseSampler
from jpeg_dlm.util.rng import RowNoise

LENGTHS = (100, 1_000, 10_000)
NO_END = -1  # random weights must not end a text
Prepare = Callable[[int], Callable[[], None]]  # for texts of so many tokens, what writes one


def blocks_of_captions() -> Config:
    """The preset `captions` with blocks of 32 tokens that see the block before."""
    sizes = {"data.token_len": 32, "data.whole": False, "model.latent_len": 8, "model.context_blocks": 1}
    return override(preset("captions"), sizes)


def measure(short: bool = False, config: Config | None = None, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Time one text of each length; `short` leaves out the longest."""
    torch.set_num_threads(1)
    config = override(config or blocks_of_captions(), {"encoder.kind": "random", "encoder.scale": "none"})
    systems = writers(config)
    rows = []
    for length in lengths[: -1 if short else None]:
        for name, prepare in systems.items():
            prepare(min(length, 100))()  # the first text is slower
            write = prepare(length)
            began = time.process_time()
            write()
            seconds = time.process_time() - began
            rows.append({"system": name, "tokens": length, "seconds": seconds, "tokens_per_second": length / seconds})
    speeds = {(row["system"], row["tokens"]): row["tokens_per_second"] for row in rows}
    measured = list(dict.fromkeys(row["tokens"] for row in rows))
    *blocks, ar = systems
    table = Table.of(
        "",
        ["tokens", *(f"{name}, tokens/s" for name in systems)],
        [[f"{n:,}", *(f"{speeds[name, n]:,.0f}" for name in systems)] for n in measured],
    ).markdown()
    return {
        "title": "Long texts",
        "rows": rows,
        "markdown": table,
        "ratios": {f"{name} over {ar}, {n:,} tokens": speeds[name, n] / speeds[ar, n] for name in blocks for n in measured},
    }


def writers(config: Config) -> dict[str, Prepare]:
    """Return the systems; AR is the last."""
    method = build_method(config, build_encoder(config.encoder, config.data.vocab_size)).eval()
    assert isinstance(method, JpegDlm)

    def write(sampler: Any, length: int) -> None:
        encode = lambda rows: method.encode(Batch(rows, torch.ones_like(rows).bool()))  # noqa: E731
        blocks = BlockwiseSampler(method, sampler, encode, NO_END, [[]], length)
        assert len(blocks.tokens()[0]) == length

    own, fast = config.sampler, replace(config.sampler, solver="sde", steps=11)
    return {
        f"JPEG-DLM, {own.evaluations(0)} evaluations": lambda length: partial(write, own, length),
        f"JPEG-DLM, {fast.evaluations(0)} evaluations": lambda length: partial(write, fast, length),
        "AR": lambda length: by_tokens(config, length),
    }


def by_tokens(config: Config, length: int) -> Callable[[], None]:
    """Return AR with a KV cache at the same width, depth and vocabulary; its positions need no weights."""
    ar = for_method(override(config, {"data.token_len": length}), "ar")
    method = build_method(ar).eval()
    assert isinstance(method, Method)

    def write() -> None:
        assert method.sample(ar.sampler, RowNoise(0, [0])).shape == (1, length)

    return write
