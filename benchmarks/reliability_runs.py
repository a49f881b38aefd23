"""Micro training runs that are interrupted in every way and compared with undisturbed ones.

Text and sizes are those of the tests; a run takes a second and includes every part of training.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import numpy as np

from jpeg_dlm import files
from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import flatten, to_dict
from jpeg_dlm.files import sha256_file
from jpeg_dlm.folders import checkpoint
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.training.loop import Launched, Trainer
from jpeg_dlm.training.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conftest import MICRO, made_up_text

STEPS = 4
SIZES = MICRO | {
    "encoder.kind": "random", "model.depth": 2, "model.dropout": 0.1, "objective.codec_steps": 3,
    "train.steps": STEPS, "train.save_every": 100, "train.eval_every": 3, "train.spike_alarm": 0, "train.collapse_alarm": 0,
}  # fmt: skip
VARIANTS = {"plain": {}, "accumulation": {"train__accumulation": 2}, "bf16": {"train__precision": "bf16"}}
SOAK_EVERY = 25  # steps between measurements
LINGER_S = 0.5  # pause after a moment is announced, so that a signal arrives within it


# ---------------------------------------------------------------- runs and their ends


def write_text(folder: Path) -> Path:
    """Write the training text of the runs to a file."""
    path = folder / "stories.txt"
    path.write_text(made_up_text(documents=20), "utf-8")
    return path


def prepare_text(folder: Path) -> Path:
    """Prepare the same text as blocks once for all runs."""
    sizes = ["--data.vocab-size", str(MICRO["data.vocab_size"]), "--data.token-len", str(MICRO["data.token_len"])]
    words = ["prepare", str(write_text(folder)), "--preset", "smoke", "--out", str(folder / "blocks"), "--quiet", *sizes]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0
    return folder / "blocks"


@cache
def options(method: str) -> frozenset[str]:
    return frozenset(flatten(to_dict(for_method(preset("smoke"), method))))


def train_words(method: str, data: Path, run: Path, **changes: object) -> list[str]:
    """Return the command that starts or resumes a micro run of a method, with those sizes that the method has."""
    sizes = SIZES | {name.replace("__", "."): value for name, value in changes.items()}
    flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in sizes.items() if name in options(method)]
    where = ["--data", str(data), "--out", str(run), "--resume", "--quiet", "--threads", "1", "--device", "cpu"]
    return ["train", "--preset", "smoke", "--method", method, *where, *itertools.chain.from_iterable(flags)]


def end_state(run: Path) -> dict[str, object]:
    """Return hashes of the last weights, averages and optimizer state of every stage, and its logged losses and rates."""
    state: dict[str, object] = {}
    for stage in (run, *sorted(run.glob("*-training"))):
        last = max((stage / "checkpoints").glob("step-*"))
        state |= {str(path.relative_to(run)): sha256_file(path) for path in sorted(last.glob("*.safetensors"))}
        state[f"{stage.relative_to(run)}/metrics"] = [_learned(row) for row in read_metrics(stage / "metrics.jsonl")]
    return state


def _learned(row: dict[str, float]) -> dict[str, float]:
    """Keep the values that do not depend on the clock."""
    return {k: v for k, v in row.items() if k in ("step", "loss", "grad_norm") or k.startswith(("lr_", "heldout_"))}


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Skip plots and garbage collection of loaded modules, which take most of the time of such short runs."""
    gc.freeze()
    try:
        with patch("jpeg_dlm.training.run.plot_metrics", lambda run: None):
            yield
    finally:
        gc.unfreeze()


# ---------------------------------------------------------------- interruptions within one process


class Cut(BaseException):
    """Ends a run at once without saving, as a kill does."""


@contextlib.contextmanager
def interruptions(terms: set[int], cuts: set[int]) -> Iterator[list[int]]:
    """Send SIGTERM after the steps `terms` taken within the block, counted from 1, and cut after `cuts`; yield all steps."""
    real, taken = Trainer.launch_step, []

    def step(self: Trainer, *args: bool) -> Launched:
        taken.append(self.step)
        stats = real(self, *args)
        if len(taken) in terms:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(taken) in cuts:
            raise Cut
        return stats

    with patch.object(Trainer, "launch_step", step):
        yield taken


def train_to_the_end(words: list[str], attempts: int = 12) -> int:
    """Restart a run until it is done; return the number of interruptions."""
    for met in range(attempts):
        with contextlib.suppress(Cut):
            code = main(words)
            if code == 0:
                return met
            if code != 128 + signal.SIGTERM:
                raise RuntimeError(f"The run exited with code {code}.")
    raise RuntimeError(f"The run was not done after {attempts} attempts.")


def resume_is_exact(method: str, variant: str, data: Path, scratch: Path, **changes: object) -> bool:
    """Return True if a run interrupted in each stage, once with and once without saving, ends like an undisturbed one."""
    changes = VARIANTS[variant] | changes
    with hurried():
        train_to_the_end(train_words(method, data, scratch / "straight", **changes))
        with interruptions(terms={1, 6}, cuts={3, 8}):
            met = train_to_the_end(train_words(method, data, scratch / "broken", **changes))
    return met >= 2 and end_state(scratch / "broken") == end_state(scratch / "straight")


# ---------------------------------------------------------------- full disks


def disk_full_at(file: str, writes: int) -> Callable[..., None]:
    """Return a `files._write` whose disk is full in the middle of the n-th write to a file of a checkpoint."""
    real, seen = files._write, [0]

    def write(handle, data) -> None:
        if handle.name.endswith(file) and "checkpoints" in handle.name.split(os.sep):
            seen[0] += 1
            if seen[0] >= writes:
                whole = memoryview(data).cast("B")
                real(handle, whole[: len(whole) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, data)

    return write


FULL_POINTS = {
    "before the first byte": lambda: patch.object(checkpoint, "free_bytes", lambda path: 0),
    "in the header of the weights": lambda: patch.object(files, "_write", disk_full_at("-model.safetensors", 1)),
    "in the middle of the optimizer": lambda: patch.object(files, "_write", disk_full_at("-optimizer.safetensors", 20)),
    "in state.json": lambda: patch.object(files, "_write", disk_full_at("-state.json", 1)),
    "in the manifest": lambda: patch.object(files, "_write", disk_full_at("-manifest.json", 1)),
}


@dataclass(frozen=True)
class FullDisk:
    """A run whose disk was full in a save: it exited with one sentence, kept its checkpoint, and resumed exactly."""

    told: bool
    kept: bool
    exact: bool


def full_disk_case(point: str, data: Path, scratch: Path, straight: dict[str, object]) -> FullDisk:
    """Train two steps with free space, two on a full disk, and the rest with free space again."""
    words, run = train_words("jpeg-dlm", data, scratch / "run", train__save_every=2), scratch / "run"
    real, said = Trainer.launch_step, io.StringIO()
    with contextlib.ExitStack() as full, hurried(), patch.object(checkpoint.time, "sleep", lambda seconds: None):

        def step(self: Trainer, *args: bool) -> Launched:
            if self.step == 2:
                self.background.wait()  # the checkpoint of step 2 is still being written
                full.enter_context(FULL_POINTS[point]())
            return real(self, *args)

        with patch.object(Trainer, "launch_step", step), contextlib.redirect_stderr(said):
            code = main(words)
    last = said.getvalue().splitlines()[-1]
    told = code == 1 and last.startswith("error: ") and "earlier checkpoints are intact, so make room and resume" in last
    left = [path.name for path in (run / "checkpoints").iterdir()]
    kept = left == ["step-00000002"] and [r.error for r in checkpoint.verify_run(run)] == [None]
    with hurried():
        train_to_the_end(words)
    return FullDisk(told, kept, end_state(run) == straight)


# ---------------------------------------------------------------- interruptions of real processes

SERVER = multiprocessing.get_context("forkserver")  # starts children quickly, from a process that never trained
PRELOADED = ["pytest", "jpeg_dlm.cli.train_verb", "jpeg_dlm.training.run", "jpeg_dlm.evaluation.entry_tables"]
SERVER.set_forkserver_preload(PRELOADED)

MOMENTS = {  # name -> the function whose first call starts it
    "while preparing text": ("jpeg_dlm.text.prepare", "write_atomic"),
    "in the first steps": ("jpeg_dlm.training.loop:Trainer", "launch_step"),
    "while saving": ("jpeg_dlm.folders.checkpoint", "write_manifest"),
    "in an evaluation": ("jpeg_dlm.training.optim:WeightEma", "swap"),  # the averaged weights have replaced the live ones
}
SIGNALS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: 128 + signal.SIGINT}


def run_announcing(words: list[str], moment: str, reached) -> None:
    """Run a training that announces a moment and then pauses in it; runs in its own process."""
    owner, name = resolve_name(MOMENTS[moment][0]), MOMENTS[moment][1]
    real = getattr(owner, name)

    def lingering(*args, **kwargs):
        result = real(*args, **kwargs)
        if not reached.is_set():
            reached.set()
            time.sleep(LINGER_S)
        return result

    with hurried(), patch.object(owner, name, lingering):
        raise SystemExit(main(words))


@dataclass(frozen=True)
class SignalCase:
    """A process that got a signal at a moment: its exit code, the expected one, and True if it resumed exactly."""

    exit_code: int | None
    expected: int
    exact: bool


def signal_case(number: signal.Signals, moment: str, text: Path, scratch: Path, straight: dict[str, object]) -> SignalCase:
    """Send a signal to a real run at a moment, resume the run, and compare its end state."""
    words = train_words("jpeg-dlm", text, scratch / "run", train__save_every=2)
    reached = SERVER.Event()
    process = SERVER.Process(target=run_announcing, args=(words, moment, reached), daemon=True)
    process.start()
    if not reached.wait(120):
        process.kill()
        raise RuntimeError(f"The run never reached the moment '{moment}'.")
    os.kill(process.pid, number)
    process.join()
    with hurried():
        train_to_the_end(words)
    return SignalCase(process.exitcode, SIGNALS[number], end_state(scratch / "run") == straight)


# ---------------------------------------------------------------- a long run


@dataclass(frozen=True)
class Soak:
    """Memory and open files of a process over its training steps."""

    steps: np.ndarray
    rss_mb: np.ndarray
    handles: np.ndarray

    def settled(self) -> Soak:
        """Drop the first fifth, in which pools and caches fill."""
        later = self.steps > self.steps[-1] / 5
        return Soak(self.steps[later], self.rss_mb[later], self.handles[later])

    @property
    def mb_per_1000_steps(self) -> float:
        """Median growth over windows of a tenth of the steps: a leak grows in all of them, an allocator's new arena in few."""
        tenth = max(1, round(len(self.steps) / 10))
        growth = (self.rss_mb[tenth:] - self.rss_mb[:-tenth]) / (self.steps[tenth:] - self.steps[:-tenth])
        return float(np.median(growth) * 1000)


def run_measuring(words: list[str], every: int, out) -> None:
    """Run a training that measures its memory and open files and sends them; runs in its own process."""
    real, found = Trainer.launch_step, []
    page_mb = os.sysconf("SC_PAGE_SIZE") / 1e6

    def step(self: Trainer, *args: bool) -> Launched:
        if self.step % every == 0:
            self.background.wait()  # what is being written and drawn takes memory and open files
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found.append((self.step, pages * page_mb, len(os.listdir("/proc/self/fd"))))
        return real(self, *args)

    with patch.object(Trainer, "launch_step", step):
        code = main(words)
    out.send(found)
    raise SystemExit(code)


def soak(steps: int, data: Path, scratch: Path) -> Soak:
    """Train the fastest method for many steps with checkpoints, evaluations, samples and plots."""
    changes = {"train__steps": steps, "train__save_every": 50, "train__eval_every": steps // 10, "train__log_every": 10}
    words = train_words("ar", data, scratch / "run", **changes)
    inlet, outlet = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=run_measuring, args=(words, SOAK_EVERY, outlet), daemon=True)
    process.start()
    outlet.close()
    columns = np.array(inlet.recv(), float).T
    process.join()
    if process.exitcode:
        raise RuntimeError(f"The long run exited with code {process.exitcode}.")
    return Soak(*columns)
