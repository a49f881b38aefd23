"""MAUVE by the package `mauve-text`, over several k-means seeds, which alone change it by 0.004 to 0.019 (measured)."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jpeg_dlm.errors import MissingPackageError

KMEANS_SEEDS = (42, 43, 44, 45, 46)  # 42 is the released one
KMeans = Literal["mean", "first"]  # the value that is reported: the mean over the seeds, or that of the first
FEWEST = 100  # texts of each kind; the package makes a cluster per ten texts, and fewer than ten clusters are too coarse


def mauve_installed() -> bool:
    """Return True if the optional package is installed, without importing it and its dependencies."""
    return importlib.util.find_spec("mauve") is not None


def too_few(generated: int, real: int) -> str | None:
    """Return the reason if there are too few texts for MAUVE, else None."""
    if min(generated, real) >= FEWEST:
        return None
    return f"MAUVE needs at least {FEWEST} texts of both kinds, not {generated} generated and {real} real"


@contextlib.contextmanager
def _few_points_are_fine() -> Iterator[None]:
    """Keep faiss from warning on standard error that clusters have less than 39 points: the package makes one per ten texts."""
    faiss: Any = sys.modules.get("faiss")  # imported by the package
    if faiss is None:
        yield
        return
    kmeans = faiss.Kmeans
    faiss.Kmeans = functools.partial(kmeans, min_points_per_centroid=1)
    try:
        yield
    finally:
        faiss.Kmeans = kmeans


def mauve_score(
    generated: np.ndarray, real: np.ndarray, seeds: Sequence[int] = KMEANS_SEEDS, kmeans: KMeans = "mean"
) -> dict[str, Any]:
    """Return the MAUVE of two sets of features (n, H), with default options, and its deviation over k-means seeds."""
    try:
        import mauve  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise MissingPackageError("mauve-text", "eval", "MAUVE") from error
    with _few_points_are_fine():
        found = [mauve.compute_mauve(p_features=real, q_features=generated, seed=seed, verbose=False) for seed in seeds]
    values = [float(one.mauve) for one in found]
    return {
        "mauve": statistics.fmean(values) if kmeans == "mean" else values[0],
        "kmeans_sd": statistics.stdev(values) if len(values) > 1 else None,
        "kmeans_seeds": list(seeds),
        "values": values,
        "buckets": int(found[0].num_buckets),
        "texts": [len(generated), len(real)],
    }
