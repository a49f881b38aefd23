"""Measures of a latent space against closed forms, and that they do not depend on how a batch is split."""

import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import MICRO, perturb

from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.methods.base import Batch, Latents
from jpeg_dlm.methods.common import latent_geometry as geometry
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise, generator


def normal(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed, "test"))


def eigenvalues(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_equal_eigenvalues_count_themselves():
    for k in (1, 3, 8):
        e = eigenvalues(*[2.5] * k, *[0.0] * (8 - k))
        assert geometry.effective_rank(e) == pytest.approx(k)
        assert geometry.participation_ratio(e) == pytest.approx(k)
        assert geometry.isotropy(e) == pytest.approx((k - 1) / 7)
    nothing = eigenvalues(0, 0, 0)
    assert (geometry.effective_rank(nothing), geometry.participation_ratio(nothing), geometry.isotropy(nothing)) == (0, 0, 0)


def test_known_eigenvalues():
    e = eigenvalues(4, 2, 1, 1)  # entropy 1.75 bits
    assert geometry.effective_rank(e) == pytest.approx(2**1.75)
    assert geometry.participation_ratio(e) == pytest.approx(64 / 22)


def test_isotropy_is_isoscore():
    e = np.random.default_rng(0).exponential(size=12)
    n, unit = 12, e * math.sqrt(12) / np.linalg.norm(e)  # the definition, step by step
    defect = np.linalg.norm(unit - 1) / math.sqrt(2 * (n - math.sqrt(n)))
    used = (n - defect**2 * (n - math.sqrt(n))) ** 2 / n**2
    assert geometry.isotropy(torch.tensor(e)) == pytest.approx((n * used - 1) / (n - 1))


def test_a_covariance_that_is_known():
    turn, _ = torch.linalg.qr(normal(6, 6))
    u = normal(200_000, 6, seed=1) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.0, 0.0]) @ turn + 7
    assert geometry.spectrum(geometry.covariance(u)).tolist() == pytest.approx([9, 4, 1, 0.25, 0, 0], rel=0.02, abs=1e-3)


def test_an_isotropic_gaussian_and_what_is_none():
    z = normal(4096, 4, 16)
    found = geometry.measure(z)
    assert found.rank > 0.99 and found.isotropy > 0.99 and found.sigreg < 1e-3 and found.vectors == 16384
    assert 0.97 < found.std_min < found.std_median < 1.03 and found.text == pytest.approx(1, abs=0.02)
    flat = geometry.measure(z[..., :3] @ normal(3, 16, seed=1))
    assert flat.effective_rank < 3.001 and flat.rank == pytest.approx(flat.effective_rank / 16)
    few = geometry.measure(normal(5, 1, 16))  # five vectors span four directions, which is all they could
    assert 3 < few.effective_rank <= 4.001 and few.rank == pytest.approx(few.effective_rank / 4)


def test_one_point_is_as_far_as_stated():
    found = geometry.measure(torch.zeros(64, 2, 8))
    assert found.sigreg == pytest.approx(geometry.POINT_DISTANCE, abs=2e-3)
    assert (found.rank, found.std_min, found.text) == (0, 0, 0)
    t = np.linspace(-3, 3, 100_001)
    phi = np.exp(-(t**2) / 2)
    assert np.trapezoid(phi * (1 - phi) ** 2, t) == pytest.approx(geometry.POINT_DISTANCE, abs=1e-3)


def test_positions_alone_are_no_text():
    z = normal(32, 8).expand(50, 32, 8)  # 32 positions that fill the space and never change
    found = geometry.measure(z + 0.1 * normal(50, 32, 8, seed=1))
    assert found.rank > 0.7 and found.text == pytest.approx(0.01, rel=0.1)


def test_what_is_not_finite_stays_so_and_raises_nothing():
    z = normal(8, 2, 4)
    z[3, 1, 2] = math.nan
    found = geometry.measure(z)
    assert all(math.isnan(x) for x in (found.rank, found.isotropy, found.sigreg, found.text, found.eigenvalues[0]))


def test_autocast_does_not_round():
    z = normal(64, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = geometry.measure(z)
    assert rounded == geometry.measure(z)


def noisy_copy():
    """A decoder of which everything is known: token 1 where the only channel is positive."""
    tokens = (torch.rand(4000, 5, generator=generator(0, "tokens")) < 0.5).long()
    return Latents((2.0 * tokens - 1)[..., None], lambda z: (z[..., 0] > 0).long()), Batch(tokens)


def test_noisy_accuracy_has_its_closed_form():
    latents, batch = noisy_copy()
    times = (0.2, 0.5, 0.8, 1.0)
    found = geometry.noisy_accuracy(latents, batch, RowNoise(0, range(4000)), times)
    for t, share in zip(times, found, strict=True):  # right if t + (1 - t) eps > 0
        right = 1.0 if t == 1 else 0.5 * (1 + math.erf(t / (1 - t) / math.sqrt(2)))
        assert share == pytest.approx(right, abs=0.01)
    mask = batch.tokens_BL == 1
    assert geometry.noisy_accuracy(latents, Batch(batch.tokens_BL, mask), RowNoise(0, range(4000)), (1.0,)) == [1.0]


def test_an_evaluation_decodes_the_first_quarter():
    latents, batch = noisy_copy()
    noise = RowNoise(0, range(4000))
    part = geometry.noisy_accuracy(
        Latents(latents.z_BND[:1000], latents.decode), Batch(batch.tokens_BL[:1000]), RowNoise(0, range(1000))
    )
    found = geometry.latent_measures(latents, batch, noise)
    assert [found[f"decode_t{t}"] for t in (0.3, 0.5, 0.7)] == part


@pytest.mark.parametrize("method", ["jpeg-dlm", "cosmos", "cosmos-codec"])
def test_methods_with_latents(method):
    config = for_method(override(preset("smoke"), MICRO | {"encoder.kind": "random", "encoder.scale": "none"}), method)
    encoder = build_encoder(config.encoder, config.data.vocab_size, 0)
    built = perturb(build_method(config, encoder)).eval()
    tokens = torch.randint(300, (6, 12), generator=generator(0, "tokens"))
    latents = built.latent_space(Batch(tokens))
    assert latents is not None and latents.z_BND.shape == (6, 3, 16)
    share, whole = (latents.decode(latents.z_BND) == tokens).float().mean(), built.reconstruction(Batch(tokens))
    assert whole is not None and float(share) == pytest.approx(float(whole), abs=1e-6)  # clean: the same way back
    if method == "cosmos-codec":
        assert latents.z_BND.mean(0).abs().max() < 1e-5 and latents.z_BND.var(0, correction=0).max() < 1.001


def test_methods_without_latents():
    config = for_method(override(preset("smoke"), MICRO), "ar")
    assert build_method(config).latent_space(Batch(torch.zeros(2, 12, dtype=torch.long))) is None


def _half(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    found = geometry.measure(normal(40, 3, 8)[rank::2])
    (folder / f"{rank}.json").write_text(json.dumps(vars(found)))
    dist.destroy_process_group()


def test_halves_make_a_whole(tmp_path):
    mp.spawn(_half, (tmp_path,), nprocs=2)
    a, b = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    whole = vars(geometry.measure(normal(40, 3, 8)))
    assert a == b and a.keys() == whole.keys()
    for name, value in whole.items():
        assert a[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
