"""The linear denoiser against the closed form for Gaussian latents, and what the comparison says of known networks."""

import math

import pytest
import torch
from conftest import MICRO, perturb

from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.methods.base import Batch, Latents
from jpeg_dlm.methods.common.denoising import TIMES, compare_denoisers, fit_linear_denoiser, ranks
from jpeg_dlm.methods.cosmos import Cosmos
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise, generator

N, D = 2, 4


def gaussian(rows, seed=0):
    """Latents (rows, N, D) of a known mean and joint covariance, with positions that depend on each other."""
    root = torch.randn(N * D, N * D, generator=generator(0, "root")) / 3
    mean = torch.linspace(-1, 1, N * D)
    z = torch.randn(rows, N * D, generator=generator(seed, "rows")) @ root.T + mean
    return z.view(rows, N, D), mean.double(), (root @ root.T).double()


def wiener(z_t, t, mean, cov):
    gain = t * cov @ torch.linalg.inv(t**2 * cov + (1 - t) ** 2 * torch.eye(len(cov), dtype=torch.float64))
    x = z_t.double().flatten(1)
    return (mean + (x - t * mean) @ gain.T).view(z_t.shape)


def expected_error(t, mean, cov):
    """E|x - z|^2 / E|z|^2 of the Wiener filter."""
    v = torch.linalg.eigvalsh(cov)
    left = (v * (1 - t) ** 2 / (t**2 * v + (1 - t) ** 2)).sum()
    return float(left / (v.sum() + mean.square().sum()))


def compared(z, predict, linear, parts=1):
    tokens = torch.zeros(len(z), 3, dtype=torch.long)
    size = len(z) // parts
    return compare_denoisers(
        (
            (Latents(z[i : i + size], lambda x: torch.zeros(len(x), 3).long(), predict), Batch(tokens[i : i + size]),
             RowNoise(0, range(i, i + size)))
            for i in range(0, len(z), size)
        ),
        linear,
    )  # fmt: skip


def test_the_filter_is_the_closed_form():
    z, mean, cov = gaussian(200_000)
    linear = fit_linear_denoiser(z)
    assert linear.joint
    z_t = 0.3 * z[:50] + 0.7 * torch.randn(50, N, D, generator=generator(1, "eps"))
    assert torch.allclose(linear(z_t, 0.3).double(), wiener(z_t, 0.3, mean, cov), atol=0.03)


def test_a_network_that_is_the_filter_has_the_ratio_one():
    z, mean, cov = gaussian(100_000)
    found = compared(gaussian(4096, seed=1)[0], lambda z_t, t: wiener(z_t, t, mean, cov), fit_linear_denoiser(z))
    for t in TIMES:
        assert found[f"ratio_{t:g}"] == pytest.approx(1, abs=0.01)
        assert found[f"error_{t:g}"] == pytest.approx(expected_error(t, mean, cov), rel=0.05)
        assert found[f"linear_{t:g}"] == pytest.approx(found[f"error_{t:g}"], rel=0.01)


def test_the_identity_has_a_known_ratio():
    """x = z_t is off by (1 - t)(eps - z), whose square has the mean (1 - t)^2 (1 + |z|^2) per coordinate."""
    z, mean, cov = gaussian(100_000)
    found = compared(gaussian(4096, seed=1)[0], lambda z_t, t: z_t, fit_linear_denoiser(z))
    square = float(cov.trace() + mean.square().sum())
    for t in TIMES:
        error = (1 - t) ** 2 * (N * D + square) / square
        assert found[f"error_{t:g}"] == pytest.approx(error, rel=0.05)
        assert found[f"ratio_{t:g}"] == pytest.approx(error / expected_error(t, mean, cov), rel=0.05)


def test_positions_are_filtered_apart_where_there_are_many_coordinates():
    z, mean, cov = gaussian(100_000)
    linear = fit_linear_denoiser(z, joint_size=N * D - 1)
    assert not linear.joint and "rank_joint" not in ranks(z, linear)
    z_t = torch.randn(20, N, D, generator=generator(1, "eps"))
    for n in range(N):
        own = slice(n * D, (n + 1) * D)
        alone = wiener(z_t[:, n : n + 1], 0.5, mean[own], cov[own, own])
        assert torch.allclose(linear(z_t, 0.5)[:, n : n + 1].double(), alone, atol=0.03)


def test_fewer_rows_than_coordinates_still_beat_no_filter():
    """Directions that no row fills have a variance that is measured on other rows, so that late times stay close."""
    z = torch.randn(60, 4, 25, generator=generator(0, "few"))
    linear = fit_linear_denoiser(z)
    heldout = torch.randn(500, 4, 25, generator=generator(1, "few"))
    found = compared(heldout, lambda z_t, t: t / (t**2 + (1 - t) ** 2) * z_t, linear)  # the filter of N(0, I)
    assert found["ratio_0.9"] > 0.75 and found["ratio_0.1"] > 0.75


def test_parts_do_not_matter_and_accuracy_counts_real_tokens():
    z, *_ = gaussian(1000)
    linear = fit_linear_denoiser(z)
    whole, split = (compared(z[:64], lambda z_t, t: z_t, linear, parts) for parts in (1, 4))
    assert whole == pytest.approx(split)
    tokens = torch.tensor([[0, 0, 1, 1]])
    mask = torch.tensor([[True, True, True, False]])
    latents = Latents(z[:1], lambda x: torch.zeros(1, 4).long(), lambda z_t, t: z_t)
    found = compare_denoisers([(latents, Batch(tokens, mask), RowNoise(0, range(1)))], linear)
    assert found["accuracy_0.5"] == pytest.approx(2 / 3)


def test_ranks():
    z = torch.randn(50_000, 2, 3, generator=generator(0, "r"))
    assert ranks(z, fit_linear_denoiser(z)) == pytest.approx({"rank": 3, "rank_joint": 6}, rel=0.01)
    one = z[:, :1].expand(-1, 2, -1)  # both positions say the same
    assert ranks(one, fit_linear_denoiser(one)) == pytest.approx({"rank": 3, "rank_joint": 3}, rel=0.01)


def test_what_is_not_a_number_raises_nothing():
    z = torch.full((8, 2, 3), math.nan)
    linear = fit_linear_denoiser(z)
    found = compared(z, lambda z_t, t: z_t, linear) | ranks(z, linear)
    assert math.isnan(found["ratio_0.3"]) and math.isnan(found["rank_joint"])


@pytest.mark.parametrize("name", ["jpeg-dlm", "cosmos"])
def test_methods_predict_from_the_linear_path(name):
    """The network sees the state of its own path with the same ratio of noise to signal."""
    config = for_method(override(preset("smoke"), MICRO), name)
    encoder = build_encoder(override(config, {"encoder.kind": "random", "encoder.scale": "none"}).encoder, 300, 0)
    method = perturb(build_method(config, encoder)).eval()
    batch = Batch(torch.randint(0, 300, (5, 12), generator=generator(0, "tokens")))
    latents = method.latent_space(batch)
    assert latents is not None and latents.predict is not None
    with torch.no_grad():
        z, t = latents.z_BND, 0.4
        z_t = t * z + (1 - t) * RowNoise(0, range(5)).normal("x", *z.shape[1:])
        if isinstance(method, JpegDlm):
            own = method.dit(z_t, torch.full((5,), t), None, torch.ones(5))
        else:
            assert isinstance(method, Cosmos)
            time = torch.full((5,), 2 / math.pi * math.atan((1 - t) / t / method.schedule.d))
            alpha, _ = method.schedule.alpha_sigma(time)
            own = method.network(z_t / t * alpha[:, None, None], time, None)
        assert torch.allclose(latents.predict(z_t, t), own, atol=1e-5)
