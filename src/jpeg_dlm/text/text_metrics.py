"""Metrics of texts as pure functions of scores and token ids of the scorer; entropy is in nats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from jpeg_dlm.errors import DataError
from jpeg_dlm.rng import derive_seed

Aggregate = Literal["corpus", "sequence"]
DEGENERATE_REPETITION = 0.5  # assumed: a text that repeats more than half of its 4-grams is degenerate


@dataclass(frozen=True)
class TextScore:
    """Score of one text; `n_tokens` 0 means it was skipped because it is blank or too short."""

    nll_sum: float
    n_tokens: int
    token_ids: tuple[int, ...]  # the truncated text without the beginning token

    @property
    def skipped(self) -> bool:
        """True if the text had no token to score."""
        return self.n_tokens == 0


def perplexity(scores: Sequence[TextScore], aggregate: Aggregate = "corpus") -> float:
    """Return exp(total NLL / total tokens), or the mean of the per-text perplexities, which bad texts dominate (SEDD)."""
    kept = [score for score in scores if not score.skipped]
    if not kept:
        raise DataError("No text had a token to score: give texts of at least two tokens.")
    if aggregate == "corpus":
        return math.exp(min(700.0, math.fsum(score.nll_sum for score in kept) / sum(score.n_tokens for score in kept)))
    return math.fsum(math.exp(min(700.0, score.nll_sum / score.n_tokens)) for score in kept) / len(kept)


def summary(scores: Sequence[TextScore]) -> dict[str, float]:
    """Return the perplexity of texts with its interval, as results hold it."""
    low, high = perplexity_interval(scores)
    return {"perplexity": perplexity(scores), "low": low, "high": high}


def perplexity_interval(
    scores: Sequence[TextScore], aggregate: Aggregate = "corpus", seed: int = 0, resamples: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Return a percentile bootstrap interval of `perplexity` over the scored texts."""
    kept = [score for score in scores if not score.skipped]
    if not kept:
        raise DataError("A bootstrap interval needs at least one text.")
    nll = np.array([score.nll_sum for score in kept])
    tokens = np.array([score.n_tokens for score in kept], float)
    random = np.random.default_rng(derive_seed(seed, "bootstrap"))
    values = []
    for _ in range(resamples):
        rows = random.integers(len(kept), size=len(kept))
        if aggregate == "corpus":
            values.append(math.exp(min(700.0, nll[rows].sum() / tokens[rows].sum())))
        else:
            values.append(float(np.exp(np.minimum(nll[rows] / tokens[rows], 700.0)).mean()))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def degenerate_share(ids_per_text: Iterable[Sequence[int]], n: int = 4) -> float:
    """Return the share of texts that repeat more than half of their own n-grams."""
    rates = [repetition_rate([ids], n) for ids in ids_per_text if len(ids) >= n]
    return sum(rate > DEGENERATE_REPETITION for rate in rates) / len(rates) if rates else 0.0


def unigram_entropy(ids_per_text: Iterable[Sequence[int]]) -> float:
    """Return the mean over texts of the entropy of each text's own token frequencies; blank texts do not count."""
    entropies = [_entropy(ids) for ids in ids_per_text if len(ids)]
    if not entropies:
        raise DataError("Entropy needs at least one text that is not blank.")
    return math.fsum(entropies) / len(entropies)


def _entropy(ids: Sequence[int]) -> float:
    total = len(ids)
    return -math.fsum(n / total * math.log(n / total) for n in Counter(ids).values())


def _ngrams(ids: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def distinct_n(ids_per_text: Iterable[Sequence[Hashable]], n: int) -> float:
    """Return distinct n-grams divided by all n-grams of all texts together; 0 if no text has n tokens."""
    grams = [gram for ids in ids_per_text for gram in _ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition_rate(ids_per_text: Iterable[Sequence[int]], n: int = 4) -> float:
    """Return the mean over texts of the share of n-grams that already occurred earlier in the same text."""
    rates = []
    for ids in ids_per_text:
        grams = _ngrams(ids, n)
        if grams:
            rates.append(1 - len(set(grams)) / len(grams))
    return math.fsum(rates) / len(rates) if rates else 0.0


def shuffle_words(text: str, generator: torch.Generator) -> str:
    """Return the words of a text in random order: the same unigrams without grammar, a baseline for any scorer."""
    words = text.split()
    return " ".join(words[i] for i in torch.randperm(len(words), generator=generator).tolist())
