"""Studies of trained models: equal noise levels on every path, correlations and mixtures by hand, and the sweep over steps."""

import json
import math

import numpy as np
import pytest
import torch
from micro import micro_model

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.evaluation.scorer import build_scorer
from jpeg_dlm.evaluation.texts import ModelSource, model_sources
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.cosmos import alpha_sigma_at, vp_time
from jpeg_dlm.studies import analysis
from jpeg_dlm.studies.analysis import draw_pairs, level, off_diagonal, position_gram, shared_noise
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.errors import DataError, UsageError

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures

QUIET = Console(quiet=True)


@pytest.fixture
def sources(micro_folders, corpus_file, tmp_path, monkeypatch):
    """Micro models with random weights on the held-out part of one text."""
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))

    def make(*methods, batch=3, data=corpus_file):
        return model_sources([micro_folders(method) for method in methods], "cpu", batch, str(data), QUIET)

    return make


# ---------------------------------------------------------------- the common view of latents


@pytest.fixture(scope="module", params=("jpeg-dlm", "cosmos", "elf"))
def method(request):
    method = micro_model(request.param, 0.2)
    method.encoder = build_encoder(method.config.encoder, method.config.data.vocab_size, 0, None)
    return method


def random_latents(method):
    shape = (12, 16) if method.config.method == "elf" else (3, 16)
    return torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))


def test_states_are_those_that_the_model_was_trained_on(method):
    view, z = method.latent_model(), random_latents(method)
    eps, ratio = random_latents(method).flip(0), 0.6
    assert torch.equal(view.noisy(z, eps, 0.0), z)
    name, state = method.config.method, view.noisy(z, eps, ratio)
    if name == "cosmos":
        alpha, sigma = alpha_sigma_at(vp_time(ratio))
        expected = alpha * z + sigma * eps
    else:  # t x + (1 - t) c eps with (1 - t) c / t = ratio
        c = method.config.objective.noise_scale if name == "elf" else 1.0
        t = c / (c + ratio)
        expected = t * z + (1 - t) * c * eps
    torch.testing.assert_close(state, expected)


@torch.no_grad()
def test_one_prediction_without_an_earlier_one(method):
    view, z, ratio = method.latent_model(), random_latents(method), 0.6
    w = torch.ones(len(z))
    if method.config.method == "cosmos":
        expected = method.network(z, torch.full((5,), 2 / math.pi * math.atan(0.6 / 5)), None)
    elif method.config.method == "elf":
        t = torch.full((5,), 1 / (1 + ratio / method.config.objective.noise_scale))
        expected = method.dit(z, t, None, w, torch.zeros(5, dtype=torch.bool))[0]
    else:
        expected = method.dit(z, torch.full((5,), 1 / 1.6), torch.zeros_like(z), w)
    torch.testing.assert_close(view.predict(z, ratio), expected)


def test_rows_come_in_batches(sources, micro_folders):
    [source] = sources("jpeg-dlm")
    rows = [5, 1, 0, 2, 5, 4, 3]
    batches = list(analysis.batches_of(source, rows))
    assert [places for places, _ in batches] == [range(3), range(3, 6), range(6, 7)]
    assert torch.equal(torch.cat([batch.tokens_BL for _, batch in batches]), source.heldout.rows(rows))
    source.model.complete_method()
    whole = source.model.method.encode(Batch(source.heldout.rows(rows)))
    torch.testing.assert_close(analysis.clean_latents(source, rows, QUIET), whole)
    analysis.check_sources([source])
    with pytest.raises(DataError, match="--data"):
        analysis.check_sources([ModelSource(source.model, "none", 3, None)])
    with pytest.raises(UsageError, match="AR"):
        analysis.check_sources([ModelSource(load(micro_folders("ar"), "cpu"), "ar", 3, source.heldout)])


# ---------------------------------------------------------------- correlation


def test_correlation_by_hand():
    # Two sequences, three positions, one channel; without the mean they are (a, -a): 1, 1 and -1.
    z = torch.tensor([[[5.0], [1.0], [0.0]], [[3.0], [-1.0], [8.0]]])
    expected = torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
    torch.testing.assert_close(position_gram(z), expected)
    assert float(off_diagonal(position_gram(z)).mean()) == pytest.approx(-1 / 3)
    # Two channels: (1, 0) and (-1, 0) against (1, 1) and (-1, -1): 2 / (sqrt 2 * 2).
    z = torch.tensor([[[1.0, 0], [1, 1]], [[-1.0, 0], [-1, -1]]]) + torch.tensor([[7.0, 2], [-3, 1]])
    assert float(position_gram(z)[0, 1]) == pytest.approx(2**-0.5)


def test_one_channel_is_numpys_correlation():
    z = torch.randn(40, 6, 1, generator=torch.Generator().manual_seed(0)).cumsum(1)
    np.testing.assert_allclose(position_gram(z).numpy(), np.corrcoef(z[..., 0].numpy().T), atol=1e-6)


def test_two_models_of_unequal_length(micro_folders, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    folders = [micro_folders("jpeg-dlm"), micro_folders("cosmos", model__latent_len=5)]
    words = ["study", "correlation", *map(str, folders), "-n", "24", "--batch", "7", "--quiet"]
    words += ["--data", str(corpus_file), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "study-correlation.json").read_text())
    assert [np.shape(row["gram"]) for row in result["rows"]] == [(3, 3), (5, 5)]
    for row in result["rows"]:
        gram = np.array(row["gram"])
        assert row["mean"] == pytest.approx((gram.sum() - len(gram)) / (len(gram) * (len(gram) - 1)), abs=1e-4)
        assert row["low"] <= row["high"] and 2 <= row["sequences"] <= 24 and row["mean_absolute"] >= abs(row["mean"])
    assert "| 0.105 |" in shown and "| 0.039 |" in shown  # the paper's
    assert (tmp_path / "out" / "study-correlation.png").stat().st_size > 10_000
    monkeypatch.setattr(analysis, "clean_latents", lambda *a: pytest.fail("encoded twice"))
    assert main(words) == 0 and capsys.readouterr().out == shown


def test_only_different_rows_count(sources, tmp_path):
    path = tmp_path / "same.txt"  # every document one of two, so that rows of short blocks repeat
    path.write_text("\n\n".join(["The smith forges nails.", "The teacher reads books."] * 300))
    [source] = sources("jpeg-dlm", data=path)
    chosen = analysis.distinct_rows(source, 1000)
    tokens = {tuple(row) for row in source.heldout.rows(chosen).tolist()}
    everything = {tuple(row) for row in source.heldout.rows(range(len(source.heldout))).tolist()}
    assert len(chosen) == len(tokens) and tokens == everything and len(chosen) < len(source.heldout)
    assert analysis.distinct_rows(source, 2) == chosen[:2]


# ---------------------------------------------------------------- between two texts


def test_pairs_use_every_row_before_any_twice():
    pairs = draw_pairs(7, 8)
    assert pairs.shape == (8, 2) and (pairs[:, 0] != pairs[:, 1]).all()
    for start in (0, 3):
        assert len(set(pairs[start : start + 3].flatten())) == 6
    assert np.array_equal(draw_pairs(7, 3), pairs[:3])


def test_noise_is_shared_and_of_unit_size():
    like = torch.empty(3, 4, 5)
    eps = shared_noise([0, 1, 2], like)
    torch.testing.assert_close((eps**2).mean((1, 2)), torch.ones(3))
    assert torch.equal(shared_noise([2], like[:1])[0], eps[2]) and not torch.equal(eps[0], eps[1])


@pytest.mark.parametrize(
    ("t", "linear", "snr"), [(0.1, 0.5580599, 1.5945383), (0.2, 0.3810, 0.3788854), (0.3, 0.2819, 0.1540736)]
)
def test_the_papers_times_have_one_signal_to_noise_ratio(t, linear, snr):
    at = level(t)
    assert at["linear_t"] == pytest.approx(linear, abs=5e-5) and at["ratio"] ** -2 == pytest.approx(snr, rel=1e-6)
    assert at["ratio"] == pytest.approx(5 * np.tan(np.pi * t / 2), rel=1e-9)
    assert level(0.0) == {"name": "no noise", "t": 0.0, "ratio": 0.0, "linear_t": 1.0}


@pytest.mark.slow
def test_both_systems(micro_folders, byte_gpt2, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(analysis, "RESAMPLES", 50)
    words = ["study", "interpolation", str(micro_folders("jpeg-dlm")), str(micro_folders("cosmos")), "-n", "5", "--batch", "3"]
    words += ["--scorer", f"hf:{byte_gpt2}", "--data", str(corpus_file), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "study-interpolation.json").read_text())
    assert [model["title"] for model in result["models"]] == ["JPEG-DLM", "COSMOS"] and result["scorer_precision"] == "fp32"
    assert len(result["records"]) == 2 * 4 * 11
    for record in (r for r in result["records"] if r["gen_ppl"] is not None):
        assert record["gen_ppl_low"] <= record["gen_ppl"] <= record["gen_ppl_high"] and record["entropy"] >= 0
    assert shown.count(" | 0.45 | ") == 2 and "t = 0.1, SNR 1.59" in shown and "no noise" in shown
    assert (tmp_path / "out" / "study-interpolation.png").stat().st_size > 10_000
    monkeypatch.setattr(analysis, "path_texts", lambda *a: pytest.fail("written twice"))
    assert main(words) == 0 and capsys.readouterr().out == shown


def test_the_ends_of_the_path_are_the_texts_own_reconstructions(sources):
    [source] = sources("cosmos", batch=2)
    request = analysis.AnalysisRequest(5, (0,), lambda: pytest.fail("no scorer is needed"), DiskCache(), QUIET)
    texts, method = analysis.path_texts(source, 0.0, request), source.model.method
    for side, ends in ((0, texts[0]), (1, texts[-1])):
        tokens = source.heldout.rows(draw_pairs(len(source.heldout), 5)[:, side])
        assert ends == source.model.to_text(method.greedy(method.encode(Batch(tokens))))


def test_text_that_vanished_has_no_perplexity(fake):
    assert analysis.score_texts(["", " "], fake, PROTOCOLS["default"])["gen_ppl"] is None
    # Without a beginning token the first word is context: (2 + 4) / 2 nats.
    some = analysis.score_texts(["w9 w2 w4", ""], fake, PROTOCOLS["default"])
    assert some["gen_ppl"] == pytest.approx(np.exp(3)) and some["skipped"] == 1 and some["entropy"] == pytest.approx(np.log(3))


# ---------------------------------------------------------------- steps


def test_a_sweep_over_the_papers_steps():
    assert analysis.sweep_of("lm1b", 32) == (8, 16, 32, 64, 128, 256)  # the paper's
    assert analysis.sweep_of("smoke", 3) == (3, 4, 8, 16, 32, 64, 128)


def test_a_sweep_beside_the_papers(sources, byte_gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "DEFAULT_STEPS", (1, 2))
    scorer, parts = (lambda: build_scorer(f"hf:{byte_gpt2}")), DiskCache(tmp_path / "parts")
    request = analysis.AnalysisRequest(4, (0, 1), scorer, parts, QUIET, mauve="off")
    models = sources("jpeg-dlm", "ar")
    outcome = analysis.sweep_steps(models, request)
    entries = [(e["method"], e["sampler"].get("steps"), e["evaluations"]) for e in outcome.result["entries"]]
    assert entries == [("jpeg-dlm", 1, 2), ("jpeg-dlm", 2, 3), ("jpeg-dlm", 3, 4), ("ar", None, 12)]
    assert outcome.result["scorer_precision"] == "fp32"
    assert outcome.tables[1].rows[-1] == (256, 64.07, 4.23, 0.933)  # the paper's
    written = outcome.write(tmp_path / "study-steps")
    assert written[2].stat().st_size > 10_000
    # Each point is the evaluation of that sampler, so a second look finds it done.
    monkeypatch.setattr(ModelSource, "write", lambda *a, **k: pytest.fail("written twice"))
    assert analysis.sweep_steps(models, request).tables == outcome.tables
    assert analysis.common_protocol(models).name == "default"
    for source in models:
        object.__setattr__(source.model.config, "preset", "lm1b")
    assert analysis.common_protocol(models).name == "lm1b"
