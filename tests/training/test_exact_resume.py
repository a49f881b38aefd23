"""A run that is stopped, cut or killed and resumed ends with the same bits as one that is not: weights, averages, logs."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
from interrupted_runs import (
    MOMENTS,
    end_state,
    hurried,
    interruptions,
    resume_is_exact,
    signaled,
    train_to_the_end,
    train_words,
)

from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.registry import names
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.metrics import read_metrics

BF16 = {"train__accumulation": 2, "train__precision": "bf16"}


@pytest.mark.parametrize("changes", [{"train__eval_every": 0}, pytest.param(BF16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("method", names("system", "stage"))
def test_interrupted_in_every_stage(method, changes, blocks, tmp_path):
    assert resume_is_exact(method, blocks.folder, tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder__kind": "small", "data__cache_features": "true"},  # with the stage of the encoder
        {"train__checkpoint_layers": "true"},
        {"train__optimizer": "muon"},
    ],
)
def test_interrupted_with_options(changes, blocks, tmp_path):
    assert resume_is_exact("jpeg-dlm", blocks.folder, tmp_path, **changes)


@pytest.mark.parametrize("lost", ["trainer.copy_tensors", "optim.load_optimizer_state"])
def test_lost_state_is_noticed(lost, blocks, tmp_path):
    with patch(f"jpeg_dlm.training.{lost}", lambda *args: None):
        assert not resume_is_exact("ar", blocks.folder, tmp_path, train__eval_every=0)


def test_each_row_once_per_epoch(blocks, tmp_path, monkeypatch):
    """Every row of an epoch is used exactly once, however often the run is interrupted."""
    steps, count = 14, len(blocks)
    each = -(-count * 2 // steps // 2) + 2  # two whole epochs and a part
    moments = random.Random(0).sample(range(1, steps), 4)
    changes = {"train__steps": steps, "train__batch": each, "train__accumulation": 2, "train__save_every": 4}
    words = train_words("ar", blocks.folder, tmp_path / "run", train__eval_every=0, **changes)
    real, fed = BatchStream.batch, {}
    with hurried(), interruptions(terms=set(moments[:1]), cuts=set(moments[1:])) as taken:

        def batch(self, rows):
            fed.setdefault(len(taken), []).extend(rows)
            return real(self, rows)

        monkeypatch.setattr(BatchStream, "batch", batch)
        assert train_to_the_end(words) == 4
    assert len(taken) > steps  # some steps were undone by a cut and taken again
    learned = {step: fed[call] for call, step in enumerate(taken, 1)}  # the last time counts
    assert all(fed[call] == learned[step] for call, step in enumerate(taken, 1)) and sorted(learned) == list(range(steps))
    rows = [row for step in range(steps) for row in learned[step]]
    for first in (0, count):
        assert sorted(rows[first : first + count]) == list(range(count))
    assert rows[:count] != rows[count : 2 * count] and len(set(rows[2 * count :])) == len(rows) - 2 * count > 0
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, steps + 1))


# ---------------------------------------------------------------- real processes


@pytest.fixture(scope="module")
def straight(corpus_file, tmp_path_factory) -> dict[str, object]:
    run = tmp_path_factory.mktemp("runs") / "straight"
    with hurried():
        train_to_the_end(train_words("jpeg-dlm", corpus_file, run))
    return end_state(run)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_at_any_moment_changes_no_bit(number, moment, corpus_file, straight, tmp_path):
    code = signaled(number, moment, corpus_file, tmp_path / "run")
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    assert end_state(tmp_path / "run") == straight


@pytest.mark.slow
def test_sigkill_at_random_moments_changes_no_bit(corpus_file, tmp_path):
    """In a run of three stages, one kill in each; a run that is done before waits for it."""
    script = "import sys, time; from jpeg_dlm.cli.main import main; main(sys.argv[1:]); time.sleep(600)"
    words = {
        run: train_words("cosmos", corpus_file, tmp_path / run, encoder__kind="small", train__steps=20, train__save_every=2)
        for run in ("straight", "killed")
    }
    assert main(words["straight"]) == 0
    rng = random.Random(0)
    for stage, steps in {"encoder-training": 4, "cosmos-codec-training": 3, ".": 20}.items():
        process = subprocess.Popen([sys.executable, "-c", script, *words["killed"]])
        target, log = rng.randint(1, steps - 1), tmp_path / "killed" / stage / "metrics.jsonl"
        while process.poll() is None and not (log.is_file() and log.read_bytes().count(b'"loss"') >= target):
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert main(words["killed"]) == 0
    assert end_state(tmp_path / "killed") == end_state(tmp_path / "straight")
