"""A two-stage method trains its stages in order, and a run stopped in either resumes to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import micro_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.util.files import load_tensors, sha256_file

STAGES = {"encoder-training": 3, "cosmos-codec-training": 5, "": 6}  # steps of each, in order
TENSORS = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")


def command(data: Path, out: Path) -> list[str]:
    sizes = {"train__steps": 6, "train__encoder_steps": 3, "train__save_every": 2, "train__eval_every": 3, "model__depth": 2}
    where = ["--data", str(data), "--out", str(out), "--resume", "--quiet", "--threads", "1", "--device", "cpu"]
    flags = micro_flags("cosmos", objective__codec_steps=5, **sizes)
    return ["train", "--preset", "smoke", "--method", "cosmos", *where, *flags]


def hashes(run: Path, stage: str = "", step: int = 6) -> dict[str, str]:
    folder = run / stage / "checkpoints" / f"step-{step:08d}"
    return {name: sha256_file(folder / name) for name in TENSORS}


def logged(run: Path, stage: str) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(run / stage / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """Drawing takes most of the time of so short a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jpeg_dlm.training.run.plot_metrics", lambda run: None)
        yield


@pytest.fixture(scope="module")
def straight(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs."""
    run = tmp_path_factory.mktemp("stages") / "straight"
    assert main(command(corpus_file, run)) == 0
    return run


def test_every_stage_has_its_own_run(straight: Path):
    for stage, steps in STAGES.items():
        assert [step for step, _ in logged(straight, stage)] == list(range(1, steps + 1))
        assert (straight / stage / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert (straight / "samples").is_dir() and not list(straight.glob("*-training/samples"))
    heldout = [row for row in read_metrics(straight / "cosmos-codec-training" / "metrics.jsonl") if "heldout_ce" in row]
    assert [row["step"] for row in heldout] == [3, 5] and "heldout_accuracy" in heldout[0]


def test_stage_two_has_the_averaged_codec_and_never_changes_it(straight: Path):
    averaged = load_tensors(straight / "cosmos-codec-training" / "checkpoints" / "step-00000005" / "ema.safetensors")
    first, last = (load_tensors(straight / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in (4, 6))
    assert averaged and all(torch.equal(first[name], value) for name, value in averaged.items())
    frozen = [name for name in first if not name.startswith("network.")]
    assert all(torch.equal(first[name], last[name]) for name in frozen)
    assert any(not torch.equal(first[name], last[name]) for name in first if name.startswith("network."))
    assert bool((first["latent_scale"] != 1).all()) and bool((first["latent_mean"] != 0).all())
    trained = load_tensors(straight / "checkpoints" / "step-00000006" / "ema.safetensors")
    assert trained and all(name.startswith("network.") for name in trained)


def test_a_finished_stage_is_not_needed_once_the_next_has_begun(straight: Path, corpus_file: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "cosmos-codec-training")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    assert main(command(corpus_file, run)) == 0
    assert hashes(run) == hashes(straight) and not (run / "cosmos-codec-training").exists()


def test_verify_looks_at_the_text_and_at_every_stage(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    assert main(["verify", str(run)]) == 0
    verdicts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    last = {str(run / stage / "checkpoints" / f"step-{steps:08d}") for stage, steps in STAGES.items()}
    assert {str(run / "data"), str(run / "encoder"), *last} <= verdicts.keys() and set(verdicts.values()) == {"whole"}
    data, codec = run / "data" / "train-00000.bin", run / "cosmos-codec-training" / "checkpoints" / "step-00000005"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    (codec / "manifest.json").unlink()
    assert main(["verify", str(run)]) == 1
    verdicts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {name for name, verdict in verdicts.items() if verdict != "whole"} == {str(data.parent), str(codec)}
