"""The study of latent geometry: its numbers are those of the latents, its sentence tells collapsed from filled."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import micro_flags
from matplotlib.image import imread

from jpeg_dlm.cli.main import main
from jpeg_dlm.evaluation.heldout import model_sources
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import markdown
from jpeg_dlm.studies import geometry
from jpeg_dlm.studies.latents import heldout_of
from jpeg_dlm.studies.study import Asked


@pytest.fixture(scope="module")
def run(corpus_file, tmp_path_factory):
    """A micro run with two evaluations."""
    out = tmp_path_factory.mktemp("geometry") / "run"
    where = ["--data", str(corpus_file), "--out", str(out), "--quiet", "--device", "cpu", "--threads", "1"]
    assert main(["train", "--preset", "smoke", *where, *micro_flags(encoder__kind="random", data__holdout=0.2)]) == 0
    return out


def asked(folder=None, n=20):
    def no_scorer():
        raise AssertionError("geometry scores nothing")

    return Asked(n, (0,), 7, no_scorer, Parts(folder), Console(quiet=True))


def test_the_verb_writes_all_of_it(run, tmp_path, capsys):
    words = ["study", "geometry", str(run), str(run / "checkpoints" / "step-00000012"), "-n", "20", "--out", str(tmp_path)]
    assert main([*words, "--quiet", "--device", "cpu"]) == 0
    assert "effective rank" in capsys.readouterr().out
    result = json.loads((tmp_path / "study-geometry.json").read_text())
    a, b = result["rows"]
    assert a["over_training"]["step"] == b["over_training"]["step"] == [6, 12]
    assert len(a["eigenvalues"]) == a["width"] == 16 and a["vectors"] == 60
    assert imread(tmp_path / "study-geometry.png").shape[1] > 1200


def test_numbers_are_those_of_the_latents(run, tmp_path):
    (source,) = model_sources([run], "cpu", 7, None, Console(quiet=True))
    row = geometry.analyze([source], asked()).result["rows"][0]
    source.model.complete_method()
    tokens = heldout_of(source).rows(list(range(20)))
    u = source.model.method.encode(Batch(tokens)).flatten(0, 1).double().numpy()
    values = np.sort(np.linalg.eigvalsh(np.cov(u.T, bias=True)))[::-1]
    assert row["eigenvalues"] == pytest.approx(values.tolist(), rel=1e-3, abs=1e-5)
    p = values[values > 0] / values.sum()
    assert row["effective_rank"] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-3)
    assert geometry.analyze([source], asked(tmp_path)).result == geometry.analyze([source], asked(tmp_path)).result


def test_the_sentence_tells_a_collapse(run, monkeypatch):
    (source,) = model_sources([run], "cpu", 7, None, Console(quiet=True))
    source.model.config = replace(source.model.config, train=replace(source.model.config.train, collapse_alarm=0.05))
    g = torch.Generator().manual_seed(0)
    filled, point = torch.randn(200, 3, 16, generator=g), torch.zeros(200, 3, 16)
    for z, words, wrong in ((filled, "does not look collapsed", 0), (point, "looks collapsed: ", 3)):
        monkeypatch.setattr(geometry, "clean_latents", lambda *_, z=z: z)
        outcome = geometry.analyze([source], asked())
        assert words in markdown(outcome.tables) and len(outcome.result["rows"][0]["collapsed"]) == wrong


def test_a_jackknife_knows_the_deviation():
    """Of the effective rank of Gaussian vectors, against its deviation over many draws."""
    scale = torch.tensor([2.0, 1.0, 1.0, 0.5])
    draws = torch.randn(200, 64, 2, 4, generator=torch.Generator().manual_seed(0)) * scale
    ranks = [geometry.effective_rank(geometry.spectrum(geometry.covariance(z.flatten(0, 1)))) for z in draws]
    told = [geometry.deviations(z)["effective_rank_sd"] for z in draws[:40]]
    assert np.mean(told) == pytest.approx(np.std(ranks), rel=0.3)


def test_a_model_folder_has_no_history(tmp_path):
    assert geometry.over_training(None) == {} and geometry.over_training(tmp_path) == {}
