"""The probability path, its times, the self-conditioning target, and grids of times against the released sampler."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm.flow.path import guided_target, interpolate, logit_normal, make_grid

MEAN, STD = -1.5, 0.8


def test_the_path_runs_from_noise_to_data_in_a_straight_line():
    z_1, eps = torch.randn(5, 3, 2), torch.randn(5, 3, 2)
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    z_t = interpolate(z_1, eps, t)
    assert torch.equal(z_t[0], eps[0]) and torch.equal(z_t[4], z_1[4])
    for i in range(5):
        assert torch.allclose(z_t[i], eps[i] + t[i] * (z_1[i] - eps[i]), atol=1e-6)


def test_the_time_distribution():
    # Even quantile levels are a quadrature of the expectation: mean .209141, median .182426, P(t > .5) .030396.
    n = 20_001
    levels = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    t = logit_normal(torch.special.ndtri(levels), MEAN, STD)
    assert t.mean().item() == pytest.approx(0.209141, abs=2e-6)
    assert t.median().item() == pytest.approx(0.182426, abs=1e-6)
    assert (t > 0.5).double().mean().item() == pytest.approx(0.030396, abs=1e-4)
    assert 1 - NormalDist(MEAN, STD).cdf(0) == pytest.approx(0.030396, abs=1e-6)


@pytest.mark.parametrize(("w", "expected"), [(3.0, 0.6), (0.5, 0.1), (1.0, 0.4)])
def test_the_self_conditioning_target(w, expected):
    # z_tgt .4, second prediction .9, first .6
    args = [torch.full((1, 1, 1), v) for v in (0.4, 0.9, 0.6)]
    assert guided_target(*args, torch.tensor([w])).item() == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------- grids


def test_quantile_grids_of_32_and_256_steps():
    grid = make_grid("quantile", 32, MEAN, STD, torch.Generator())
    expected = [0.04787123440517927, 0.18242552380635635, 0.4975463931795089]
    assert [grid[1].item(), grid[16].item(), grid[31].item()] == pytest.approx(expected, abs=1e-7)
    assert make_grid("quantile", 256, MEAN, STD, torch.Generator())[255].item() == pytest.approx(0.6520480760669418, abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 300), mean=st.floats(-3, 3), std=st.floats(0.1, 2))
def test_quantile_grid_is_the_inverse_of_the_distribution(steps, mean, std):
    grid = make_grid("quantile", steps, mean, std, torch.Generator()).tolist()
    assert len(grid) == steps + 1 and grid[0] == 0 and grid[-1] == 1
    normal = NormalDist(mean, std)
    for i in range(1, steps):
        assert grid[i] == pytest.approx(1 / (1 + math.exp(-normal.inv_cdf(i / steps))), abs=1e-6)


def test_random_grid_of_the_released_generator():
    inner = make_grid("random", 8, MEAN, STD, torch.Generator().manual_seed(0))[1:-1].tolist()
    expected = [0.0375781, 0.0679334, 0.0856756, 0.1499819, 0.2355340, 0.2601373, 0.4335938]
    assert inner == pytest.approx(expected, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(["uniform", "quantile", "random"]), steps=st.integers(1, 64), seed=st.integers(0, 1000))
def test_every_grid_rises_from_0_to_1(kind, steps, seed):
    grid = make_grid(kind, steps, MEAN, STD, torch.Generator().manual_seed(seed))
    assert grid.shape == (steps + 1,) and grid.dtype == torch.float32
    assert grid[0] == 0 and grid[-1] == 1 and (grid.diff() > 0).all()
