"""A two-stage method trains its stages in order, and a run stopped in either resumes to the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import micro_flags

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.files import load_tensors, sha256_file
from jpeg_dlm.methods.cosmos import Cosmos
from jpeg_dlm.training.loop import Trainer
from jpeg_dlm.training.metrics import read_metrics

STAGES = {"encoder-training": 3, "cosmos-codec-training": 5, "": 6}  # steps of each, in order
TENSORS = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
LEFT_OUT = ("--model.freq-dim", "--objective.sigreg-slices")  # options of JPEG-DLM alone


def command(data: Path, out: Path, *extra: str, resume: bool = True, **changes: object) -> list[str]:
    sizes = {"train__steps": 6, "train__encoder_steps": 3, "train__save_every": 2, "train__eval_every": 3, "model__depth": 2}
    flags = micro_flags(**(sizes | changes))
    pairs = [pair for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] not in LEFT_OUT]
    where = ["--data", str(data), "--out", str(out), "--quiet", "--threads", "1", "--device", "cpu"]
    words = ["train", "--preset", "smoke", "--method", "cosmos", *where, *(word for pair in pairs for word in pair)]
    return [*words, "--objective.codec-steps", "5", *(["--resume"] if resume else []), *extra]


def hashes(run: Path, stage: str = "", step: int = 6) -> dict[str, str]:
    folder = run / stage / "checkpoints" / f"step-{step:08d}"
    return {name: sha256_file(folder / name) for name in TENSORS}


def logged(run: Path, stage: str) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(run / stage / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """Drawing takes most of the time of so short a run; that there is something to draw is still checked."""

    def plot(run: Path) -> None:
        assert list(read_metrics(run / "metrics.jsonl"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jpeg_dlm.training.run.plot_metrics", plot)
        yield


@pytest.fixture(scope="module")
def straight(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs."""
    run = tmp_path_factory.mktemp("stages") / "straight"
    assert main(command(corpus_file, run, resume=False)) == 0
    return run


@pytest.fixture(scope="module")
def cached(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("stages") / "cached"
    assert main(command(corpus_file, run, "--data.cache-features", "true")) == 0
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


@pytest.mark.parametrize("extra", [[], ["--data.cache-features", "true"]])
def test_stopping_in_each_stage_changes_no_bit(corpus_file, tmp_path, straight, cached, extra, monkeypatch):
    real_step, calls = Trainer.launch_step, 0

    def step_with_signal(self, *args):
        nonlocal calls
        calls += 1
        stats = real_step(self, *args)
        if calls in (2, 5, 8, 11):  # in the encoder, in the codec, with the codec's last step, in the diffusion model
            os.kill(os.getpid(), signal.SIGTERM)
        return stats

    monkeypatch.setattr(Trainer, "launch_step", step_with_signal)
    codes = [main(command(corpus_file, tmp_path / "broken", *extra)) for _ in range(5)]
    assert codes == [143, 143, 143, 143, 0] and calls == sum(STAGES.values())
    whole = cached if extra else straight
    for stage, steps in STAGES.items():
        assert hashes(tmp_path / "broken", stage, steps) == hashes(whole, stage, steps)
        assert logged(tmp_path / "broken", stage) == logged(whole, stage)


def test_one_feature_cache_serves_both_stages(cached: Path):
    assert [path.parent for path in cached.rglob("features.bin")] == [cached / "features"]


def test_a_finished_stage_is_not_needed_once_the_next_has_begun(straight: Path, corpus_file: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "cosmos-codec-training")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    assert main(command(corpus_file, run)) == 0
    assert hashes(run) == hashes(straight) and not (run / "cosmos-codec-training").exists()


def test_a_run_that_only_finished_its_first_stage_counts_as_a_run(straight, corpus_file, tmp_path, capsys):
    shutil.copytree(straight / "cosmos-codec-training", tmp_path / "run" / "cosmos-codec-training")
    assert main(command(corpus_file, tmp_path / "run", resume=False)) == 2
    assert "--resume" in capsys.readouterr().err


def test_stage_two_refuses_the_checkpoint_of_stage_one(straight: Path, corpus_file: Path, tmp_path: Path, capsys):
    run = tmp_path / "run"
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(straight / "cosmos-codec-training" / "checkpoints", run / "checkpoints")
    assert main(command(corpus_file, run)) == 1
    assert "another model or method" in capsys.readouterr().err


def test_stage_one_alone_is_the_same_stage(straight: Path, corpus_file: Path, tmp_path: Path):
    words = command(corpus_file, tmp_path / "codec", "--encoder.name", str(straight / "encoder"), train__steps=5)
    words[words.index("cosmos")] = "cosmos-codec"
    assert main(words) == 0
    ours = load_tensors(tmp_path / "codec" / "checkpoints" / "step-00000005" / "ema.safetensors")
    theirs = load_tensors(straight / "cosmos-codec-training" / "checkpoints" / "step-00000005" / "ema.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_verify_looks_at_the_text_and_at_every_stage(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def verdicts() -> dict[str, str]:
        lines = capsys.readouterr().out.splitlines()
        return {line.split()[0]: line.split(" MB  ")[1] for line in lines}

    run = tmp_path / "run"
    shutil.copytree(straight, run)
    assert main(["verify", str(run)]) == 0
    found = verdicts()
    last = {str(Path(stage) / "checkpoints" / f"step-{steps:08d}") for stage, steps in STAGES.items()}
    assert {"data", *last} < found.keys() and set(found.values()) == {"whole", "readable"}

    hurt = [
        run / "data" / "train-00000.bin",
        run / "cosmos-codec-training" / "checkpoints" / "step-00000005" / "ema.safetensors",
    ]
    for path in hurt:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert main(["verify", str(run)]) == 1
    damaged = {name: verdict for name, verdict in verdicts().items() if verdict not in ("whole", "readable")}
    assert damaged.keys() == {"data", str(hurt[1].parent.relative_to(run))}
    assert all(str(path) in verdict for path, verdict in zip(hurt, damaged.values(), strict=True))


def test_a_model_folder_holds_both_stages(straight: Path, tmp_path: Path):
    model = load(straight)
    again = load(model.save(tmp_path / "model"))
    assert isinstance(again.method, Cosmos)
    state, other = model.method.export_state(), again.method.export_state()
    assert state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())
    assert again.generate(3) == model.generate(3)


@pytest.mark.slow
def test_sigkill_at_random_moments_changes_no_bit(corpus_file: Path, tmp_path: Path, straight: Path):
    program = [sys.executable, "-m", "jpeg_dlm.cli.main", *command(corpus_file, tmp_path / "killed")]
    rng, run, kills = random.Random(0), tmp_path / "killed", 0
    for stage, steps in STAGES.items():
        process = subprocess.Popen(program)
        target = rng.randint(1, steps - 1)
        while process.poll() is None and not _reached(run / stage, target):
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert subprocess.run(program).returncode == 0
    assert kills == len(STAGES)
    for stage, steps in STAGES.items():
        assert hashes(run, stage, steps) == hashes(straight, stage, steps)


@pytest.mark.slow
def test_two_processes_train_the_stages_of_one(corpus_file: Path, tmp_path: Path):
    # Slow to start, as Adam makes a step of full size out of gradients that are rounding alone.
    rates = ["--train.lr", "1e-3", "--train.codec-lr", "1e-3", "--train.warmup", "100", "--encoder.kind", "random"]
    assert main(command(corpus_file, tmp_path / "one", *rates, train__batch=8)) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = command(corpus_file, tmp_path / "two", *rates, train__batch=4)
    done = subprocess.run(
        [*launch, "-m", "jpeg_dlm.cli.main", *words],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for stage, step in (("cosmos-codec-training", 5), ("", 6)):
        one, two = (
            load_tensors(tmp_path / run / stage / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
            for run in ("one", "two")
        )
        # The scale of a coordinate that hardly moves is large, and so is its rounding.
        assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-5) for name in one)


def _reached(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    return path.is_file() and path.read_bytes().count(b'"loss"') >= step
