"""Micro training runs that are interrupted in every way and compared with undisturbed ones."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

from micro import micro_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.training.trainer import Launched, Trainer
from jpeg_dlm.util.files import sha256_file

STEPS = 4
SIZES = {"encoder__kind": "random", "model__depth": 2, "model__dropout": 0.1, "objective__codec_steps": 3}
SIZES |= {"train__steps": STEPS, "train__save_every": 100, "train__eval_every": 3}


def train_words(method: str, data: Path, run: Path, **changes: object) -> list[str]:
    """Return the command that starts or resumes a micro run of a method, with those sizes that the method has."""
    where = ["--data", str(data), "--out", str(run), "--resume", "--quiet", "--threads", "1", "--device", "cpu"]
    return ["train", "--preset", "smoke", "--method", method, *where, *micro_flags(method, **(SIZES | changes))]


def end_state(run: Path) -> dict[str, object]:
    """Return hashes of the last weights, averages and optimizer state of every stage, and its logged losses and rates."""
    state: dict[str, object] = {}
    for stage in (run, *sorted(run.glob("*-training"))):
        last = max((stage / "checkpoints").glob("step-*"))
        state |= {str(path.relative_to(run)): sha256_file(path) for path in sorted(last.glob("*.safetensors"))}
        state[f"{stage.relative_to(run)}/metrics"] = [
            {k: v for k, v in row.items() if k in ("step", "loss", "grad_norm") or k.startswith(("lr_", "heldout_"))}
            for row in read_metrics(stage / "metrics.jsonl")
        ]
    return state


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
            assert code == 128 + signal.SIGTERM
    raise AssertionError(f"the run was not done after {attempts} attempts")


def resume_is_exact(method: str, data: Path, scratch: Path, **changes: object) -> bool:
    """Return True if a run interrupted in each stage, with and without saving, ends like an undisturbed one."""
    with hurried():
        train_to_the_end(train_words(method, data, scratch / "straight", **changes))
        with interruptions(terms={1, 6}, cuts={3, 8}):
            met = train_to_the_end(train_words(method, data, scratch / "broken", **changes))
    return met >= 2 and end_state(scratch / "broken") == end_state(scratch / "straight")


# ---------------------------------------------------------------- signals to real processes

SERVER = multiprocessing.get_context("forkserver")  # starts children quickly, from a process that never trained
SERVER.set_forkserver_preload(["pytest", "jpeg_dlm.cli.train", "jpeg_dlm.training.run"])
MOMENTS = {  # name -> the function whose first call starts it
    "while preparing text": ("jpeg_dlm.text.prepare", "write_atomic"),
    "in the first steps": ("jpeg_dlm.training.trainer:Trainer", "launch_step"),
    "while saving": ("jpeg_dlm.checkpoints.checkpoint", "write_manifest"),
    "in an evaluation": ("jpeg_dlm.training.optim:WeightEma", "swap"),  # the averaged weights have replaced the live ones
}


def run_announcing(words: list[str], moment: str, reached, sent) -> None:
    """Run a training that announces a moment and then waits in it for the signal; runs in its own process."""
    owner, name = resolve_name(MOMENTS[moment][0]), MOMENTS[moment][1]
    real = getattr(owner, name)

    def lingering(*args, **kwargs):
        result = real(*args, **kwargs)
        if not reached.is_set():
            reached.set()
            sent.acquire()
        return result

    with hurried(), patch.object(owner, name, lingering):
        raise SystemExit(main(words))


def signaled(number: signal.Signals, moment: str, text: Path, run: Path) -> int | None:
    """Send a signal to a real run at a moment; return its exit code after resuming the run to its end."""
    # The second save waits for the first, so steps are left when the signal comes while the first is written.
    words = train_words("jpeg-dlm", text, run, train__save_every=1)
    reached, sent = SERVER.Event(), SERVER.Semaphore(0)
    process = SERVER.Process(target=run_announcing, args=(words, moment, reached, sent), daemon=True)
    process.start()
    assert reached.wait(600) and process.pid
    os.kill(process.pid, number)
    sent.release()
    process.join()
    with hurried():
        train_to_the_end(words)
    return process.exitcode
