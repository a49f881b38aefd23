"""The diagnosis of a run: its measures, that it does not affect training, and that it is logged once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import MICRO, micro_flags
from matplotlib.image import imread

from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.files import sha256_file
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.common.denoising import TIMES
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.known_text import KnownText
from jpeg_dlm.training import diagnosis
from jpeg_dlm.training import run as training
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.diagnosis_plot import diagnoses, plot_diagnosis
from jpeg_dlm.training.metrics import MetricsLog, read_metrics
from jpeg_dlm.training.telling import training_progress

TEXT = {f"{name}{of}" for name in ("words", "distinct", "trigram", "copied") for of in ("", "_real")} | {"trigram_shuffled"}
LATENT = {f"{kind}_{t:g}" for kind in ("error", "linear", "ratio", "accuracy") for t in TIMES} | {"rank", "rank_joint"}

SIZES = {"data.vocab_size": 300, "data.token_len": 12, "train.steps": 12}


def train(data: Path, out: Path, *flags: str, diagnose: bool = True) -> None:
    """A micro run without pictures, which take longer than all of it."""
    words = ["train", "--quiet", "--preset", "smoke", "--data", str(data), "--out", str(out), "--threads", "1"]
    options = micro_flags(train__diagnose=str(diagnose).lower(), encoder__kind="random", encoder__scale="none")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "plot_if_measured", lambda run: None)
        assert main([*words, "--device", "cpu", *options, *flags]) == 0


def evaluations(run: Path) -> list[dict]:
    return [row for row in read_metrics(run / "metrics.jsonl") if any(name.startswith("heldout_") for name in row)]


def diagnosed(row: dict) -> dict[str, float]:
    return {name.removeprefix("diag_"): value for name, value in row.items() if name.startswith("diag_")}


@pytest.fixture(scope="module")
def run(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed") / "run"
    train(corpus_file, folder)
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


def test_the_weights_are_the_same_without(run: Path, corpus_file: Path, tmp_path: Path):
    train(corpus_file, tmp_path / "run", diagnose=False)
    assert not any(map(diagnosed, evaluations(tmp_path / "run")))
    for name in ("model", "ema", "optimizer"):
        files = [folder / "checkpoints" / "step-00000012" / f"{name}.safetensors" for folder in (run, tmp_path / "run")]
        assert sha256_file(files[0]) == sha256_file(files[1])


def test_resuming_leaves_each_line_once(run: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed between the evaluation of step 6 and the checkpoint of step 8, so that the evaluation runs again."""
    from jpeg_dlm.training.loop import Trainer

    real_step = Trainer.launch_step

    def dying(self, *args):
        if self.step == 7 and self.config.method == "jpeg-dlm":
            raise RuntimeError("killed")
        return real_step(self, *args)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(Trainer, "launch_step", dying)
        train(corpus_file, tmp_path / "run", "--debug")
    assert [row["step"] for row in evaluations(tmp_path / "run")] == [6]
    train(corpus_file, tmp_path / "run", "--resume")
    straight, again = evaluations(run), evaluations(tmp_path / "run")
    assert [row["step"] for row in again] == [6, 12]
    assert list(map(diagnosed, again)) == list(map(diagnosed, straight))


def test_methods_without_latents_are_judged_by_their_text(run: Path, monkeypatch: pytest.MonkeyPatch):
    """And the training text is counted once, however often they are evaluated."""
    made = []
    monkeypatch.setattr(diagnosis, "KnownText", lambda *args: made.append(args) or KnownText(*args))
    blocks, heldout = Blocks(run / "data", "train"), Blocks(run / "data", "heldout")
    config = for_method(override(preset("smoke"), SIZES), "ar")
    stream = BatchStream(blocks, config.train, torch.device("cpu"))
    judged = diagnosis.Diagnosis(stream, heldout, blocks.tokenizer())
    first, second = (judged(build_method(config), blocks.rows([i, i + 1])) for i in (0, 5))
    assert first.keys() == second.keys() == {f"diag_{name}" for name in TEXT} and len(made) == 1
    assert first["diag_copied"] == second["diag_copied"] == 1.0 and first["diag_trigram"] != second["diag_trigram"]


@torch.no_grad()
def test_a_decoder_is_diagnosed_on_latents_of_a_stochastic_sampler(run: Path):
    blocks, heldout = Blocks(run / "data", "train"), Blocks(run / "data", "heldout")
    options = {"model.decoder": "two_pass", "sampler.solver": "sde", "encoder.kind": "random", "encoder.scale": "none"}
    config = override(preset("smoke"), MICRO | SIZES | options)
    method = build_method(config, build_encoder(config.encoder, config.data.vocab_size)).eval()
    judged = diagnosis.Diagnosis(BatchStream(blocks, config.train, torch.device("cpu")), heldout, blocks.tokenizer())
    first, again = judged.decoder(method), judged.decoder(method)
    assert math.isfinite(first["decoder_confidence_generated"]) and first == again


def test_lines_of_progress_show_two_of_the_measures(run: Path, capsys: pytest.CaptureFixture[str]):
    with training_progress(Console(), override(preset("smoke"), SIZES), 0, 8) as tell:
        tell(6, evaluations(run)[0])
    shown = [word for word in capsys.readouterr().err.split() if word.startswith("diag_")]
    assert shown == ["diag_ratio_0.3", "diag_trigram"]


def test_pictures(run: Path, tmp_path: Path):
    """Of latents and text, of text alone, and none where nothing was diagnosed."""
    training.plot_if_measured(run)
    assert imread(run / "diagnosis.png").shape[0] > 600
    assert diagnoses(run / "metrics.jsonl").keys() == {6, 12}
    for name, kept in (("text", TEXT), ("none", set())):
        (tmp_path / name).mkdir()
        with MetricsLog(tmp_path / name / "metrics.jsonl", None) as log:
            for row in evaluations(run):
                log.log(row["step"], {key: value for key, value in row.items() if key.removeprefix("diag_") in kept})
    assert plot_diagnosis(tmp_path / "none") is None
    path = plot_diagnosis(tmp_path / "text")
    assert path and 300 < imread(path).shape[0] < 400
