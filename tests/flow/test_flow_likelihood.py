"""The likelihood of the probability-flow ODE against closed forms: a Gaussian, a mixture of points, and traces."""

from itertools import product

import pytest
import torch
from scipy.stats import multivariate_normal
from torch.autograd.functional import jacobian

from jpeg_dlm.flow.likelihood import code_nats, prediction_and_trace, signal_grid, to_noise

SIGNS = torch.tensor(list(product([-1.0, 1.0], repeat=3)), dtype=torch.float64)  # all there are: their mean has no error
MU = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
ROOT = torch.tensor([[1.2, 0, 0], [0.5, 0.7, 0], [-0.3, 0.2, 0.1]], dtype=torch.float64)  # one direction is thin
SIGMA = ROOT @ ROOT.T


def gaussian_denoiser(y, r):
    """E[x | r x + eps = y] of x ~ N(MU, SIGMA)."""
    gain = r * SIGMA @ torch.linalg.inv(r * r * SIGMA + torch.eye(3, dtype=torch.float64))
    return MU + (y - r * MU) @ gain.T


@pytest.mark.parametrize("last", [0.5, 4.0, 20.0])
def test_the_density_of_a_gaussian_is_its_closed_form(last):
    y = last * MU + torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * last
    y_0, trace_B = to_noise(gaussian_denoiser, y.expand(8, 3), signal_grid(24, last), SIGNS)
    found = multivariate_normal(torch.zeros(3)).logpdf(y_0[0].numpy()) - trace_B.mean()
    want = multivariate_normal((last * MU).numpy(), (last**2 * SIGMA + torch.eye(3)).numpy()).logpdf(y.numpy())
    assert float(found) == pytest.approx(want, abs=5e-3)  # the grid begins at 1e-3, not at 0


def test_hutchinsons_estimate_of_the_trace_is_unbiased():
    def field(y, r):
        return torch.tanh(y @ ROOT) * y.roll(1, -1) * r

    y = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    x, trace_B = prediction_and_trace(field, y.expand(8, 3), 0.7, SIGNS)
    want = jacobian(lambda v: field(v, 0.7), y[0]).trace()
    torch.testing.assert_close(trace_B.mean(), want)
    assert trace_B.std() > 0.1 and torch.equal(x[0], field(y, 0.7)[0])


def test_the_bound_of_a_perfect_model_of_tokens_is_their_probability():
    """By Bayes' rule log q(y | s) - log p(y) - log p(s | y) is -log p(s) for every y, if denoiser and decoder are perfect."""
    points, p = torch.tensor([-1.5, -0.2, 0.4, 2.0]).double(), torch.tensor([0.5, 0.2, 0.05, 0.25]).double()

    def posterior(y, r):
        return (p.log() - (y - r * points) ** 2 / 2).log_softmax(-1)  # (B, 4)

    def denoiser(y, r):
        return (posterior(y, r).exp() * points).sum(-1, keepdim=True)

    tokens = torch.arange(4).repeat(5)
    eps = torch.randn(20, 1, generator=torch.Generator().manual_seed(0)).double()
    y, nats_B = code_nats(denoiser, points[tokens, None], eps, torch.ones(20, 1).double(), signal_grid(24, 4.0))
    nats_B -= posterior(y, 4.0)[torch.arange(20), tokens]
    torch.testing.assert_close(nats_B, -p[tokens].log(), atol=2e-3, rtol=0)


def test_what_is_given_costs_nothing():
    x, eps = torch.randn(2, 4, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    given = torch.zeros(4, 3, 1, dtype=torch.bool)
    given[:, 1:] = True
    ends = []

    def denoiser(y, r):
        ends.append(y)
        return torch.tanh(y.cumsum(1))

    y, nats_B = code_nats(denoiser, x, eps, torch.ones_like(x), signal_grid(8, 2.0), given)
    torch.testing.assert_close(ends[-1][:, 1:], eps[:, 1:], atol=1e-2, rtol=0)  # it returns to its own noise
    x, eps = x[:, :1], eps[:, :1]
    _, alone_B = code_nats(lambda y, r: torch.tanh(y), x, eps, torch.ones_like(x), signal_grid(8, 2.0))
    torch.testing.assert_close(nats_B, alone_B)
