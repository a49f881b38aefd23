"""The probability path, its times, and the self-conditioning target."""

import math
from statistics import NormalDist

import pytest
import torch

from jpeg_dlm.flow.path import guidance_scale, guided_target, interpolate, logit_normal, per_row

MEAN, STD = -1.5, 0.8


def test_the_path_runs_from_noise_to_data_in_a_straight_line():
    z_1, eps = torch.randn(5, 3, 2), torch.randn(5, 3, 2)
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    z_t = interpolate(z_1, eps, t)
    assert torch.equal(z_t[0], eps[0]) and torch.equal(z_t[4], z_1[4])
    for i in range(5):
        assert torch.allclose(z_t[i], eps[i] + t[i] * (z_1[i] - eps[i]), atol=1e-6)


def test_per_row_has_one_number_for_each_row():
    assert per_row(torch.arange(3.0), torch.zeros(3, 4, 5)).shape == (3, 1, 1)
    assert per_row(torch.arange(3.0), torch.zeros(3)).shape == (3,)


def test_the_time_distribution():
    # Even quantile levels are a quadrature of the expectation: mean .209141, median .182426, P(t > .5) .030396.
    n = 20_001
    levels = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    t = logit_normal(torch.special.ndtri(levels), MEAN, STD)
    assert t.mean().item() == pytest.approx(0.209141, abs=2e-6)
    assert t.median().item() == pytest.approx(0.182426, abs=1e-6)
    assert (t > 0.5).double().mean().item() == pytest.approx(0.030396, abs=1e-4)
    assert 1 - NormalDist(MEAN, STD).cdf(0) == pytest.approx(0.030396, abs=1e-6)


def test_the_time_distribution_favors_noise():
    # P(noise level 1 - t over .7) = P(t < .3) = .79271.
    assert NormalDist(MEAN, STD).cdf(math.log(0.3 / 0.7)) == pytest.approx(0.79271, abs=1e-5)
    n = 20_001
    t = logit_normal(torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n), MEAN, STD)
    assert (t < 0.3).double().mean().item() == pytest.approx(0.79271, abs=1e-4)


def test_guidance_scales_are_those_of_elf():
    u = torch.tensor([0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    w = guidance_scale(u, 0.5, 5.0)
    assert w.tolist() == pytest.approx([0.5, 1.12132, 2, 3.242641, 5], abs=1e-6)
    assert torch.allclose(w, 1.5 * 4**u - 1)


def test_guidance_scales_of_another_range():
    u = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    w = guidance_scale(u, 1.0, 3.0)
    assert w.min() >= 1 and w.max() <= 3
    assert guidance_scale(torch.tensor([0.0, 1.0]), 2.0, 2.0).tolist() == [2, 2]


@pytest.mark.parametrize(("w", "expected"), [(3.0, 0.6), (0.5, 0.1), (1.0, 0.4)])
def test_the_self_conditioning_target(w, expected):
    # z_tgt .4, second prediction .9, first .6
    args = [torch.full((1, 1, 1), v) for v in (0.4, 0.9, 0.6)]
    assert guided_target(*args, torch.tensor([w])).item() == pytest.approx(expected, abs=1e-6)


def test_the_self_conditioning_target_takes_one_scale_per_row():
    z, second, first = torch.randn(3, 2, 2), torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    w = torch.tensor([1.0, 2.0, 4.0])
    target = guided_target(z, second, first, w)
    assert torch.equal(target[0], z[0])
    assert torch.allclose(target[1], z[1] + 0.5 * (second[1] - first[1]))
    assert torch.allclose(target[2], z[2] + 0.75 * (second[2] - first[2]))
