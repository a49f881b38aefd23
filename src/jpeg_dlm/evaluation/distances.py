"""Distances between two sets of features (n, H), one row per text, and tests of whether the sets can be told apart.

Shapes: N texts of each set. Real text is always the second set.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.spatial.distance import cdist
from scipy.stats import norm
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from jpeg_dlm.util.rng import derive_seed

PERMUTATIONS = 999
NEIGHBORS = 3  # Kynkäänniemi et al. 2019
FOLDS = 5
TEXTS_PER_COMPONENT, MOST_COMPONENTS = 10, 64  # assumed: enough texts for a covariance and a classifier


class Interval(NamedTuple):
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float


def standardized(real: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    """Return sets in units of real text's deviation, real text last: a few features of a language model are far larger."""
    mean, deviation = real.mean(0), real.std(0)
    deviation[deviation <= 1e-6 * deviation.max(initial=0.0)] = 1.0  # constant features stay as they are
    return [(np.asarray(x, float) - mean) / deviation for x in (*others, real)]


def reduced(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two sets in the principal components of both together, so few that there are enough texts for each."""
    pooled = np.concatenate([x, y])
    count = min(max(2, min(len(x), len(y)) // TEXTS_PER_COMPONENT), MOST_COMPONENTS, pooled.shape[1])
    pca = PCA(count, svd_solver="full").fit(pooled)
    return pca.transform(x), pca.transform(y)


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    """Return the squared Fréchet (Wasserstein-2) distance of the Gaussians with the means and covariances of two sets."""
    a, b = (np.linalg.qr((z - z.mean(0)) / math.sqrt(len(z) - 1))[1] for z in (x, y))
    # The trace of the root of the product of the covariances a'a and b'b is the sum of the singular values of ab'.
    trace = (a**2).sum() + (b**2).sum() - 2 * np.linalg.norm(a @ b.T, "nuc")
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + max(0.0, trace))


def energy_test(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the energy distance of two sets of equal size (as scipy defines it) and the p-value of a permutation test."""
    n, distances = len(x), cdist(pooled := np.concatenate([x, y]), pooled)
    signs = np.repeat([1.0, -1.0], n)
    random = np.random.default_rng(derive_seed(0, "permutations"))
    signs_NP = np.stack([signs, *(random.permutation(signs) for _ in range(PERMUTATIONS))], 1)
    # 2 E|x - y| - E|x - x'| - E|y - y'|: the signs of a pair differ in the first term and agree in the others.
    squares = -(signs_NP * (distances @ signs_NP)).sum(0) / n**2
    as_far = (squares[1:] >= squares[0] - 1e-12).sum()
    return math.sqrt(max(0.0, squares[0])), float((1 + as_far) / (1 + PERMUTATIONS))


def precision_recall(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the share of x within the nearest-neighbor balls of y, and that of y within those of x."""
    shares = []
    for points, centers in ((x, y), (y, x)):
        radii = np.sort(cdist(centers, centers), 1)[:, NEIGHBORS]  # column 0 is the center itself
        shares.append(float((cdist(points, centers) <= radii).any(1).mean()))
    return shares[0], shares[1]


def classifier_auc(x: np.ndarray, y: np.ndarray) -> Interval:
    """Return the cross-validated AUC of a logistic regression that tells two sets apart, and an interval.

    The interval is DeLong's, wider by Nadeau and Bengio's factor (2003) because the folds share texts to train on.

    The folds are runs of texts, not random ones: neighbors may come from one document. Pairs of one fold are compared, because
    scores of different classifiers have different offsets.
    """
    labels = np.repeat([0, 1], [len(x), len(y)])
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    folds = StratifiedKFold(FOLDS)
    scores = cross_val_predict(model, features := np.concatenate([x, y]), labels, cv=folds, method="decision_function")
    for _, test in folds.split(features, labels):
        scores[test] -= scores[test].mean()
    a, b = scores[labels == 0], scores[labels == 1]
    wins = np.asarray((a[:, None] < b) + 0.5 * (a[:, None] == b))
    variance = wins.mean(1).var(ddof=1) / len(a) + wins.mean(0).var(ddof=1) / len(b)
    auc, error = float(wins.mean()), math.sqrt(variance * (1 + FOLDS / (FOLDS - 1)))
    return Interval(auc, max(0.0, auc - 1.96 * error), min(1.0, auc + 1.96 * error))


def nearer(x: np.ndarray, y: np.ndarray, real: np.ndarray) -> tuple[float, float]:
    """Return how much farther x is from real text than y, in squared energy distance, and the p-value of no difference.

    The test is that of Bounliphone et al. 2015, with distances as the kernel.
    """

    def parts(z: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        to_real, among = cdist(z, real), cdist(z, z).sum(1) / (len(z) - 1)
        return float(2 * to_real.mean() - among.mean()), 2 * (to_real.mean(1) - among), 2 * to_real.mean(0)

    (far, of_x, real_x), (near, of_y, real_y) = parts(x), parts(y)
    error = math.sqrt(sum(values.var(ddof=1) / len(values) for values in (of_x, of_y, real_x - real_y)))
    return far - near, float(2 * norm.sf(abs(far - near) / error)) if error else 1.0
