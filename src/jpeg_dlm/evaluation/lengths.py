"""Whether two sets of texts are alike in length: if not, MAUVE on whole texts measures length as well as language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

TEXTS_PER_BIN = 10  # paper: 204 bins for 1,024 + 1,024 texts
ENOUGH = 50  # texts of each kind; with fewer there are so few bins that any two sets overlap
SHUFFLES = 1000  # of the labels, for the overlap of alike sets; its mean is then good to a thousandth (measured)


def length_overlap(generated: Sequence[int], real: Sequence[int], bins: int | None = None) -> dict[str, Any]:
    """Histograms over bins of equal frequency in both sets together, and their intersection: 1 is alike, 0 disjoint.

    Many texts of one length make edges coincide; such bins are one bin.
    """
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
    """The mean overlap of two such sets if lengths said nothing: with few texts in a bin, alike sets do not reach 1."""
    a, b = np.asarray(generated, float), np.asarray(real, float)
    inner = _edges(a, b, bins)
    both = _histogram(a, inner) + _histogram(b, inner)
    drawn = np.random.default_rng(seed).multivariate_hypergeometric(both, len(a), SHUFFLES)
    return float(_intersection(drawn, both - drawn).mean())


def length_accuracy(generated: Sequence[int], real: Sequence[int]) -> float:
    """How often the length alone tells a generated from a real text of the same number of each; 0.5 is by guessing.

    The rule is learned on one half of the texts (bins of equal frequency, the more frequent kind in each) and tested on the
    other, then the other way round: on the texts that it was learned from, it would seem to know more than it does.
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
    """Inner edges of bins that hold equally many of both sets together."""
    pooled = np.concatenate([a, b])
    wanted = bins or max(1, len(pooled) // TEXTS_PER_BIN)
    inner = np.unique(np.quantile(pooled, np.linspace(0, 1, wanted + 1)[1:-1], method="higher"))
    return inner[inner > pooled.min()]  # below the shortest text is no bin


def _histogram(lengths: np.ndarray, inner: np.ndarray) -> np.ndarray:
    return np.bincount(np.searchsorted(inner, lengths, side="right"), minlength=len(inner) + 1)


def _intersection(counts_a: np.ndarray, counts_b: np.ndarray) -> np.ndarray:
    """Shared part of two histograms (..., bins) as shares of their own sums."""
    p, q = (counts / counts.sum(-1, keepdims=True) for counts in (counts_a, counts_b))
    return np.minimum(1.0, np.minimum(p, q).sum(-1))  # rounding may add a bit


def _summary(lengths: np.ndarray) -> dict[str, Any]:
    return {
        "texts": len(lengths),
        "median": float(np.median(lengths)),
        "std": float(lengths.std()),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
    }
