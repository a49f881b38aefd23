"""Argmax of a noisy one-hot vector: closed forms, dense integration, published tables, plain draws, and FLM's time map."""

import math

import pytest
import torch

from jpeg_dlm.methods.argmax_noise import TimeMap, argmax_probability, decodable_share, gamma_of, survival

# Duo's released tables: ids, gamma, P, alpha; they were looked up at the nearest of 100,000 points, which leaves 2e-5.
RELEASED = [
    (50257, -3.55, 0.945471, 0.945470),
    (50257, -2.5, 0.237988, 0.237973),
    (50257, -1.85, 0.049338, 0.049319),
    (30522, -3.5, 0.941705, 0.941703),
    (30522, -1.75, 0.048711, 0.048680),
]


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def dense_probability(m: float, ids: int) -> float:
    """The definition by a trapezoid rule so fine that its error is beyond float64."""
    y = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    phi = torch.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
    return torch.trapezoid(phi * (0.5 * torch.erfc(-(y + m) / math.sqrt(2))) ** (ids - 1), y).item()


@pytest.mark.parametrize(("ids", "gamma", "p", "alpha"), RELEASED)
def test_released_tables(ids, gamma, p, alpha):
    assert argmax_probability(torch.exp(-double(gamma) / 2), ids)[0].item() == pytest.approx(p, abs=2e-5)
    assert survival(double(gamma), ids)[0].item() == pytest.approx(alpha, abs=2e-5)


@pytest.mark.parametrize("ids", [2, 40, 512, 50_258])
def test_dense_integration_agrees(ids):
    m = double(0.0, 0.7, 2.5, 4.5, 7.0)
    assert argmax_probability(m, ids)[0].tolist() == pytest.approx([dense_probability(x, ids) for x in m.tolist()], abs=1e-10)


def test_two_ids_have_a_closed_form():
    m = torch.linspace(0, 6, 25, dtype=torch.float64)
    p, dp = argmax_probability(m, 2)
    assert torch.allclose(p, torch.special.ndtr(m / math.sqrt(2)), atol=1e-13)
    assert torch.allclose(dp, torch.exp(-(m**2) / 4) / math.sqrt(4 * math.pi), atol=1e-13)


@pytest.mark.parametrize("ids", [2, 512, 50258])
def test_alpha_spans_0_to_1_with_its_slope_and_its_inverse(ids):
    assert argmax_probability(double(0.0), ids)[0].item() == pytest.approx(1 / ids, rel=1e-9)
    alpha, slope = survival(torch.linspace(-8, 8, 50), ids)
    assert alpha.dtype == torch.float64 and alpha[0] > 1 - 1e-9 and 0 < alpha[-1] < 0.02
    assert (alpha < 1).all() and (alpha.diff() <= 1e-12).all() and (slope <= 1e-12).all()
    gamma, step = double(-3.5, -2.0, 0.5), 1e-4
    difference = (survival(gamma + step, ids)[0] - survival(gamma - step, ids)[0]) / (2 * step)
    assert torch.allclose(survival(gamma, ids)[1], difference, rtol=1e-6, atol=1e-12)
    for alpha in (0.945, 0.5, 0.05):
        assert survival(double(gamma_of(alpha, ids)), ids)[0].item() == pytest.approx(alpha, abs=1e-12)


@pytest.mark.parametrize("vocab", [2, 512, 50_257])
def test_the_time_map_is_the_inverse_of_the_decodable_share(vocab):
    gamma = torch.linspace(0, 1, 2001, dtype=torch.float64)
    share = decodable_share(gamma, vocab)
    assert share[0] == 0 and share[-1].item() == pytest.approx(1, abs=1e-12) and (share.diff() > -1e-14).all()
    q = dense_probability(0.6 / 0.4, vocab)
    assert decodable_share(double(0.6), vocab).item() == pytest.approx(vocab / (vocab - 1) * (q - 1 / vocab), abs=1e-10)
    times, tau = TimeMap(vocab), torch.linspace(0, 1, 1001, dtype=torch.float64)
    gamma = times(tau)
    assert gamma[0] == 0 and gamma[-1] == 1 and gamma.dtype == torch.float64 and (gamma.diff() > 0).all()
    assert decodable_share(gamma[:-1], vocab).tolist() == pytest.approx(tau[:-1].tolist(), abs=1e-5)
    assert times(torch.tensor([[0.25, 0.5]])).shape == (1, 2) and not times.state_dict()
