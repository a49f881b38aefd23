"""Likelihood of text under a model itself: of held-out rows, or of all of any text. Shapes: B rows, L tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jpeg_dlm import __version__
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.metrics import TextScore, perplexity, perplexity_interval
from jpeg_dlm.evaluation.texts import ModelSource, batches
from jpeg_dlm.methods.base import Method
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import batch_of
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import shared
from jpeg_dlm.util.errors import DataError
from jpeg_dlm.util.rng import RowNoise

DRAWS = 8  # random times per row
ROWS_PER_CHUNK = 4096  # rows whose tokens are counted at once

Progress = Callable[[int, int | None], None]


def has_likelihood(method: Method) -> bool:
    """Return True if a method implements `likelihood`."""
    return type(method).likelihood is not Method.likelihood


def likelihood_row(
    source: ModelSource, cache: DiskCache, console: Console, n: int | None, draws: int, seed: int
) -> dict[str, Any]:
    """Return the likelihood of a model's held-out text and the model's identity, or the reason why there is none."""
    model, method = source.model, source.model.method
    about = {
        "name": source.name,
        "method": model.config.method,
        "title": method.title,
        "checkpoint_sha256": source.sha256,
        "tokenizer": model.tokenizer.fingerprint,
    }
    if not has_likelihood(method):
        return about | {"kind": None, "reason": f"{method.title} gives no likelihood: score its text instead."}

    def compute() -> dict[str, Any]:
        with console.progress(f"Likelihood under {source.name}", "rows") as progress:
            return heldout_likelihood(source, n, draws, seed, progress)

    depends = about | {"kind": "likelihood", "version": __version__, "n": n, "draws": draws, "seed": seed}
    depends |= {"batch": source.batch, "heldout": source.blocks.fingerprint}
    return about | cache.get_or_compute(f"likelihood-{source.name}", depends, compute)


def heldout_likelihood(
    source: ModelSource, n: int | None = None, draws: int = DRAWS, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the perplexity of the first `n` held-out rows (None: all) with a 95% bootstrap interval over rows."""
    heldout, model = source.blocks, source.model
    n = min(n or len(heldout), len(heldout))
    method = model.complete_method()
    draws = 1 if method.exact_likelihood else draws
    nats, tokens = row_nats(method, heldout, n, draws, seed, source.batch, progress)
    scores = [TextScore(float(a), int(b), ()) for a, b in zip(nats, tokens, strict=True)]
    low, high = perplexity_interval(scores, seed=seed)
    rows = heldout.rows(range(n))
    characters = sum(map(len, model.to_text(rows)))
    return {
        "kind": "exact" if method.exact_likelihood else "bound",
        "perplexity": perplexity(scores),
        "perplexity_low": low,
        "perplexity_high": high,
        "nats_per_token": float(nats.sum() / tokens.sum()),
        "bits_per_character": float(nats.sum()) / math.log(2) / characters if characters else None,
        "unigram_perplexity": unigram_perplexity(heldout, n),
        "rows": n,
        "tokens": int(tokens.sum()),
        "characters": characters,
        "draws": draws,
        "seed": seed,
        "heldout": heldout.fingerprint,
    }


@torch.no_grad()
def row_nats(
    method: Method, blocks: Blocks, n: int, draws: int, seed: int, batch: int, progress: Progress | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return nats and token counts of the first n rows; the nats are means over `draws` random times.

    Draw d of row i is example `draws * i + d` of batches of `draws`, so that a method that stratifies its times draws one time
    in each of `draws` equal intervals for every row.
    """
    device = method.device

    def score(rows: range) -> tuple[np.ndarray, np.ndarray]:
        nats, tokens = np.zeros(len(rows)), np.zeros(len(rows))
        examples = batch_of(blocks, rows, device, joined=method.sources == "before")
        for draw in range(draws):
            noise = RowNoise(seed, [draws * row + draw for row in rows], 0, device, draws)
            likelihood = method.likelihood(examples, noise)
            if likelihood is None:
                raise DataError(f"{method.title} gives no likelihood: score its text instead.")
            nats += likelihood.nats_B.double().cpu().numpy() / draws
            tokens = likelihood.tokens_B.cpu().numpy()
        if progress is not None:
            progress(rows.stop, n)
        return nats, tokens

    nats, tokens = zip(*shared(batches(n, batch), score), strict=True)
    return np.concatenate(nats), np.concatenate(tokens).astype(float)


def unigram_perplexity(heldout: Blocks, n: int) -> float:
    """Return the perplexity of the first n held-out rows under the training split's token counts plus one."""
    counts = token_counts(Blocks(heldout.folder, "train")) + 1
    seen = token_counts(heldout, n)
    return math.exp(-float(seen @ np.log(counts / counts.sum())) / seen.sum())


def token_counts(blocks: Blocks, n: int | None = None) -> np.ndarray:
    """Count each token id in the first n rows (None: all), without padding."""
    counts = np.zeros(blocks.vocab_size, np.int64)
    n = len(blocks) if n is None else n
    for start in range(0, n, ROWS_PER_CHUNK):
        tokens_BL = blocks.rows(range(start, min(start + ROWS_PER_CHUNK, n)))
        mask_BL = blocks.mask(tokens_BL)
        real = tokens_BL.flatten() if mask_BL is None else tokens_BL[mask_BL]
        counts += np.bincount(real.numpy(), minlength=blocks.vocab_size)
    return counts
