"""The break point of decoding, with a decoder for which it is known, and the whole study."""

import json

import numpy as np
import pytest
import torch
from conftest import MICRO

from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.noisy_tokens import break_point, right_tokens
from jpeg_dlm.methods.base import Batch, LatentView
from jpeg_dlm.studies import decodability
from jpeg_dlm.studies.decodability import BRANCH, DIRECT, PREDICTED, TIMES, curve, draw, ways_of

pytest_plugins = ["tiny_evaluation", "stand_in"]  # fixtures


def signs():
    """Tokens 0 and 1 are latents -1 and 1, decoded by sign: right unless noise turns the sign."""
    return LatentView(
        encode=lambda batch: 2.0 * batch.tokens_BL[..., None] - 1,
        predict=lambda z_t, ratio: z_t if ratio < 1 else -z_t,  # a model that is wrong from t = 1/2 on
        decode=lambda z: (z[..., 0] > 0).long(),
        noisy=lambda z, eps, ratio: z + ratio * eps,
    )


@pytest.fixture
def batch():
    return Batch(torch.randint(0, 2, (64, 50), generator=torch.Generator().manual_seed(0)))


def test_padding_does_not_count():
    tokens, mask = torch.tensor([[1, 1, 0], [0, 1, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    batch = Batch(tokens, mask)
    assert right_tokens(torch.ones(2, 3).long(), batch).tolist() == [2, 0]


def test_break_point():
    assert break_point([1.0, 0.8, 0.6], [0.9, 0.6, 0.3]) == pytest.approx(0.7)  # half way from 0.6 to 0.3
    assert break_point([1.0, 0.5], [0.8, 0.4]) is None  # half is not below half
    assert break_point([1.0, 0.5, 0.2], [1.0, 0.0, 1.0]) == pytest.approx(0.75)


def test_curve_of_rows_that_break_alike_and_unlike():
    right = np.array([[10, 10], [10, 10], [0, 10]])  # of one row everything is lost at the last level
    found = curve(right, np.array([10, 10]), [1.0, 0.5, 0.25])
    assert found["share"] == [1.0, 1.0, 0.5] and found["break"] is None
    assert (found["low"][2], found["high"][2]) == (0.0, 1.0) and found["break_low"] is None
    found = curve(right * [[1], [1], [0]], np.array([10, 10]), [1.0, 0.5, 0.25])
    assert found["break"] == found["break_low"] == found["break_high"] == pytest.approx(0.375)


def test_a_prediction_breaks_where_the_model_does(batch):
    ways, z = ways_of(signs()), signs().encode(batch)
    assert list(ways) == [DIRECT, PREDICTED]  # no decode branch
    eps = torch.zeros_like(z)
    shares = {way: [float((f(z, eps, t) == batch.tokens_BL).float().mean()) for t in TIMES] for way, f in ways.items()}
    assert shares[DIRECT] == [1.0] * len(TIMES)
    assert break_point(TIMES, shares[PREDICTED]) == pytest.approx(0.55)  # between 0.6, right, and 0.5, wrong


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus_file):
    """Run directories of both systems after a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    for method in ("jpeg-dlm", "cosmos"):
        words = ["train", "--preset", "smoke", "--method", method, "--data", str(corpus_file), "--out", str(folder / method)]
        for name, value in (MICRO | {"train.steps": 4, "train.encoder_steps": 2, "train.eval_every": 0}).items():
            if method == "jpeg-dlm" or name not in ("model.freq_dim", "objective.sigreg_slices"):  # COSMOS has no such options
                words += [f"--{name.replace('_', '-')}", str(value)]
        assert main([*words, "--quiet", "--device", "cpu"]) == 0
    return folder


@pytest.mark.slow  # four trainings, if short ones
def test_trained_models_through_every_study(trained, byte_gpt2, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    for name in ("correlation", "interpolation", "decodability"):
        words = ["study", name, str(trained / "jpeg-dlm"), str(trained / "cosmos"), "-n", "4", "--out", str(tmp_path)]
        assert main([*words, "--scorer", f"hf:{byte_gpt2}", "--quiet", "--device", "cpu"]) == 0
        shown = capsys.readouterr().out
        assert "jpeg-dlm (JPEG-DLM, r = 0.25)" in shown and "cosmos (COSMOS, r = 0.25)" in shown
        assert {path.suffix for path in tmp_path.glob(f"study-{name}.*")} == {".json", ".md", ".png"}


def test_both_systems_and_two_rates(micro_folders, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    folders = [micro_folders("jpeg-dlm"), micro_folders("cosmos"), micro_folders("jpeg-dlm", model__latent_len=6)]
    words = ["study", "decodability", *map(str, folders), "-n", "9", "--batch", "4", "--seeds", "2", "--quiet"]
    words += ["--data", str(corpus_file), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "study-decodability.json").read_text())
    assert [list(row["ways"]) for row in result["rows"]] == [[DIRECT, BRANCH, PREDICTED], [DIRECT, PREDICTED]] + [
        [DIRECT, BRANCH, PREDICTED]
    ]
    for found in (found for row in result["rows"] for found in row["ways"].values()):
        assert len(found["share"]) == len(TIMES) and all(
            low <= share <= high for low, share, high in zip(found["low"], found["share"], found["high"], strict=True)
        )
    assert shown.count("r = 0.25") == 5 and shown.count("r = 0.5") == 3
    assert (tmp_path / "out" / "study-decodability.png").stat().st_size > 10_000
    monkeypatch.setattr(decodability, "count_right", lambda *a: pytest.fail("decoded twice"))
    assert main(words) == 0 and capsys.readouterr().out == shown


def test_clean_share_is_the_evaluations_reconstruction(micro_folders, corpus_file, tmp_path, monkeypatch):
    from jpeg_dlm.evaluation.heldout import model_sources
    from jpeg_dlm.machine.console import Console
    from jpeg_dlm.results.resumable import Parts
    from jpeg_dlm.studies.study import Asked

    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    console = Console(quiet=True)
    for name, way in (("jpeg-dlm", BRANCH), ("cosmos", DIRECT)):
        [source] = model_sources([micro_folders(name)], "cpu", 4, str(corpus_file), console)
        asked = Asked(10, (0, 1), 4, lambda: pytest.fail("no scorer is needed"), Parts(), console)
        [row] = decodability.analyze([source], asked).result["rows"]
        whole = Batch(source.heldout.rows(range(10)))
        assert row["ways"][way]["share"][0] == pytest.approx(float(source.model.method.reconstruction(whole)))


def test_picture_without_a_break(tmp_path):
    flat = {"share": [1.0, 0.9], "low": [1.0, 0.8], "high": [1.0, 0.95], "break": None, "break_low": None, "break_high": None}
    row = {"name": "x", "title": "COSMOS", "rate": 0.5, "ways": {DIRECT: flat}, "texts": 3}
    result = {"times": [1.0, 0.5], "rows": [row]}
    assert "never" in decodability.table(result).column(2) and draw(result, tmp_path / "flat.png").is_file()
