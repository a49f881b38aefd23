"""Distances of features against closed forms and second implementations, and whether the tests keep their promises."""

import math

import numpy as np
import pytest
from scipy.linalg import sqrtm
from scipy.spatial.distance import cdist
from scipy.stats import energy_distance
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from jpeg_dlm.evaluation import distances as d


def normal(n, width, seed, shift=0.0, scale=1.0):
    return np.random.default_rng(seed).normal(size=(n, width)) * scale + shift


def test_frechet_of_gaussians():
    """Of diagonal ones |m1 - m2|^2 + sum (s1 - s2)^2; of any, the formula with a matrix root; 0 of a set and itself."""
    scales, shift = np.array([1.0, 2.0, 0.5]), np.array([1.0, 0.0, -2.0])
    x, y = normal(40_000, 3, 0, shift, scales), normal(40_000, 3, 1)
    assert d.frechet(x, y) == pytest.approx(5 + ((scales - 1) ** 2).sum(), rel=0.03)
    x, y = normal(60, 4, 2) @ normal(4, 4, 3), normal(50, 4, 4)
    a, b = np.cov(x.T), np.cov(y.T)
    want = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a + b - 2 * sqrtm(a @ b).real)
    assert d.frechet(x, y) == pytest.approx(want) and d.frechet(x, x) == pytest.approx(0, abs=1e-9)


def test_energy_distance_equals_scipys():
    x, y = normal(50, 1, 0), normal(50, 1, 1, 0.3, 2.0)
    assert d.energy_test(x, y)[0] == pytest.approx(energy_distance(x[:, 0], y[:, 0]))
    far = d.energy_test(normal(50, 5, 0), normal(50, 5, 1, 1.0))
    assert far[1] == 1 / (1 + d.PERMUTATIONS) and d.energy_test(x, x) == (0.0, 1.0)


def test_the_p_value_of_equal_sets_is_uniform():
    p = [d.energy_test(normal(30, 3, 2 * i), normal(30, 3, 2 * i + 1))[1] for i in range(40)]
    assert 0.35 < np.mean(p) < 0.65 and sum(value < 0.1 for value in p) <= 10


def test_precision_and_recall_by_another_search():
    """Generated text without variety is precise; one that goes everywhere recalls all."""
    x, y = normal(40, 3, 0, 0.5), normal(50, 3, 1)
    wanted = []
    for points, centers in ((x, y), (y, x)):
        radii = NearestNeighbors(n_neighbors=4).fit(centers).kneighbors(centers)[0][:, 3]
        inside = [any(math.dist(p, c) <= r for c, r in zip(centers, radii, strict=True)) for p in points]
        wanted.append(np.mean(inside))
    assert d.precision_recall(x, y) == tuple(pytest.approx(share) for share in wanted)
    narrow, wide = normal(200, 3, 2, 0.0, 0.05), normal(200, 3, 3)
    assert d.precision_recall(narrow, wide) == (pytest.approx(1.0), pytest.approx(0.0, abs=0.05))


def test_auc_of_two_gaussians():
    """The best classifier of N(0, I) and N(shift, I) has AUC Phi(|shift| / sqrt 2); of equal ones the interval holds 0.5."""
    x, y = normal(1500, 4, 0), normal(1500, 4, 1, 0.4)
    found = d.classifier_auc(x, y)
    want = 0.5 * (1 + math.erf(0.8 / 2))
    assert found.low < want < found.high and found.high - found.low < 0.06
    apart = d.classifier_auc(normal(60, 4, 2), normal(60, 4, 3, 9.0))
    assert apart.value == apart.high == 1.0
    equal = [d.classifier_auc(normal(100, 10, 2 * i), normal(100, 10, 2 * i + 1)) for i in range(16)]
    assert sum(auc.low <= 0.5 <= auc.high for auc in equal) >= 14 and abs(np.mean([auc.value for auc in equal]) - 0.5) < 0.05


def test_the_interval_is_that_of_a_bootstrap_times_the_factor_for_folds():
    random = np.random.default_rng(0)
    x, y = normal(120, 2, 0), normal(120, 2, 1, 0.4)
    found = d.classifier_auc(x, y)
    # A line along the shift has the same order as the classifier up to noise.
    a, b = x.sum(1), y.sum(1)
    labels = np.repeat([0, 1], 120)
    draws = [np.concatenate([random.choice(a, 120), random.choice(b, 120)]) for _ in range(100)]
    low, high = np.quantile([roc_auc_score(labels, scores) for scores in draws], [0.025, 0.975])
    assert found.high - found.low == pytest.approx(1.5 * (high - low), rel=0.2)


def test_which_of_two_is_nearer():
    real = normal(150, 6, 0)
    near, far = normal(150, 6, 1, 0.2), normal(150, 6, 2, 1.0)
    more, p = d.nearer(far, near, real)
    assert more > 0 and p < 1e-4 and d.nearer(near, far, real) == (pytest.approx(-more), pytest.approx(p))
    among = lambda z: cdist(z, z).sum() / (150 * 149)  # noqa: E731
    want = 2 * cdist(far, real).mean() - among(far) - 2 * cdist(near, real).mean() + among(near)
    assert more == pytest.approx(want) and d.nearer(near, near, real)[1] == 1.0
    told = [d.nearer(*(normal(60, 4, 3 * i + k, shift) for k, shift in enumerate((0.3, -0.3, 0.0))))[1] for i in range(60)]
    assert sum(p < 0.05 for p in told) <= 9  # equally far on two sides


def test_units_and_components():
    real = normal(200, 5, 0, [0, 9, 0, 0, 0], [1, 100, 0, 1, 1])
    x, y = d.standardized(real, normal(100, 5, 1))
    assert len(x) == 100 and np.allclose(y[:, [0, 1, 3]].std(0), 1) and np.allclose(y[:, 2], 0) and np.isfinite(x).all()
    x, y = d.reduced(normal(300, 90, 0), normal(200, 90, 1))
    assert x.shape == (300, 20) and y.shape == (200, 20)  # a component for ten texts of the smaller set
