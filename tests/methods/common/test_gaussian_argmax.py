"""Argmax of a noisy one-hot vector: closed forms, adaptive integration, published tables, and plain draws."""

import math

import pytest
import torch

from jpeg_dlm.methods.common.gaussian_argmax import argmax_probability, gamma_of, survival

# Duo's released tables: ids, gamma, P, alpha; they were looked up at the nearest of 100,000 points, which leaves 2e-5.
RELEASED = [
    (50257, -3.55, 0.945471, 0.945470),
    (50257, -3.0, 0.596244, 0.596236),
    (50257, -2.5, 0.237988, 0.237973),
    (50257, -1.85, 0.049338, 0.049319),
    (30522, -3.5, 0.941705, 0.941703),
    (30522, -3.0, 0.637882, 0.637870),
    (30522, -1.75, 0.048711, 0.048680),
]


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def simpson(f, a, b, tolerance):
    """Adaptive integration, an independent way to the same integral."""
    middle = (a + b) / 2

    def rule(x, y):
        return (y - x) / 6 * (f(x) + 4 * f((x + y) / 2) + f(y))

    whole, halves = rule(a, b), rule(a, middle) + rule(middle, b)
    if abs(whole - halves) < tolerance:
        return halves
    return simpson(f, a, middle, tolerance / 2) + simpson(f, middle, b, tolerance / 2)


def slow_probability(m, ids):
    def integrand(z):
        log_cdf = math.log(0.5 * math.erfc(-z / math.sqrt(2)))
        return math.exp((ids - 1) * log_cdf - (z - m) ** 2 / 2) / math.sqrt(2 * math.pi)

    edges = [m - 9 + i for i in range(19)]
    return sum(simpson(integrand, a, b, 1e-11) for a, b in zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize(("ids", "gamma", "p", "alpha"), RELEASED)
def test_released_tables(ids, gamma, p, alpha):
    got, _ = argmax_probability(torch.exp(-double(gamma) / 2), ids)
    assert got.item() == pytest.approx(p, abs=2e-5)
    assert survival(double(gamma), ids)[0].item() == pytest.approx(alpha, abs=2e-5)


@pytest.mark.parametrize("ids", [3, 512, 50258])
@pytest.mark.parametrize("m", [0.0, 0.7, 2.5, 4.5, 7.0])
def test_adaptive_integration_agrees(ids, m):
    assert argmax_probability(double(m), ids)[0].item() == pytest.approx(slow_probability(m, ids), abs=1e-9)


def test_two_ids_have_a_closed_form():
    m = torch.linspace(0, 6, 25, dtype=torch.float64)
    p, dp = argmax_probability(m, 2)
    assert torch.allclose(p, torch.special.ndtr(m / math.sqrt(2)), atol=1e-13)
    assert torch.allclose(dp, torch.exp(-(m**2) / 4) / math.sqrt(4 * math.pi), atol=1e-13)


@pytest.mark.parametrize("ids", [2, 300, 50258])
def test_without_signal_every_id_is_as_likely_and_alpha_spans_0_to_1(ids):
    assert argmax_probability(double(0.0), ids)[0].item() == pytest.approx(1 / ids, rel=1e-9)
    alpha, slope = survival(torch.linspace(-8, 8, 50), ids)
    assert alpha.dtype == torch.float64 and alpha[0] > 1 - 1e-9 and 0 < alpha[-1] < 0.02
    assert (alpha < 1).all() and (alpha.diff() <= 1e-12).all() and (slope <= 1e-12).all()


@pytest.mark.parametrize("ids", [2, 512, 50258])
def test_the_slope_is_the_derivative(ids):
    gamma = double(-3.5, -2.0, 0.5)
    step = 1e-4
    wanted = (survival(gamma + step, ids)[0] - survival(gamma - step, ids)[0]) / (2 * step)
    assert torch.allclose(survival(gamma, ids)[1], wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("ids", [2, 8, 512, 50258])
def test_gamma_of_is_the_inverse(ids):
    for alpha in (0.945, 0.5, 0.05):
        assert survival(double(gamma_of(alpha, ids)), ids)[0].item() == pytest.approx(alpha, abs=1e-12)


@pytest.mark.parametrize(("ids", "gamma"), [(4, 0.0), (30, -1.5), (200, -2.0)])
def test_draws_of_the_latent_agree(ids, gamma):
    draws = 30_000
    a, s = (torch.sigmoid(x).sqrt() for x in (double(-gamma), double(gamma)))
    w = s * torch.randn(draws, ids, generator=torch.Generator().manual_seed(ids))
    w[:, 1] += a
    found = torch.bincount(w.argmax(-1), minlength=ids)
    alpha = survival(double(gamma), ids)[0].item()
    wanted = torch.full((ids,), (1 - alpha) / ids)
    wanted[1] += alpha
    chi2 = ((found - draws * wanted) ** 2 / (draws * wanted)).sum().item()
    assert chi2 < ids - 1 + 5 * math.sqrt(2 * (ids - 1))
