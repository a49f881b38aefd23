"""Compares the lengths of two sets of texts: if they differ, MAUVE on whole texts measures length as well as language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

TEXTS_PER_BIN = 10  # paper: 204 bins for 1,024 + 1,024 texts
ENOUGH = 50  # texts of each kind; fewer give so few bins that any two sets overlap
SHUFFLES = 1000  # label permutations for the chance overlap; its mean is then accurate to a thousandth (measured)


def length_overlap(generated: Sequence[int], real: Sequence[int], bins: int | None = None) -> dict[str, Any]:
    """Return histograms over bins of equal pooled frequency, merged where edges coincide, and their intersection."""
    a, b = np.asarray(generated, float), np.asarray(real, float)
    inner = _edges(a, b, bins)
    counts_a, counts_b = (_histogram(x, inner) for x in (a, b))
    return {
        "overlap": float(_intersection(counts_a, counts_b)),
        "enough": min(len(a), len(b)) >= ENOUGH,
        "bins": len(inner) + 1,
        "edges": inner.tolist(),
        "generated": _summary(a) | {"histogram": counts_a.tolist()},
        "real": _summary(b) | {"histogram": counts_b.tolist()},
    }


def chance_overlap(generated: Sequence[int], real: Sequence[int], bins: int | None = None, seed: int = 0) -> float:
    """Return the mean overlap under random labels: with few texts per bin, sets of the same distribution stay below 1."""
    a, b = np.asarray(generated, float), np.asarray(real, float)
    inner = _edges(a, b, bins)
    both = _histogram(a, inner) + _histogram(b, inner)
    drawn = np.random.default_rng(seed).multivariate_hypergeometric(both, len(a), SHUFFLES)
    return float(_intersection(drawn, both - drawn).mean())


def length_accuracy(generated: Sequence[int], real: Sequence[int]) -> float:
    """Return the balanced accuracy of telling generated from real texts by length alone; 0.5 is chance.

    The classifier (the more frequent kind in bins of equal frequency) is fitted on one half of the texts, tested on the other.
    """
    a, b = np.asarray(generated, float), np.asarray(real, float)
    shares = []
    for half in (0, 1):
        learned, tested = (a[half::2], b[half::2]), (a[1 - half :: 2], b[1 - half :: 2])
        if min(map(len, (*learned, *tested))) == 0:
            return 0.5
        inner = _edges(*learned, bins=None)
        p, q = (_histogram(x, inner) / len(x) for x in learned)
        says_generated = np.where(p == q, 0.5, p > q)  # a tie is a guess
        t_a, t_b = (_histogram(x, inner) / len(x) for x in tested)
        shares.append((t_a @ says_generated + t_b @ (1 - says_generated)) / 2)
    return float(np.mean(shares))


def _edges(a: np.ndarray, b: np.ndarray, bins: int | None) -> np.ndarray:
    """Return the inner edges of bins with equally many texts of the pooled sets."""
    pooled = np.concatenate([a, b])
    wanted = bins or max(1, len(pooled) // TEXTS_PER_BIN)
    inner = np.unique(np.quantile(pooled, np.linspace(0, 1, wanted + 1)[1:-1], method="higher"))
    return inner[inner > pooled.min()]  # no empty bin below the shortest text


def _histogram(lengths: np.ndarray, inner: np.ndarray) -> np.ndarray:
    return np.bincount(np.searchsorted(inner, lengths, side="right"), minlength=len(inner) + 1)


def _intersection(counts_a: np.ndarray, counts_b: np.ndarray) -> np.ndarray:
    """Return the intersection of two normalized histograms (..., bins)."""
    p, q = (counts / counts.sum(-1, keepdims=True) for counts in (counts_a, counts_b))
    return np.minimum(1.0, np.minimum(p, q).sum(-1))  # rounding may exceed 1


def _summary(lengths: np.ndarray) -> dict[str, Any]:
    return {
        "texts": len(lengths),
        "median": float(np.median(lengths)),
        "std": float(lengths.std()),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
    }
