"""Whether two sets of texts are alike in length: if not, MAUVE on whole texts measures length as well as language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

TEXTS_PER_BIN = 10  # paper: 204 bins for 1,024 + 1,024 texts
ENOUGH = 50  # texts of each kind; with fewer there are so few bins that any two sets overlap


def length_overlap(generated: Sequence[int], real: Sequence[int], bins: int | None = None) -> dict[str, Any]:
    """Histograms over bins of equal frequency in both sets together, and their intersection: 1 is alike, 0 disjoint.

    Many texts of one length make edges coincide; such bins are one bin.
    """
    a, b = np.asarray(generated, float), np.asarray(real, float)
    pooled = np.concatenate([a, b])
    wanted = bins or max(1, len(pooled) // TEXTS_PER_BIN)
    inner = np.unique(np.quantile(pooled, np.linspace(0, 1, wanted + 1)[1:-1], method="higher"))
    inner = inner[inner > pooled.min()]  # below the shortest text is no bin
    counts_a, counts_b = (np.bincount(np.searchsorted(inner, x, side="right"), minlength=len(inner) + 1) for x in (a, b))
    p, q = counts_a / len(a), counts_b / len(b)
    return {
        "overlap": min(1.0, float(np.minimum(p, q).sum())),  # rounding may add a bit
        "enough": min(len(a), len(b)) >= ENOUGH,
        "bins": len(inner) + 1,
        "edges": inner.tolist(),
        "generated": _summary(a) | {"histogram": counts_a.tolist()},
        "real": _summary(b) | {"histogram": counts_b.tolist()},
    }


def _summary(lengths: np.ndarray) -> dict[str, Any]:
    return {
        "texts": len(lengths),
        "median": float(np.median(lengths)),
        "std": float(lengths.std()),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
    }
