"""A run that is killed and resumed ends with the same bits as one that is not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import micro_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.files import sha256_file
from jpeg_dlm.training.metrics import read_metrics

TENSORS = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")


def command(data: Path, out: Path, *flags: str) -> list[str]:
    return [
        "train", "--preset", "smoke", "--data", str(data), "--out", str(out), "--resume", "--quiet", "--threads", "1",
        "--device", "cpu", *flags,
    ]  # fmt: skip


def final_hashes(run: Path, step: int) -> dict[str, str]:
    return {name: sha256_file(run / "checkpoints" / f"step-{step:08d}" / name) for name in TENSORS}


def losses_by_step(run: Path) -> dict[int, float]:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert len({row["step"] for row in rows}) == len(rows), "a step was logged twice"
    return {row["step"]: row["loss"] for row in rows}


BF16 = pytest.param(["--train.precision", "bf16"], marks=pytest.mark.slow)  # emulated on many CPUs


CONTEXT = ["--model.context-blocks", "2", "--data.packing", "padded", "--data.cache-features", "true"]

NO_ENCODER = ["--encoder.kind", "none", "--objective.flow-to-compressor", "1", "--objective.time-adaptive", "true"]
PLAIN_CASES = [[], ["--train.accumulation", "2"], ["--data.cache-features", "true"]]


@pytest.mark.parametrize("extra", [*PLAIN_CASES, CONTEXT, NO_ENCODER, BF16])
def test_stopping_and_resuming_changes_no_bit(corpus_file: Path, tmp_path: Path, extra: list[str], monkeypatch):
    """In one process: the second half starts from the checkpoint that the first half left."""
    flags = [*micro_flags(), *extra]
    assert main(command(corpus_file, tmp_path / "straight", *flags)) == 0

    from jpeg_dlm.training.loop import Trainer

    real_step = Trainer.launch_step
    calls = 0

    def step_with_signal(self, *args):
        nonlocal calls
        calls += 1
        stats = real_step(self, *args)
        if calls in (3, 9):  # once within the encoder's pretraining, once within the main training
            os.kill(os.getpid(), signal.SIGTERM)
        return stats

    monkeypatch.setattr(Trainer, "launch_step", step_with_signal)
    codes = [main(command(corpus_file, tmp_path / "broken", *flags)) for _ in range(3)]
    assert codes == [143, 143, 0]
    assert final_hashes(tmp_path / "broken", 12) == final_hashes(tmp_path / "straight", 12)
    assert losses_by_step(tmp_path / "broken") == losses_by_step(tmp_path / "straight")


@pytest.mark.slow
def test_sigkill_at_random_moments_changes_no_bit(corpus_file: Path, tmp_path: Path):
    flags = micro_flags(train__steps=60, train__save_every=3)
    program = [sys.executable, "-m", "jpeg_dlm.cli.main"]
    subprocess.run([*program, *command(corpus_file, tmp_path / "straight", *flags)], check=True)
    rng, run, kills = random.Random(0), tmp_path / "killed", 0
    for _ in range(6):
        process = subprocess.Popen([*program, *command(corpus_file, run, *flags)])
        target = rng.randint(5, 40)
        while process.poll() is None and not _reached(run, target):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert subprocess.run([*program, *command(corpus_file, run, *flags)]).returncode == 0
    assert kills >= 3
    assert final_hashes(run, 60) == final_hashes(tmp_path / "straight", 60)
    assert losses_by_step(run) == losses_by_step(tmp_path / "straight")


def _reached(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    if not path.is_file():
        return False
    lines = path.read_bytes().split(b"\n")
    return any(line and json.loads(line)["step"] >= step for line in lines[:-1])
