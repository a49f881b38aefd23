"""A two-stage method trains its stages in order, and a run stopped in either resumes to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import largest_difference, weights

from jpeg_dlm.cli.main import main
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.util.files import load_tensors

STAGES = {"encoder-training": 4, "cosmos-codec-training": 8, "": 12}  # steps of each, in order


@pytest.fixture(scope="module")
def straight(micro_folders) -> Path:
    """A run that nothing disturbs."""
    return micro_folders.run("cosmos", objective__codec_steps=8)


def test_every_stage_has_its_own_run(straight: Path):
    for stage, steps in STAGES.items():
        logged = [row["step"] for row in read_metrics(straight / stage / "metrics.jsonl") if "loss" in row]
        assert logged == list(range(1, steps + 1))
        assert (straight / stage / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert (straight / "samples").is_dir() and not list(straight.glob("*-training/samples"))
    heldout = [row for row in read_metrics(straight / "cosmos-codec-training" / "metrics.jsonl") if "heldout_ce" in row]
    assert [row["step"] for row in heldout] == [6, 8] and "heldout_accuracy" in heldout[0]


def test_stage_two_has_the_averaged_codec_and_never_changes_it(straight: Path):
    averaged = load_tensors(straight / "cosmos-codec-training" / "checkpoints" / "step-00000008" / "ema.safetensors")
    first, last = (load_tensors(straight / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in (8, 12))
    assert averaged and all(torch.equal(first[name], value) for name, value in averaged.items())
    frozen = [name for name in first if not name.startswith("network.")]
    assert all(torch.equal(first[name], last[name]) for name in frozen)
    assert any(not torch.equal(first[name], last[name]) for name in first if name.startswith("network."))
    assert bool((first["latent_scale"] != 1).all()) and bool((first["latent_mean"] != 0).all())
    trained = load_tensors(straight / "checkpoints" / "step-00000012" / "ema.safetensors")
    assert trained and all(name.startswith("network.") for name in trained)


def test_a_finished_stage_is_not_needed_once_the_next_has_begun(straight: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "cosmos-codec-training")
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    assert main(["train", "--out", str(run), "--resume", "--quiet"]) == 0
    assert largest_difference(weights(run, 12), weights(straight, 12)) == 0 and not (run / "cosmos-codec-training").exists()


def test_verify_looks_at_the_text_and_at_every_stage(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    assert main(["verify", str(run)]) == 0
    verdicts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    last = {str(run / stage / "checkpoints" / f"step-{steps:08d}") for stage, steps in STAGES.items()}
    assert {str(run / "data"), str(run / "encoder"), *last} <= verdicts.keys() and set(verdicts.values()) == {"whole"}
    data, codec = run / "data" / "train-00000.bin", run / "cosmos-codec-training" / "checkpoints" / "step-00000008"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    (codec / "manifest.json").unlink()
    assert main(["verify", str(run)]) == 1
    verdicts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {name for name, verdict in verdicts.items() if verdict != "whole"} == {str(data.parent), str(codec)}
