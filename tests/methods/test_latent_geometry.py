"""Measures of a latent space against closed forms, and that they do not depend on how a batch is split."""

import math

import numpy as np
import pytest
import torch
from micro import micro_model

from jpeg_dlm.methods import latent_geometry as geometry
from jpeg_dlm.methods.base import Batch, LatentModel
from jpeg_dlm.util.rng import RowNoise, generator


def normal(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed, "test"))


def eigenvalues(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_equal_eigenvalues_count_themselves():
    for k in (1, 3, 8):
        e = eigenvalues(*[2.5] * k, *[0.0] * (8 - k))
        assert geometry.effective_rank(e) == pytest.approx(k)
    assert geometry.effective_rank(eigenvalues(0, 0, 0)) == 0


def test_a_covariance_that_is_known():
    turn, _ = torch.linalg.qr(normal(6, 6))
    u = normal(200_000, 6, seed=1) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.0, 0.0]) @ turn + 7
    assert geometry.spectrum(geometry.covariance(u)).tolist() == pytest.approx([9, 4, 1, 0.25, 0, 0], rel=0.02, abs=1e-3)


def test_an_isotropic_gaussian_and_what_is_none():
    z = normal(4096, 4, 16)
    found = geometry.measure(z)
    assert found["rank"] > 0.99 and found["sigreg"] < 1e-3
    assert 0.97 < found["std_min"] < 1.03 and found["text"] == pytest.approx(1, abs=0.02)
    assert geometry.measure(z[..., :3] @ normal(3, 16, seed=1))["rank"] < 3.001 / 16
    few = geometry.measure(normal(5, 1, 16))  # five vectors span four directions, which is all they could
    assert 0.75 < few["rank"] <= 1.001


def test_one_point_is_as_far_as_stated():
    found = geometry.measure(torch.zeros(64, 2, 8))
    assert found["sigreg"] == pytest.approx(geometry.POINT_DISTANCE, abs=2e-3)
    assert (found["rank"], found["std_min"], found["text"]) == (0, 0, 0)
    t = np.linspace(-3, 3, 100_001)
    phi = np.exp(-(t**2) / 2)
    assert np.trapezoid(phi * (1 - phi) ** 2, t) == pytest.approx(geometry.POINT_DISTANCE, abs=1e-3)


def test_positions_alone_are_no_text():
    z = normal(32, 8).expand(50, 32, 8)  # 32 positions that fill the space and never change
    found = geometry.measure(z + 0.1 * normal(50, 32, 8, seed=1))
    assert found["rank"] > 0.7 and found["text"] == pytest.approx(0.01, rel=0.1)


def test_what_is_not_finite_stays_so_and_raises_nothing():
    z = normal(8, 2, 4)
    z[3, 1, 2] = math.nan
    found = geometry.measure(z)
    assert all(math.isnan(found[name]) for name in ("rank", "sigreg", "text"))


def noisy_copy():
    """A decoder of which everything is known: token 1 where the only channel is positive."""
    tokens = (torch.rand(4000, 5, generator=generator(0, "tokens")) < 0.5).long()
    return (2.0 * tokens - 1)[..., None], lambda z: (z[..., 0] > 0).long(), Batch(tokens)


def test_noisy_accuracy_has_its_closed_form():
    z, decode, batch = noisy_copy()
    times = (0.2, 0.5, 0.8, 1.0)
    shares = geometry.noisy_accuracy(z, decode, batch, RowNoise(0, range(4000)), times)
    for t, share in zip(times, shares, strict=True):  # right if t + (1 - t) eps > 0
        right = 1.0 if t == 1 else 0.5 * (1 + math.erf(t / (1 - t) / math.sqrt(2)))
        assert share == pytest.approx(right, abs=0.01)
    masked = Batch(batch.tokens_BL, batch.tokens_BL == 1)
    assert geometry.noisy_accuracy(z, decode, masked, RowNoise(0, range(4000)), (1.0,)) == [1.0]


def test_an_evaluation_decodes_the_first_quarter():
    z, decode, batch = noisy_copy()
    model = LatentModel(lambda b: z, lambda z_t, ratio: z_t, decode, decode)
    part = geometry.noisy_accuracy(z[:1000], decode, batch, RowNoise(0, range(1000)))
    measures = geometry.latent_measures(model, batch, RowNoise(0, range(4000)))
    assert [measures[f"decode_t{t}"] for t in (0.3, 0.5, 0.7)] == part


@pytest.mark.parametrize("name", ["jpeg-dlm", "cosmos", "elf"])
def test_methods_with_latents(name):
    method, tokens = micro_model(name), torch.randint(300, (6, 12), generator=generator(0, "tokens"))
    model = method.latent_model()
    z = model.encode(Batch(tokens))
    assert z.shape == ((6, 12, 16) if name == "elf" else (6, 3, 16))
    share, whole = (model.tokens(z) == tokens).float().mean(), method.reconstruction(Batch(tokens))
    assert float(share) == pytest.approx(float(whole), abs=1e-6)  # clean: the same way back
    assert method.learns_latents == (name != "elf") and micro_model("ar").latent_model() is None
