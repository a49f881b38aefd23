"""Metrics of texts: perplexity, entropy in nats, repetition, MAUVE, lengths, and overlap with the training text."""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.util.errors import DataError
from jpeg_dlm.util.rng import derive_seed

Aggregate = Literal["corpus", "sequence"]
DEGENERATE_REPETITION = 0.5  # assumed: a text that repeats more than half of its 4-grams is degenerate


@dataclass(frozen=True)
class TextScore:
    """Score of one text; `n_tokens` 0 means it was skipped because it is blank or too short."""

    nll_sum: float
    n_tokens: int
    token_ids: tuple[int, ...]  # the truncated text without the beginning token


def _scored(scores: Sequence[TextScore]) -> list[TextScore]:
    kept = [score for score in scores if score.n_tokens]
    if not kept:
        raise DataError("No text had a token to score: give texts of at least two tokens.")
    return kept


def perplexity(scores: Sequence[TextScore], aggregate: Aggregate = "corpus") -> float:
    """Return exp(total NLL / total tokens), or the mean of the per-text perplexities, which bad texts dominate (SEDD)."""
    kept = _scored(scores)
    if aggregate == "corpus":
        return math.exp(min(700.0, math.fsum(score.nll_sum for score in kept) / sum(score.n_tokens for score in kept)))
    return math.fsum(math.exp(min(700.0, score.nll_sum / score.n_tokens)) for score in kept) / len(kept)


def summary(scores: Sequence[TextScore]) -> dict[str, float]:
    """Return the perplexity of texts with its interval, as results hold it."""
    low, high = perplexity_interval(scores)
    return {"perplexity": perplexity(scores), "low": low, "high": high}


def perplexity_interval(
    scores: Sequence[TextScore], aggregate: Aggregate = "corpus", seed: int = 0, resamples: int = 1000
) -> tuple[float, float]:
    """Return a 95% percentile bootstrap interval of `perplexity` over the scored texts."""
    kept = _scored(scores)
    nll, tokens = np.array([(score.nll_sum, score.n_tokens) for score in kept], float).T
    rows = bootstrap_rows(len(kept), seed, resamples)
    low, high = np.quantile(perplexity_of(nll[rows], tokens[rows], aggregate), [0.025, 0.975])
    return float(low), float(high)


def bootstrap_rows(n: int, seed: int = 0, resamples: int = 1000) -> np.ndarray:
    """Draw the indices (resamples, n) of n texts, with replacement."""
    return np.random.default_rng(derive_seed(seed, "bootstrap")).integers(n, size=(resamples, n))


def perplexity_of(nll: np.ndarray, tokens: np.ndarray, aggregate: Aggregate = "corpus") -> np.ndarray:
    """Return the perplexity over the last axis of the texts that have scored tokens."""
    if aggregate == "corpus":
        return np.exp(np.minimum(700.0, nll.sum(-1) / tokens.sum(-1)))
    each = np.exp(np.minimum(nll / np.maximum(tokens, 1), 700.0))
    return each.mean(-1, where=tokens > 0)


def degenerate_share(ids_per_text: Iterable[Sequence[int]]) -> float:
    """Return the share of texts that repeat more than half of their own 4-grams."""
    rates = [repetition_rate([ids]) for ids in ids_per_text if len(ids) >= 4]
    return sum(rate > DEGENERATE_REPETITION for rate in rates) / len(rates) if rates else 0.0


def unigram_entropy(ids_per_text: Iterable[Sequence[int]]) -> float:
    """Return the mean over texts of the entropy of each text's own token frequencies; blank texts do not count."""
    shares = [[n / len(ids) for n in Counter(ids).values()] for ids in ids_per_text if len(ids)]
    if not shares:
        raise DataError("Entropy needs at least one text that is not blank.")
    return -math.fsum(p * math.log(p) for of_text in shares for p in of_text) / len(shares)


def _ngrams(ids: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def distinct_n(ids_per_text: Iterable[Sequence[Hashable]], n: int) -> float:
    """Return distinct n-grams divided by all n-grams of all texts together; 0 if no text has n tokens."""
    grams = [gram for ids in ids_per_text for gram in _ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def diversity(texts: Sequence[Sequence[Hashable]]) -> float:
    """Return the product of the shares of distinct n-grams for n = 2 to 4, over all texts together."""
    return math.prod(distinct_n(texts, n) for n in (2, 3, 4))


def distinct_share(texts: Sequence[str]) -> float:
    """Return the share of different texts among those that are not blank."""
    kept = [" ".join(words) for text in texts if (words := text.split())]
    return len(set(kept)) / len(kept) if kept else 0.0


def repetition_rate(ids_per_text: Iterable[Sequence[int]], n: int = 4) -> float:
    """Return the mean over texts of the share of n-grams that already occurred earlier in the same text."""
    rates = [1 - len(set(grams)) / len(grams) for ids in ids_per_text if (grams := _ngrams(ids, n))]
    return math.fsum(rates) / len(rates) if rates else 0.0


def shuffle_words(text: str, generator: torch.Generator) -> str:
    """Return the words of a text in random order: the same unigrams without grammar, a baseline for any scorer."""
    words = text.split()
    return " ".join(words[i] for i in torch.randperm(len(words), generator=generator).tolist())


# ---------------------------------------------------------------- MAUVE

# k-means seeds alone change it by 0.004 to 0.019 (measured)
KMEANS_SEEDS = (42, 43, 44, 45, 46)  # 42 is the released one
MauveMode = Literal["auto", "on", "off"]
KMeans = Literal["mean", "first"]  # the value that is reported: the mean over the seeds, or that of the first


def mauve_installed() -> bool:
    """Return True if the optional package is installed, without importing it and its dependencies."""
    return importlib.util.find_spec("mauve") is not None


def mauve_score(
    generated: np.ndarray, real: np.ndarray, seeds: Sequence[int] = KMEANS_SEEDS, kmeans: KMeans = "mean"
) -> dict[str, Any]:
    """Return the MAUVE of two sets of features (n, H), with default options, and its deviation over k-means seeds."""
    import mauve  # pyright: ignore[reportMissingImports] - an extra

    module: Any = sys.modules.get("mauve.compute_mauve")
    if isinstance(getattr(module, "faiss", None), ModuleType):
        # The package makes a cluster per ten texts: do not let it warn that each has less than 39; faiss stays as it is.
        module.faiss = SimpleNamespace(Kmeans=partial(module.faiss.Kmeans, min_points_per_centroid=1))
    scores = [mauve.compute_mauve(p_features=real, q_features=generated, seed=seed, verbose=False) for seed in seeds]
    values = [float(score.mauve) for score in scores]
    return {
        "mauve": statistics.fmean(values) if kmeans == "mean" else values[0],
        "kmeans_sd": statistics.stdev(values) if len(values) > 1 else None,
        "kmeans_seeds": list(seeds),
        "values": values,
        "buckets": int(scores[0].num_buckets),
        "histograms": [scores[0].p_hist.tolist(), scores[0].q_hist.tolist()],  # of real and generated texts, first seed
        "texts": [len(generated), len(real)],
    }


def mauve_of_histograms(real: np.ndarray, generated: np.ndarray) -> float:
    """Return MAUVE of two distributions over clusters, with default options."""
    from mauve import compute_mauve as package  # pyright: ignore[reportMissingImports] - an extra

    module = sys.modules[package.__module__]
    weights = np.linspace(1e-6, 1 - 1e-6, 25)
    x, y = module.get_divergence_curve_for_multinomials(real, generated, weights, 5).T
    area = module.compute_area_under_curve
    return float(area(x[x.argsort()], y[x.argsort()]) + area(y[y.argsort()], x[y.argsort()])) / 2


# ---------------------------------------------------------------- lengths

TEXTS_PER_BIN = 10  # paper: 204 bins for 1,024 + 1,024 texts
ENOUGH = 50  # texts of each kind; fewer give so few bins that any two sets overlap


def length_overlap(generated: Sequence[int], real: Sequence[int], bins: int | None = None) -> dict[str, Any]:
    """Return histograms over bins of equal pooled frequency, merged where edges coincide, and their intersection."""
    sides = {"generated": np.asarray(generated, float), "real": np.asarray(real, float)}
    pooled = np.concatenate([*sides.values()])
    wanted = bins or max(1, len(pooled) // TEXTS_PER_BIN)
    inner = np.unique(np.quantile(pooled, np.linspace(0, 1, wanted + 1)[1:-1], method="higher"))
    inner = inner[inner > pooled.min()]  # no empty bin below the shortest text
    histograms = {
        name: np.bincount(np.searchsorted(inner, lengths, side="right"), minlength=len(inner) + 1)
        for name, lengths in sides.items()
    }
    p, q = (counts / counts.sum() for counts in histograms.values())
    summaries = {
        name: {
            "texts": len(lengths),
            "median": float(np.median(lengths)),
            "std": float(lengths.std()),
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
            "histogram": histograms[name].tolist(),
        }
        for name, lengths in sides.items()
    }
    return {
        "overlap": min(1.0, float(np.minimum(p, q).sum())),  # rounding may exceed 1
        "enough": min(map(len, sides.values())) >= ENOUGH,
        "bins": len(inner) + 1,
        "edges": inner.tolist(),
        **summaries,
    }


# ---------------------------------------------------------------- the training text

MEMORIZED = 4  # words in a row (LD4LG)
MOST_TOKENS = 1 << 22  # of training text to count, evenly spread (assumed: ten seconds, once)
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


def training_rows(train: Blocks) -> torch.Tensor:
    """Return rows evenly spread over a training text, or all of them if it is small."""
    total, count = len(train), max(1, MOST_TOKENS // train.token_len)
    return train.rows(np.arange(total) if count >= total else np.arange(count) * total // count)


def words_of(text: str, whole: bool) -> list[str]:
    """Return the case-folded words of a text; unless it is `whole`, without the first and last, which may be cut."""
    words = WORD.findall(text.casefold())
    return words if whole else words[1:-1]


def _gram_hashes(texts: Iterable[Sequence[str]]) -> np.ndarray:
    """Return the hashes of the different 4-grams of texts: of all memory they take, the words would take the most."""
    return np.unique(np.fromiter((hash(gram) for words in texts for gram in _ngrams(words, MEMORIZED)), np.int64))


@cache
def training_text(folder: Path) -> TrainingTextStats:
    """Return the statistics of a prepared folder, which take some seconds."""
    train = Blocks(folder, "train")
    return TrainingTextStats(train, train.tokenizer())


class TrainingTextStats:
    """The words and rows of a training text; rows of padded text are whole texts."""

    def __init__(self, train: Blocks, tokenizer: TextTokenizer) -> None:
        self.tokenizer, self.token_len = tokenizer, train.token_len
        self.padded: bool = train.index["padded"]
        self.border = np.array([train.vocab_size] if self.padded else [], np.int64)
        rows = list(training_rows(train).numpy())
        if self.padded:  # each ends after its first end token
            end = tokenizer.eos_id
            rows = [row[: int(np.argmax(row == end)) + 1] if (row == end).any() else row for row in rows]
        words = [self.words(row) for row in rows]
        self.known = {word for of_row in words for word in of_row}
        self.grams = _gram_hashes(words)
        self.stream = self._joined(rows)

    def words(self, row: np.ndarray) -> list[str]:
        return words_of(self.tokenizer.decode(row.tolist()), whole=self.padded)

    def measure(self, rows: Sequence[np.ndarray]) -> dict[str, float]:
        """Return the shares of known words, of distinct word pairs and of copied rows; each row is cut after its end."""
        texts = [self.words(row) for row in rows]
        words = [word for text in texts for word in text]
        return {
            "words": sum(word in self.known for word in words) / max(1, len(words)),
            "distinct": distinct_n(texts, 2),  # falls with the number of rows
            "copied": sum(map(self.has, rows)) / len(rows),
        }

    def rows_of(self, ids_per_text: Iterable[Sequence[int]]) -> list[np.ndarray]:
        """Return texts as rows: with an end where texts end, and no longer than a row."""
        end = [self.tokenizer.eos_id] if self.padded else []
        return [np.array([*ids, *end][: self.token_len]) for ids in ids_per_text if len(ids)]

    def memorized(self, texts: Sequence[Sequence[str]]) -> float:
        """Return the share of the 4-grams of texts, given as words, that the training text has too."""
        grams = [hash(gram) for words in texts for gram in _ngrams(words, MEMORIZED)]
        return float(np.isin(grams, self.grams).mean()) if grams else 0.0

    def _joined(self, rows: Sequence[np.ndarray]) -> bytes:
        """Join rows into one byte string; if rows are whole texts, with separators."""
        return np.concatenate([self.border, *(p for row in rows for p in (row, self.border))]).astype("<u4").tobytes()

    def has(self, row: np.ndarray) -> bool:
        """Return True if the training text contains a row, as a whole text if rows are whole texts."""
        wanted, place = self._joined([row]), -1
        while (place := self.stream.find(wanted, place + 1)) % 4 and place >= 0:
            pass  # a match that is not aligned to a token
        return place >= 0
