"""The diagnosis study: its numbers match the models, and it includes what runs logged."""

import json
import math

import pytest
from conftest import micro_flags
from matplotlib.image import imread

from jpeg_dlm.cli.main import main
from jpeg_dlm.report.collect import collect
from jpeg_dlm.report.page_blocks import Facts, Figure
from jpeg_dlm.results.table import Table
from jpeg_dlm.studies.diagnose import way
from jpeg_dlm.studies.latents import log_of
from jpeg_dlm.training import run as training
from jpeg_dlm.training.diagnosis_plot import diagnoses, plot_diagnosis


@pytest.fixture(scope="module")
def runs(corpus_file, tmp_path_factory):
    """A micro run of JPEG-DLM that was diagnosed, and one of AR on padded rows that was not."""
    folder = tmp_path_factory.mktemp("diagnose")
    where = ["--data", str(corpus_file), "--quiet", "--device", "cpu", "--threads", "1"]
    micro = micro_flags(encoder__kind="random", encoder__scale="none", data__holdout=0.2, train__diagnose="true")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "plot_if_measured", lambda run: None)  # pictures take longer than all of the run
        assert main(["train", "--preset", "smoke", *where, "--out", str(folder / "latent"), *micro]) == 0
    plot_diagnosis(folder / "latent")
    small = ["--data.vocab-size", "300", "--data.token-len", "12", "--model.hidden", "16", "--model.depth", "1"]
    few = ["--model.heads", "2", "--train.steps", "2", "--train.batch", "8", "--train.eval-every", "0", "--data.holdout", "0.2"]
    few += ["--data.packing", "padded"]  # rows that end, so that texts have different lengths
    assert main(["train", "--preset", "smoke", "--method", "ar", *where, "--out", str(folder / "ar"), *small, *few]) == 0
    return folder


def test_the_verb_writes_all_of_it(runs, tmp_path, capsys):
    words = ["study", "diagnose", str(runs / "latent"), str(runs / "ar"), "-n", "12", "--out", str(tmp_path), "--quiet"]
    assert main([*words, "--device", "cpu"]) == 0
    assert "way to real" in capsys.readouterr().out
    result = json.loads((tmp_path / "study-diagnose.json").read_text())
    latent, ar = result["rows"]
    m = latent["measures"]
    assert m["ratio_0.3"] == pytest.approx(m["error_0.3"] / m["linear_0.3"]) and 0 <= m["reconstruction"] <= 1
    assert "ratio_0.3" not in ar["measures"] and ar["measures"]["reconstruction"] is None and ar["measures"]["trigram"] > 1
    assert latent["minutes"] > 0 and latent["over_training"].keys() == {"6", "12"} and not ar["over_training"]
    last = latent["over_training"]["12"]  # the same weights, on other rows and numbers of rows
    assert m["ratio_0.3"] == pytest.approx(last["ratio_0.3"], rel=0.2) and m["trigram_real"] == last["trigram_real"]
    assert imread(tmp_path / "study-diagnose.png").shape[1] > 1500


def test_the_report_shows_it(runs):
    parts = {part.title: part.blocks for section in collect([runs / "latent"]).sections for part in section.parts}
    table, known, picture = parts["Diagnosis"]
    assert isinstance(table, Table) and isinstance(known, Facts) and isinstance(picture, Figure)
    last = diagnoses(runs / "latent" / "metrics.jsonl")[12]
    ratios = next(row for row in table.rows if str(row[0]) == "ratio")
    assert str(ratios[3]) == f"{last['ratio_0.3']:.3g}"
    real, shuffled = (f"{last[f'trigram_{kind}']:.4g}" for kind in ("real", "shuffled"))
    assert str(dict(known.pairs)["Trigram perplexity"]) == (
        f"{last['trigram']:.4g} (real text {real}, shuffled text {shuffled})"
    )
    titles = [part.title for section in collect([runs / "ar"]).sections for part in section.parts]
    assert titles and "Diagnosis" not in titles


def test_the_way_from_shuffled_to_real():
    found = {"trigram": math.exp(3), "trigram_real": math.exp(2), "trigram_shuffled": math.exp(6)}
    assert way(found) == pytest.approx(0.75)
    assert way({"trigram": 3.0}) is None


def test_a_checkpoint_belongs_to_its_run(runs):
    log = runs / "latent" / "metrics.jsonl"
    assert log_of(runs / "latent" / "checkpoints" / "step-00000012") == log_of(runs / "latent") == log
    assert log_of(runs) is None and log_of(None) is None
