"""Training goes on while checkpoints are written and pictures drawn, and nothing of them is lost."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from interrupted_runs import end_state, train_words
from small_runs import start

from jpeg_dlm.checkpoints import checkpoint as ck
from jpeg_dlm.cli.main import main
from jpeg_dlm.training import run as training
from jpeg_dlm.training import sharding
from jpeg_dlm.training.metrics import MetricsLog, read_metrics
from jpeg_dlm.training.optim import optimizer_state
from jpeg_dlm.training.signals import StopSignal
from jpeg_dlm.training.trainer import Trainer, method_state
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.errors import CheckpointError


@pytest.fixture
def trainer(blocks, tmp_path) -> Trainer:
    (tmp_path / "run").mkdir()
    return start("ar", blocks, tmp_path / "run", train__steps=6, train__save_every=2, train__log_every=1, train__eval_every=0)


def fit(trainer: Trainer) -> None:
    blocks = trainer.stream.blocks
    context = training.RunContext(trainer.run, blocks, blocks, Ranks(), Console(quiet=True), StopSignal())
    training.train_loop(trainer, context, None, None)


def copies(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    groups = {
        "model": method_state(trainer.method),
        "ema": trainer.ema.shadow,
        "optimizer": optimizer_state(trainer.optimizers, trainer.parameters),
    }
    return {name: {key: t.detach().clone() for key, t in group.items()} for name, group in groups.items()}


# ---------------------------------------------------------------- checkpoints


def test_steps_go_on_while_a_checkpoint_is_written(trainer, monkeypatch):
    """The first write ends only after step 4, and holds the state of step 2; the next copy is made after that."""
    stepped_on, events, state = threading.Event(), [], {}
    real_step, real_write, real_copies = Trainer.launch_step, ck.write_manifest, sharding.host_copies

    def launch_step(self, *args):
        stats = real_step(self, *args)
        events.append(f"step {self.step}")
        state[self.step] = copies(self)
        if self.step == 4:
            stepped_on.set()
        return stats

    def write_manifest(temp, extra):
        assert stepped_on.wait(600), "training waits for the write"
        real_write(temp, extra)
        events.append(f"wrote {extra['step']}")

    def host_copies(tensors, **keep):
        events.append("copy")
        return real_copies(tensors, **keep)

    monkeypatch.setattr(Trainer, "launch_step", launch_step)
    monkeypatch.setattr(ck, "write_manifest", write_manifest)
    monkeypatch.setattr(sharding, "host_copies", host_copies)
    fit(trainer)
    assert events[:7] == ["step 1", "step 2", *["copy"] * 3, "step 3", "step 4"] and events[7:9] == ["wrote 2", "copy"]
    for step in (4, 6):  # keep is 2
        saved = ck.load_checkpoint(trainer.run / "checkpoints" / f"step-{step:08d}", step)
        for name, group in state[step].items():
            tensors = saved.tensors(name)
            assert set(tensors) == set(group) and all(torch.equal(tensors[key], group[key]) for key in group)


@pytest.mark.parametrize("bad, reached", [(2, 4), (6, 6)], ids=["at the next save", "at the end"])
def test_an_error_of_the_writer_ends_the_run(trainer, monkeypatch, bad, reached):
    real = ck.write_manifest

    def write(temp, extra):
        if extra["step"] == bad:
            raise OSError(errno.EROFS, "Read-only file system")
        real(temp, extra)

    monkeypatch.setattr(ck, "write_manifest", write)
    with pytest.raises(CheckpointError, match=f"step-0000000{bad}' .Read-only file system."):
        fit(trainer)
    assert trainer.step == reached
    assert ck.newest_step(trainer.run) == (None if bad == 2 else 4)


def test_the_log_is_durable_before_the_checkpoint(trainer, monkeypatch):
    events, real_sync, real_write = [], MetricsLog.sync, ck.write_manifest

    def sync(self):
        lines = [row["step"] for row in read_metrics(self.path)]
        real_sync(self)
        events.append(lines)

    def write(temp, extra):
        assert set(range(1, extra["step"] + 1)) <= set(events[-1])
        events.append(extra["step"])
        real_write(temp, extra)

    monkeypatch.setattr(MetricsLog, "sync", sync)
    monkeypatch.setattr(ck, "write_manifest", write)
    fit(trainer)
    assert events[1::2] == [2, 4, 6]


STALLED = """
import sys, threading, time
from pathlib import Path
from jpeg_dlm.cli.main import main
from jpeg_dlm.checkpoints import checkpoint
from jpeg_dlm.training.trainer import Trainer
mark, words, stalled = Path(sys.argv[1]), sys.argv[2:], threading.Event()
real_step, real_manifest = Trainer.launch_step, checkpoint.write_manifest
def write_manifest(temp, extra):
    if extra["step"] == 8:
        stalled.set()
        time.sleep(600)  # all of a checkpoint but its manifest
    real_manifest(temp, extra)
def launch_step(self, *args):
    stats = real_step(self, *args)
    if self.step == 11:
        stalled.wait()
        mark.touch()
        while True:
            time.sleep(0.05)  # a signal just before one long sleep would be handled only after it
    return stats
checkpoint.write_manifest, Trainer.launch_step = write_manifest, launch_step
raise SystemExit(main(words))
"""


@pytest.mark.slow
@pytest.mark.parametrize("signals, code", [([signal.SIGKILL], -9), ([signal.SIGINT, signal.SIGTERM], 143)])
def test_an_end_while_a_checkpoint_is_written_changes_no_bit(corpus_file, tmp_path, signals, code):
    """Of 12 steps with saves after 4 and 8: ended after step 11, while step 8 is still being written."""
    run, mark, changes = tmp_path / "ended", tmp_path / "mark", {"train__steps": 12, "train__save_every": 4}
    assert main(train_words("jpeg-dlm", corpus_file, tmp_path / "straight", **changes)) == 0
    words = train_words("jpeg-dlm", corpus_file, run, **changes)
    process = subprocess.Popen([sys.executable, "-c", STALLED, str(mark), *words])
    while process.poll() is None and not mark.exists():
        time.sleep(0.01)
    for number in signals:  # the second stop signal ends the run at once
        process.send_signal(number)
    assert process.wait(600) == code and mark.exists()
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert len(list((run / "checkpoints").glob(".tmp-*-step-00000008"))) == 1
    assert max(row["step"] for row in read_metrics(run / "metrics.jsonl")) > 8  # steps went on
    assert main(words) == 0
    assert end_state(run) == end_state(tmp_path / "straight")
    assert not list((run / "checkpoints").glob(".tmp-*"))


# ---------------------------------------------------------------- samples and pictures


@pytest.mark.parametrize("world", [2, 3, 9])
def test_shares_of_the_samples_make_up_all(blocks, tmp_path, monkeypatch, world):
    """What each process draws, added up; with nine processes the last draws nothing."""
    trainer = start("ar", blocks, tmp_path)
    tokenizer = blocks.tokenizer()

    def rows(ranks):
        return training.sample_rows(trainer.method, trainer.config, tokenizer, ranks, training.SAMPLE_TEXTS)

    monkeypatch.setattr(training, "end_rows", lambda rows_BL, eos, pad: rows_BL)
    assert torch.equal(sum(rows(Ranks(rank, world)) for rank in range(world)), rows(Ranks()))
