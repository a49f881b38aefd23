"""The diagnosis of a run: what it logs, that it changes nothing, and that it is logged once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from conftest import micro_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.files import sha256_file
from jpeg_dlm.methods.denoising import TIMES
from jpeg_dlm.training import diagnosis
from jpeg_dlm.training.metrics import read_metrics

TEXT = {"words", "distinct", "trigram", "copied", "words_real", "distinct_real", "trigram_real", "trigram_shuffled"}
LATENT = {f"{kind}_{t:g}" for kind in ("error", "linear", "ratio", "accuracy") for t in TIMES} | {"rank", "rank_joint"}


def train(data: Path, out: Path, *flags: str, diagnose: bool = True, steps: int = 12) -> None:
    words = ["train", "--preset", "smoke", "--data", str(data), "--out", str(out), "--threads", "1", "--device", "cpu"]
    options = micro_flags(train__diagnose=str(diagnose).lower(), train__steps=steps)
    assert main([*words, *options, *flags]) == 0


def evaluations(run: Path) -> list[dict]:
    return [row for row in read_metrics(run / "metrics.jsonl") if any(name.startswith("heldout_") for name in row)]


def diagnosed(row: dict) -> dict[str, float]:
    return {name.removeprefix("diag_"): value for name, value in row.items() if name.startswith("diag_")}


@pytest.fixture(scope="module")
def run(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed") / "run"
    train(corpus_file, folder, "--quiet")
    return folder


def test_every_evaluation_is_diagnosed(run: Path):
    rows = evaluations(run)
    assert [row["step"] for row in rows] == [6, 12]
    for row in rows:
        found = diagnosed(row)
        assert found.keys() == TEXT | LATENT
        assert all(map(math.isfinite, found.values()))
        assert all(found[f"ratio_{t:g}"] == pytest.approx(found[f"error_{t:g}"] / found[f"linear_{t:g}"]) for t in TIMES)
        assert found["trigram_real"] < found["trigram_shuffled"] and found["words_real"] == 1.0
    assert not any(diagnosed(row) for row in read_metrics(run / "encoder-training" / "metrics.jsonl"))


def test_the_weights_are_the_same_without(run: Path, corpus_file: Path, tmp_path: Path):
    train(corpus_file, tmp_path / "run", "--quiet", diagnose=False)
    assert not any(map(diagnosed, evaluations(tmp_path / "run")))
    for name in ("model", "ema", "optimizer"):
        files = [folder / "checkpoints" / "step-00000012" / f"{name}.safetensors" for folder in (run, tmp_path / "run")]
        assert sha256_file(files[0]) == sha256_file(files[1])


def test_resuming_leaves_each_line_once(run: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed between the evaluation of step 6 and the checkpoint of step 8, so that the evaluation runs again."""
    from jpeg_dlm.training.loop import Trainer

    real_step = Trainer.train_step

    def dying(self):
        if self.step == 7 and self.config.method == "jpeg-dlm":
            raise RuntimeError("killed")
        return real_step(self)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(Trainer, "train_step", dying)
        train(corpus_file, tmp_path / "run", "--quiet", "--debug")
    assert [row["step"] for row in evaluations(tmp_path / "run")] == [6]
    train(corpus_file, tmp_path / "run", "--quiet", "--resume")
    straight, again = evaluations(run), evaluations(tmp_path / "run")
    assert [row["step"] for row in again] == [6, 12]
    assert list(map(diagnosed, again)) == list(map(diagnosed, straight))


def test_methods_without_latents_are_judged_by_their_text(corpus_file: Path, tmp_path: Path):
    train(corpus_file, tmp_path / "run", "--quiet", "--method", "ar", steps=6)
    assert diagnosed(evaluations(tmp_path / "run")[0]).keys() == TEXT


def test_what_is_fitted_to_the_text_is_fitted_once(corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(diagnosis, "KnownText", lambda *args: made.append(args) or known(*args))
    known = __import__("jpeg_dlm.evaluation.known_text", fromlist=["KnownText"]).KnownText
    train(corpus_file, tmp_path / "run", "--quiet", "--method", "ar")
    assert len(evaluations(tmp_path / "run")) == 2 and len(made) == 1


def test_lines_of_progress_show_two_of_the_measures(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(corpus_file, tmp_path / "run", steps=6)
    shown = [word for word in capsys.readouterr().err.split() if word.startswith("diag_")]
    assert sorted(set(shown)) == ["diag_ratio_0.3", "diag_trigram"]
