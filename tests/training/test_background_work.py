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
from conftest import micro_flags
from small_runs import launch, prepare_blocks, start
from test_exact_resume import command, final_hashes, losses_by_step

from jpeg_dlm.cli.main import main
from jpeg_dlm.errors import CheckpointError, NonFiniteError
from jpeg_dlm.folders import checkpoint as ck
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training import loop
from jpeg_dlm.training import run as training
from jpeg_dlm.training.loop import Trainer, method_state
from jpeg_dlm.training.metrics import MetricsLog, read_metrics
from jpeg_dlm.training.optimizer_state import optimizer_tensors
from jpeg_dlm.training.record import recorded
from jpeg_dlm.training.signals import StopSignal


@pytest.fixture(scope="module")
def blocks(corpus_file, tmp_path_factory) -> Blocks:
    return Blocks(prepare_blocks(corpus_file, tmp_path_factory.mktemp("blocks") / "blocks"))


@pytest.fixture
def trainer(blocks, tmp_path) -> Trainer:
    (tmp_path / "run").mkdir()
    return start("ar", blocks, tmp_path / "run", Ranks(), train__steps=6, train__save_every=2, train__log_every=1)


def fit(trainer: Trainer) -> None:
    with MetricsLog(trainer.run / "metrics.jsonl", None) as log:
        trainer.fit(log, StopSignal(), lambda step, values: None)


def copies(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    groups = {
        "model": method_state(trainer.method),
        "ema": trainer.ema.shadow,
        "optimizer": optimizer_tensors(trainer.optimizer, trainer.parameters),
    }
    return {name: {key: t.detach().clone() for key, t in group.items()} for name, group in groups.items()}


# ---------------------------------------------------------------- checkpoints


def test_steps_go_on_while_a_checkpoint_is_written(trainer, monkeypatch):
    """The first write ends only after step 4, and holds the state of step 2; the next copy is made after that."""
    stepped_on, events, state = threading.Event(), [], {}
    real_step, real_write, real_copies = Trainer.launch_step, ck.write_manifest, loop.host_copies

    def launch_step(self, *args):
        stats = real_step(self, *args)
        events.append(f"step {self.step}")
        state[self.step] = copies(self)
        if self.step == 4:
            stepped_on.set()
        return stats

    def write_manifest(temp, extra):
        assert stepped_on.wait(60), "training waits for the write"
        real_write(temp, extra)
        events.append(f"wrote {extra['step']}")

    def host_copies(tensors):
        events.append("copy")
        return real_copies(tensors)

    monkeypatch.setattr(Trainer, "launch_step", launch_step)
    monkeypatch.setattr(ck, "write_manifest", write_manifest)
    monkeypatch.setattr(loop, "host_copies", host_copies)
    fit(trainer)
    assert events[:7] == ["step 1", "step 2", "copy", "step 3", "step 4", "wrote 2", "copy"]
    for step in (4, 6):  # keep is 2
        saved = ck.load_checkpoint(trainer.run / "checkpoints" / f"step-{step:08d}", step)
        for name, group in state[step].items():
            tensors = saved.tensors(name)
            assert set(tensors) == set(group) and all(torch.equal(tensors[key], group[key]) for key in group)


def test_what_is_written_is_the_state_of_the_save(trainer, monkeypatch):
    goes_on, real = threading.Event(), ck._write_checkpoint
    monkeypatch.setattr(ck, "_write_checkpoint", lambda *args: (goes_on.wait(60), real(*args)))
    trainer.train_step()
    expected = copies(trainer)
    trainer.save()
    trainer.train_step()
    goes_on.set()
    trainer.finish_saving()
    saved = ck.latest_checkpoint(trainer.run, print)
    assert saved and saved.step == saved.state["step"] == 1
    for name, group in expected.items():
        tensors = saved.tensors(name)
        assert set(tensors) == set(group) and all(torch.equal(tensors[key], group[key]) for key in group)
    assert any(not torch.equal(t, expected["model"][key]) for key, t in method_state(trainer.method).items())


@pytest.mark.parametrize("bad, reached", [(2, 4), (6, 6)], ids=["at the next save", "at the end"])
def test_an_error_of_the_writer_ends_the_run(trainer, monkeypatch, bad, reached):
    real = ck._write_checkpoint

    def write(path, step, *rest):
        if step == bad:
            raise OSError(errno.EROFS, "Read-only file system")
        real(path, step, *rest)

    monkeypatch.setattr(ck, "_write_checkpoint", write)
    with pytest.raises(CheckpointError, match=f"step-0000000{bad}' .Read-only file system.: check the disk"):
        fit(trainer)
    assert trainer.step == reached
    left = [report.step for report in ck.verify_run(trainer.run)]
    assert left == ([] if bad == 2 else [2, 4])


def test_an_error_of_a_step_waits_for_the_checkpoint_before_it(trainer, monkeypatch):
    goes_on, real_write, real_step = threading.Event(), ck._write_checkpoint, Trainer.launch_step

    def launch_step(self, *args):
        if self.step == 3:
            threading.Timer(0.05, goes_on.set).start()
            raise NonFiniteError("not a number")
        return real_step(self, *args)

    monkeypatch.setattr(ck, "_write_checkpoint", lambda *args: (goes_on.wait(60), real_write(*args)))
    monkeypatch.setattr(Trainer, "launch_step", launch_step)
    with pytest.raises(NonFiniteError):
        fit(trainer)
    assert [(report.step, report.error) for report in ck.verify_run(trainer.run)] == [(2, None)]


def test_the_log_is_durable_before_the_checkpoint(trainer, monkeypatch):
    events, real_sync, real_write = [], MetricsLog.sync, ck._write_checkpoint

    def sync(self):
        lines = [row["step"] for row in read_metrics(self.path)]
        real_sync(self)
        events.append(lines)

    def write(path, step, *rest):
        assert set(range(1, step + 1)) <= set(events[-1])
        events.append(step)
        real_write(path, step, *rest)

    monkeypatch.setattr(MetricsLog, "sync", sync)
    monkeypatch.setattr(ck, "_write_checkpoint", write)
    fit(trainer)
    assert events[1::2] == [2, 4, 6]


def test_the_speed_is_that_of_the_steps(trainer, monkeypatch):
    """A step takes a second of this clock, a save a thousand."""
    clock, real_step = [0.0], Trainer.launch_step

    def launch_step(self, *args):
        clock[0] += 1.0
        return real_step(self, *args)

    def save(self, log=None):
        clock[0] += 1000.0

    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Trainer, "launch_step", launch_step)
    monkeypatch.setattr(Trainer, "save", save)
    fit(trainer)
    rows = trainer.stream.rows_per_step
    assert [row["rows_per_s"] for row in read_metrics(trainer.run / "metrics.jsonl")] == [rows] * 6


STALLED = """
import sys, threading, time
from pathlib import Path
from jpeg_dlm.cli.main import main
from jpeg_dlm.folders import checkpoint
from jpeg_dlm.training.loop import Trainer
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
        time.sleep(600)
    return stats
checkpoint.write_manifest, Trainer.launch_step = write_manifest, launch_step
raise SystemExit(main(words))
"""


@pytest.mark.slow
@pytest.mark.parametrize("signals, code", [([signal.SIGKILL], -9), ([signal.SIGINT, signal.SIGTERM], 143)])
def test_an_end_while_a_checkpoint_is_written_changes_no_bit(corpus_file, tmp_path, signals, code):
    """Of 12 steps with saves after 4 and 8: ended after step 11, while step 8 is still being written."""
    flags = micro_flags(encoder__kind="random", encoder__scale="none")
    assert main(command(corpus_file, tmp_path / "straight", *flags)) == 0
    run, mark = tmp_path / "ended", tmp_path / "mark"
    words = command(corpus_file, run, *flags)
    process = subprocess.Popen([sys.executable, "-c", STALLED, str(mark), *words])
    while process.poll() is None and not mark.exists():
        time.sleep(0.01)
    for number in signals:  # the second stop signal ends the run at once
        process.send_signal(number)
    assert process.wait() == code and mark.exists()
    assert [(report.step, report.error) for report in ck.verify_run(run)] == [(4, None)]
    assert len(list((run / "checkpoints").glob(".tmp-*-step-00000008"))) == 1
    assert max(losses_by_step(run)) > 8  # steps went on
    assert main(words) == 0
    assert final_hashes(run, 12) == final_hashes(tmp_path / "straight", 12)
    assert losses_by_step(run) == losses_by_step(tmp_path / "straight")
    assert not list((run / "checkpoints").glob(".tmp-*"))


# ---------------------------------------------------------------- samples and pictures


@pytest.mark.slow
def test_everything_is_there_when_the_command_ends(corpus_file, tmp_path, monkeypatch):
    """The first picture is drawn only after the last step."""
    run, stepped_on = tmp_path / "run", threading.Event()
    real_step, real_plot = Trainer.launch_step, training.plot_metrics
    before = set(threading.enumerate())

    def launch_step(self, *args):
        stats = real_step(self, *args)
        if self.step == 4:
            stepped_on.set()
        return stats

    def plot_metrics(run):
        assert stepped_on.wait(60), "training waits for the picture"
        return real_plot(run)

    monkeypatch.setattr(Trainer, "launch_step", launch_step)
    monkeypatch.setattr(training, "plot_metrics", plot_metrics)
    flags = micro_flags(encoder__kind="random", encoder__scale="none", train__steps=4, train__eval_every=2, train__save_every=4)
    assert main(command(corpus_file, run, *flags)) == 0
    samples = [f"samples/step-0000000{step}.txt" for step in (2, 4)]
    assert {"metrics.png", *samples} <= set(recorded(run)) and main(["verify", str(run)]) == 0
    for name in samples:
        assert len((run / name).read_text("utf-8").split("\n[")) == training.SAMPLE_TEXTS
    assert (run / "metrics.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4]
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("world", [2, 3, 9])
def test_shares_of_the_samples_make_up_all(blocks, tmp_path, monkeypatch, world):
    """What each process draws, added up; with nine processes the last draws nothing."""
    trainer = start("ar", blocks, tmp_path, Ranks())
    tokenizer = blocks.tokenizer()

    def rows(ranks):
        return training.sample_rows(trainer.method, trainer.config, tokenizer, ranks, training.SAMPLE_TEXTS)

    monkeypatch.setattr(training, "end_rows", lambda rows_BL, eos, pad: rows_BL)
    assert torch.equal(sum(rows(Ranks(rank, world)) for rank in range(world)), rows(Ranks()))


SHARED = """
import sys, time
from pathlib import Path
from jpeg_dlm.cli.main import main
from jpeg_dlm.folders import checkpoint
from jpeg_dlm.training import run
from jpeg_dlm.training.loop import Trainer
mark, words = Path(sys.argv[1]), sys.argv[2:]
real_step, real_manifest, real_plot = Trainer.launch_step, checkpoint.write_manifest, run.plot_metrics
def later(real):
    def wait(*args):
        for _ in range(6000):
            if mark.exists():
                return real(*args)
            time.sleep(0.01)
        raise RuntimeError("the other process waits")
    return wait
def launch_step(self, *args):
    stats = real_step(self, *args)
    if self.step == 4 and self.ranks.rank == 1:
        mark.touch()
    return stats
Trainer.launch_step, run.plot_metrics, checkpoint.write_manifest = launch_step, later(real_plot), later(real_manifest)
raise SystemExit(main(words))
"""


@pytest.mark.slow
def test_two_processes_draw_the_samples_of_one_and_none_waits_for_disk_or_picture(corpus_file, tmp_path):
    """The main process draws and writes step 2 only once the other has taken step 4."""
    changes = {"train__steps": 5, "train__eval_every": 2, "train__save_every": 2, "encoder__kind": "random"}
    rates = ["--train.lr", "1e-3", "--train.codec-lr", "1e-3", "--train.warmup", "100"]  # see test_two_processes
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*command(corpus_file, one, *micro_flags(train__batch=8, **changes)), *rates]) == 0
    words = [*command(corpus_file, two, *micro_flags(train__batch=4, **changes)), *rates]
    done = launch(str(script), str(tmp_path / "mark"), *words)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    names = sorted(path.name for path in (one / "samples").iterdir())
    assert names == [f"step-0000000{step}.txt" for step in (2, 4, 5)]
    for name in names:
        assert (two / "samples" / name).read_text("utf-8") == (one / "samples" / name).read_text("utf-8")
    assert [(report.step, report.error) for report in ck.verify_run(two)] == [(4, None), (5, None)]
    assert (two / "metrics.png").read_bytes().endswith(b"IEND\xaeB`\x82")
