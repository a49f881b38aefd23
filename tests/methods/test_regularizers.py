"""SIGReg and variance and covariance terms against LeJEPA's and VICReg's numbers, and against slow second versions."""

import math

import pytest
import torch

from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmObjective
from jpeg_dlm.methods.regularizers import epps_pulley, latent_regularizers, sigreg, unit_directions, variance_covariance
from jpeg_dlm.util.rng import RowNoise


def waves():
    """The 16 x 4 matrix on which upstream's numbers below were taken."""
    return (1.2 * torch.sin(0.37 * torch.arange(64, dtype=torch.float32))).view(16, 4)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def column(values):
    return torch.as_tensor(values, dtype=torch.float32)[:, None]


# ---------------------------------------------------------------- Epps-Pulley


@pytest.mark.parametrize(
    ("sample", "expected"),
    [([-1.5, -0.5, 0, 0.5, 1.5], 0.0233268943), ([0.0] * 5, 2.01023793), ([0.0] * 100, 40.2047577)],
)
def test_statistic_of_small_samples(sample, expected):
    assert epps_pulley(column(sample)).item() == pytest.approx(expected, rel=1e-5)


def slow_statistic(sample, t_max=3.0, intervals=32):
    """B times the trapezoid rule for |phi_hat - phi|^2 phi over all of [-t_max, t_max], in plain Python."""
    total = 0.0
    for i in range(intervals + 1):
        t = -t_max + 2 * t_max * i / intervals
        real = sum(math.cos(t * y) for y in sample) / len(sample)
        imag = sum(math.sin(t * y) for y in sample) / len(sample)
        phi = math.exp(-t * t / 2)
        weight = 0.5 if i in (0, intervals) else 1.0
        total += weight * phi * ((real - phi) ** 2 + imag**2)
    return len(sample) * total * 2 * t_max / intervals


@pytest.mark.parametrize("seed", [0, 1])
def test_folding_onto_the_half_line_is_exact(seed):
    sample = torch.randn(9, generator=seeded(seed)) * 1.3 + 0.4
    assert epps_pulley(sample[:, None]).item() == pytest.approx(slow_statistic(sample.tolist()), rel=1e-5)


def quadrature(knots=17, t_max=3.0):
    dt = t_max / (knots - 1)
    return [((1 if k in (0, knots - 1) else 2) * dt, math.exp(-((k * dt) ** 2) / 2)) for k in range(knots)]


def test_expectation_under_the_normal_law():
    expected = sum(w * phi * (1 - phi**2) for w, phi in quadrature())
    assert expected == pytest.approx(1.05246425, abs=1e-6)
    for rows in (8, 64):  # independent of the number of rows
        mean = epps_pulley(torch.randn(rows, 20_000, generator=seeded(0))).mean().item()
        assert mean == pytest.approx(expected, rel=0.03)


# ---------------------------------------------------------------- SIGReg


@pytest.mark.parametrize(("seed", "expected"), [(0, 1.88836122), (1, 1.98804545)])
def test_sigreg_of_the_waves(seed, expected):
    assert sigreg(waves(), unit_directions(torch.randn(4, 256, generator=seeded(seed)))).item() == pytest.approx(
        expected, rel=1e-5
    )


def test_gradient_of_sigreg():
    u = waves().requires_grad_()
    sigreg(u, unit_directions(torch.randn(4, 256, generator=seeded(0)))).backward()
    assert u.grad[0].tolist() == pytest.approx([0.15894723, 0.13991076, 0.02502832, -0.01602677], abs=1e-5)
    assert u.grad.norm().item() == pytest.approx(0.52621883, rel=1e-5)


# ---------------------------------------------------------------- variance and covariance


def test_variance_and_covariance_of_the_waves():
    variance, covariance = variance_covariance(waves())
    assert variance.item() == pytest.approx(0.13045965, rel=1e-5)
    assert covariance.item() == pytest.approx(1.10211205, rel=1e-5)


def test_variance_and_covariance_by_hand():
    u = torch.randn(12, 5, generator=seeded(0)) * torch.tensor([0.2, 0.5, 1.0, 2.0, 0.9])
    sigma = torch.cov(u.T)
    hinge = sum(max(0.0, 1 - math.sqrt(sigma[i, i].item() + 1e-4)) for i in range(5)) / 5
    off = sum(sigma[i, j].item() ** 2 for i in range(5) for j in range(5) if i != j) / 5
    variance, covariance = variance_covariance(u)
    assert variance.item() == pytest.approx(hinge, rel=1e-5)
    assert covariance.item() == pytest.approx(off, rel=1e-4)


def test_a_collapsed_channel_still_has_a_finite_gradient():
    u = torch.ones(8, 3, requires_grad=True)
    sum(variance_covariance(u)).backward()
    assert u.grad.isfinite().all()


def test_autocast_changes_neither_regularizers_nor_their_gradients():
    """Its products in bf16 would change SIGReg's gradient on Gaussian latents by 4.7%, that of the covariance by 0.4%."""
    z, o, terms = torch.randn(64, 4, 32, generator=seeded(0)).requires_grad_(), JpegDlmObjective(), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses = latent_regularizers(z, o, 100, RowNoise(0, range(64)))
        terms.append([(loss, torch.autograd.grad(loss, z, retain_graph=True)[0]) for loss in losses.values()])
    for plain, rounded in zip(*terms, strict=True):
        assert all(map(torch.equal, plain, rounded))
