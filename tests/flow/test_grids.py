"""Time grids against numbers of the released sampler and against their definition."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm.flow.grids import make_grid, quantile_grid, random_grid, uniform_grid

MEAN, STD = -1.5, 0.8


def test_quantile_grid_of_four_steps():
    expected = [0, 0.11510830408920063, 0.18242552380635635, 0.27679647391051354, 1]
    assert quantile_grid(4, MEAN, STD).tolist() == pytest.approx(expected, abs=1e-7)


def test_quantile_grid_of_eight_steps():
    expected = [0.0816393, 0.1151083, 0.14742879, 0.18242552, 0.2235515, 0.27679647, 0.35899691]
    assert quantile_grid(8, MEAN, STD)[1:-1].tolist() == pytest.approx(expected, abs=1e-7)


def test_quantile_grids_of_32_and_256_steps():
    grid = quantile_grid(32, MEAN, STD)
    expected = [0.04787123440517927, 0.18242552380635635, 0.4975463931795089]
    assert [grid[1].item(), grid[16].item(), grid[31].item()] == pytest.approx(expected, abs=1e-7)
    assert quantile_grid(256, MEAN, STD)[255].item() == pytest.approx(0.6520480760669418, abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 300), mean=st.floats(-3, 3), std=st.floats(0.1, 2))
def test_quantile_grid_is_the_inverse_of_the_distribution(steps, mean, std):
    grid = quantile_grid(steps, mean, std).tolist()
    assert len(grid) == steps + 1 and grid[0] == 0 and grid[-1] == 1
    normal = NormalDist(mean, std)
    for i in range(1, steps):
        assert grid[i] == pytest.approx(1 / (1 + math.exp(-normal.inv_cdf(i / steps))), abs=1e-6)


def test_random_grid_of_the_released_generator():
    inner = random_grid(8, MEAN, STD, torch.Generator().manual_seed(0))[1:-1].tolist()
    expected = [0.0375781, 0.0679334, 0.0856756, 0.1499819, 0.2355340, 0.2601373, 0.4335938]
    assert inner == pytest.approx(expected, abs=1e-6)


def test_released_lm1b_order_draws_the_noise_and_then_the_grid():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 32, 512, generator=generator)
    assert z[0, 0, :3].tolist() == pytest.approx([-1.1258398, -1.1523602, -0.2505786], abs=1e-6)
    grid = random_grid(32, MEAN, STD, generator)
    assert grid[1:4].tolist() == pytest.approx([0.0278723, 0.0327509, 0.0534408], abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(["uniform", "quantile", "random"]), steps=st.integers(1, 64), seed=st.integers(0, 1000))
def test_every_grid_rises_from_0_to_1(kind, steps, seed):
    grid = make_grid(kind, steps, MEAN, STD, torch.Generator().manual_seed(seed))
    assert grid.shape == (steps + 1,) and grid.dtype == torch.float32
    assert grid[0] == 0 and grid[-1] == 1 and (grid.diff() > 0).all()


def test_uniform_grid():
    assert uniform_grid(4).tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_only_the_random_grid_uses_the_generator():
    for kind, moved in (("uniform", False), ("quantile", False), ("random", True)):
        g = torch.Generator().manual_seed(3)
        make_grid(kind, 8, MEAN, STD, g)
        assert torch.equal(torch.rand(1, generator=g), torch.rand(1, generator=torch.Generator().manual_seed(3))) != moved
