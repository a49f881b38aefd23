"""The common interface to models with latents: equal noise levels on every path, each model's own predictions and decoding."""

import math

import pytest
import torch
from conftest import MICRO, perturb

from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.evaluation.heldout import model_sources
from jpeg_dlm.flow.vp import TanSchedule
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.base import Batch, linear_time
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.studies.latents import (
    batches_of,
    check_sources,
    clean_latents,
    linear_ratio,
    tan_ratio,
    unit_rms,
    view_of,
)

pytest_plugins = ["stand_in"]  # fixtures

METHODS = ("jpeg-dlm", "cosmos", "elf")


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    config = for_method(override(preset("smoke"), MICRO | {"encoder.kind": "random"}), request.param)
    method = perturb(build_method(config), 0.2).eval()
    method.encoder = build_encoder(config.encoder, config.data.vocab_size, 0, None)
    return method


def latents(method, rows=5):
    shape = (12, 16) if method.config.method == "elf" else (3, 16)
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("t", "linear", "snr"), [(0.1, 0.5581, 1.5945383), (0.2, 0.3810, 0.3788854), (0.3, 0.2819, 0.1540736)])
def test_the_papers_times_have_one_signal_to_noise_ratio(t, linear, snr):
    ratio = tan_ratio(t, TanSchedule())
    assert linear_time(ratio) == pytest.approx(linear, abs=5e-5) and ratio**-2 == pytest.approx(snr, rel=1e-6)
    assert ratio**-2 == pytest.approx((5 * math.tan(math.pi * t / 2)) ** -2, rel=1e-9)


@pytest.mark.parametrize("d", [1.0, 5.0, 9.0])
def test_times_and_ratios_are_inverse(d):
    for t in (0.0, 0.05, 0.5, 0.9):
        assert TanSchedule(d).time(tan_ratio(t, TanSchedule(d))) == pytest.approx(t, abs=1e-9)
    for t in (1.0, 0.7, 0.01):
        assert linear_time(linear_ratio(t)) == pytest.approx(t)


def test_unit_rms():
    x = unit_rms(3 * torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close((x**2).sum((1, 2)), torch.full((4,), 21.0))


def test_states_are_those_that_the_model_was_trained_on(method):
    view, z = view_of(method), latents(method)
    eps, ratio = latents(method).flip(0), 0.6
    assert torch.equal(view.noisy(z, eps, 0.0), z)
    name, state = method.config.method, view.noisy(z, eps, ratio)
    if name == "cosmos":
        alpha, sigma = TanSchedule().alpha_sigma(torch.tensor(TanSchedule().time(ratio), dtype=torch.float64))
        expected = float(alpha) * z + float(sigma) * eps
    else:  # t x + (1 - t) c eps with (1 - t) c / t = ratio
        c = method.config.objective.noise_scale if name == "elf" else 1.0
        t = c / (c + ratio)
        expected = t * z + (1 - t) * c * eps
    torch.testing.assert_close(state, expected)


@torch.no_grad()
def test_one_prediction_without_an_earlier_one(method):
    view, z, ratio = view_of(method), latents(method), 0.6
    w = torch.ones(len(z))
    if method.config.method == "cosmos":
        expected = method.network(z, torch.full((5,), 2 / math.pi * math.atan(0.6 / 5)), None)
    elif method.config.method == "elf":
        t = torch.full((5,), 1 / (1 + ratio / method.config.objective.noise_scale))
        expected = method.dit(z, t, None, w, torch.zeros(5, dtype=torch.bool))[0]
    else:
        expected = method.dit(z, torch.full((5,), 1 / 1.6), torch.zeros_like(z), w)
    torch.testing.assert_close(view.predict(z, ratio), expected)


@torch.no_grad()
def test_decoding_is_the_methods_own(method):
    view, g = view_of(method), torch.Generator().manual_seed(0)
    batch = Batch(torch.randint(4, 300, (6, 12), generator=g))
    branch = view.branch or (lambda z: z)
    tokens = view.decode(branch(view.encode(batch)))
    assert tokens.shape == (6, 12) and tokens.unique().numel() > 1
    assert float((tokens == batch.tokens_BL).float().mean()) == pytest.approx(float(method.reconstruction(batch)))
    if view.branch:  # the decoding module alone is another function
        assert not torch.equal(view.decode(view.encode(batch)), tokens)


def test_a_model_without_latents_is_refused(stand_ins):
    with pytest.raises(UsageError, match="Unigram has no latents"):
        view_of(build_method(for_method(override(preset("smoke"), MICRO), "unigram")))


def test_rows_come_in_batches(micro_folders, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path))
    [source] = model_sources([micro_folders("jpeg-dlm")], "cpu", 3, str(corpus_file), Console(quiet=True))
    rows = [5, 1, 0, 2, 5, 4, 3]
    found = list(batches_of(source, rows))
    assert [places for places, _ in found] == [range(3), range(3, 6), range(6, 7)]
    assert torch.equal(torch.cat([batch.tokens_BL for _, batch in found]), source.heldout.rows(rows))
    source.model.complete_method()
    whole = source.model.method.encode(Batch(source.heldout.rows(rows)))
    torch.testing.assert_close(clean_latents(source, rows, Console(quiet=True)), whole)
    check_sources([source], 2)
    with pytest.raises(DataError, match="--data"):
        check_sources([source], 10_000)
