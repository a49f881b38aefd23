"""A folder in which each configuration is trained once: finished runs are reused, stopped ones continue.

It has data-*/ and encoder-*/ (prepared once), runs/METHOD-HASH/ with models/ along the way, parts/ (finished measurements)
and locks/. Any number of commands, on one machine or several, may share a folder: each takes work that no other holds. The
processes of one torchrun do everything together; the main one holds the locks and writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from jpeg_dlm.checkpoints.checkpoint import latest_checkpoint, newest_step
from jpeg_dlm.checkpoints.model_folder import read_model, write_model
from jpeg_dlm.config import Config
from jpeg_dlm.cost.plan import splits
from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.encoders.small import CONFIG_FILE
from jpeg_dlm.evaluation.cache import DiskCache, key_of
from jpeg_dlm.methods.base import encoder_stage
from jpeg_dlm.methods.registry import build_method, method_class
from jpeg_dlm.options import changed, read_json_file
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.lock import Locked, lock_together
from jpeg_dlm.training.metrics import read_invocations, read_metrics
from jpeg_dlm.training.run import fit_to_data, train_run
from jpeg_dlm.training.trainer import Trainer
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import Ranks, failed_together, on_main
from jpeg_dlm.util.errors import JpegDlmError, UsageError
from jpeg_dlm.util.files import write_atomic

SIGNALS = ("SIGTERM", "SIGINT")
POLL_S = 1.0  # between attempts to take a lock (assumed: short compared to any training)
WARMUP_STEPS, TIMED_STEPS = 3, 10  # of a speed measurement; the median of ten steps is accurate to a few percent (measured)


class StudyStopped(JpegDlmError):
    """A signal asked to stop; everything is saved."""

    def __init__(self, signal: str) -> None:
        super().__init__(f"Stopped by {signal} and saved: repeat the command to continue.")
        self.exit_code = 143 if signal == "SIGTERM" else 130


def step_rows(config: Config) -> int:
    """Rows of an optimizer step on the devices that a config is meant for."""
    return config.train.batch * config.train.accumulation * config.train.devices


def split_rows(config: Config, world: int) -> Config:
    """Return the config with as many rows of a step, split over `world` processes in micro-batches that are not larger."""
    each, left = divmod(step_rows(config), world)
    if left:
        raise UsageError(
            f"A step of {config.method} has {step_rows(config)} rows, which {world} processes cannot split evenly: "
            "start another number of them, or set --train.batch."
        )
    batch = splits(each, config.train.batch)[0]
    return replace(config, train=replace(config.train, batch=batch, accumulation=each // batch, devices=world))


class TrainingCache:
    def __init__(self, folder: Path, ranks: Ranks, console: Console) -> None:
        self.folder, self.ranks, self.console = folder, ranks, console
        self.parts = DiskCache(folder / "parts")
        self.blocks = cache(Blocks)
        self._waiting, self._guarded = "", 0

    # ------------------------------------------------------------ among other processes

    def take_turns(self, tasks: Sequence[Callable[[], object]], wait: bool = True) -> None:
        """Do every task, waiting for those that other processes hold, or without `wait` skipping them."""
        left = list(tasks)
        while left:
            busy: list[tuple[Callable[[], object], Locked]] = []
            for task in left:
                try:
                    task()
                except Locked as locked:
                    busy.append((task, locked))
            if not wait:
                return
            if len(busy) == len(left):
                message = f"Waiting for {', '.join(f'{locked.run.name} ({locked.holder})' for _, locked in busy)} ..."
                if message != self._waiting:
                    self.console.say(message)
                self._waiting = message
                time.sleep(POLL_S)
            left = [task for task, _ in busy]

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Run the block in one process at a time; the others wait."""
        with contextlib.ExitStack() as stack:
            self.take_turns([lambda: stack.enter_context(lock_together(self.folder / "locks" / name))])
            yield

    @contextlib.contextmanager
    def guard(self, errors: dict[str, str], label: str, tell: bool = True) -> Iterator[None]:
        """Put an error within the block into `errors` and `tell` it, with its traceback in a file; let `StudyStopped` pass.

        An error of some processes only is raised: the others may wait for them, and end when they do.
        """
        self._guarded += 1
        try:
            yield
        except (StudyStopped, Locked):
            raise
        except Exception as error:  # no error of one variant may end the others
            if not failed_together(f"failed-{self._guarded}"):
                raise
            errors[label] = str(error) if isinstance(error, JpegDlmError) else f"{type(error).__name__}: {error}"
            if not tell or not self.ranks.is_main:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-")
            write_atomic(self.folder / f"error-{name}.txt", traceback.format_exc())
            self.console.warn(f"{label} failed and is left out: {errors[label]}")

    # ------------------------------------------------------------ shared conditions

    def prepared(self, config: Config) -> Path:
        """Prepare the text of a config, unless that is done, and return its folder."""
        source = Path(os.path.expanduser(config.data.source))  # Path.expanduser raises an error for unknown users
        if (source / "index.json").is_file():
            return source
        folder = self.folder / f"data-{key_of(asdict(config.data))[:8]}"
        with self.alone(folder.name):
            on_main(lambda: prepare(config.data, folder, self.console))
        return folder

    def conditions(self, config: Config) -> Config:
        """Return `config` with the shared prepared text and, if its method needs one, the shared pretrained encoder."""
        folder = self.prepared(config)
        blocks = self.blocks(folder, "train")
        config = replace(config, data=replace(config.data, source=str(folder), vocab_size=blocks.vocab_size))
        steps = fit_to_data(config, blocks, config.train.devices).train.steps  # a preset may give epochs
        config = replace(config, train=replace(config.train, steps=steps))
        e = config.encoder
        if not method_class(config.method).uses_encoder or e.kind != "small" or e.name:
            return config
        pretraining = encoder_stage(config)
        groups = ("data.", "encoder.", "train.")  # options that it depends on
        key = {name: value for name, value in self.options(pretraining).items() if name.startswith(groups)}
        run = self.folder / f"encoder-{key_of(key)[:8]}"
        self.take_turns([lambda: self.train(pretraining, run)])
        return replace(config, encoder=replace(e, name=str(run / "encoder")))

    def encoder_seconds(self, config: Config) -> float | None:
        """Return the seconds of training the encoder here for a config from `conditions`; None if there is none."""
        run = Path(config.encoder.name).parent
        uses = method_class(config.method).uses_encoder and run.name.startswith("encoder-")
        return training_seconds(run) if uses else None

    def options(self, config: Config) -> dict[str, Any]:
        """Return the options that identify a config; paths in the cache are relative to it."""
        values = changed(config)
        for name in ("data.source", "encoder.name"):
            path = Path(values.get(name, ""))
            if path.is_relative_to(self.folder):
                values[name] = str(path.relative_to(self.folder))
        return values

    # ------------------------------------------------------------ speed

    def step_seconds(self, config: Config) -> float:
        """Return the seconds of an optimizer step, measured once and stored."""
        # The type of device, not its index: processes on several GPUs must get the same steps.
        depends = {"kind": "step", "config": self.options(config), "device": self.ranks.device.type}
        depends |= {"processes": self.ranks.world} if self.ranks.world > 1 else {}

        def make() -> dict[str, float]:
            self.console.say(f"Timing a step of {config.method} ...")
            return {"seconds": self._measure_step(split_rows(config, self.ranks.world))}

        with self.alone("timing"):  # a second measurement would give other steps, and so another configuration
            return self.parts.get_or_compute(f"step-{config.method}", depends, make)["seconds"]

    def _measure_step(self, config: Config) -> float:
        """Return the median seconds of an optimizer step of a new model, which is discarded."""
        ranks, encoder = self.ranks, None
        if method_class(config.method).uses_encoder:
            encoder = build_encoder(config.encoder, config.data.vocab_size, config.train.seed, None).to(ranks.device)
        method = build_method(config, encoder).to(ranks.device)
        blocks = self.blocks(Path(config.data.source), "train")
        stream = BatchStream(blocks, config.train, ranks.device, ranks.rank, ranks.world, joined=method.sources == "before")
        spent = []
        with tempfile.TemporaryDirectory() as scratch:
            trainer = Trainer(config, method, stream, Path(scratch), ranks)
            for _ in range(WARMUP_STEPS + TIMED_STEPS):
                began = time.perf_counter()
                trainer.train_step()  # copies the losses to the CPU, so it waits for a GPU
                spent.append(time.perf_counter() - began)
        return statistics.median(spent[WARMUP_STEPS:])

    # ------------------------------------------------------------ training

    def run_of(self, config: Config) -> Path:
        """Return the run directory of a config, the same in every process."""
        return self.folder / "runs" / f"{config.method}-{key_of(self.options(config))[:8]}"

    def model_of(self, config: Config, step: int) -> Path:
        """Return where a config's model at a step is: the run at its end, a folder within the run before."""
        run = self.run_of(config)
        return run if step == config.train.steps else run / "models" / f"step-{step:08d}"

    def has_model(self, config: Config, step: int) -> bool:
        """Return True if training has reached a step and its model is there."""
        path = self.model_of(config, step)
        return self.finished(path, config) if step == config.train.steps else on_main(path.is_dir)

    def train(self, config: Config, run: Path | None = None, steps: Sequence[int] = ()) -> None:
        """Train a config, unless that is done; stop at each of these increasing steps to write the model there.

        Raises `Locked` if another process is training it.
        """
        run = run or self.run_of(config)

        def write(step: int) -> None:
            if newest_step(run) != step:
                raise UsageError(f"'{run}' lacks the model of step {step} and is past it: delete the folder to train again.")
            write_model(read_model(run, self.console.warn), self.model_of(config, step))

        with lock_together(self.folder / "locks" / run.name):  # `train_run` takes its own lock only after the check below
            for step in [step for step in steps if step < config.train.steps and not self.has_model(config, step)]:
                self._train_until(run, config, step)
                on_main(partial(write, step))
            if self.finished(run, config):
                self.console.say(f"{run.name}: already trained.")
            else:
                self._train_until(run, config, None)

    def _train_until(self, run: Path, config: Config, step: int | None) -> None:
        split = split_rows(config, self.ranks.world)
        outcome = train_run(split, run, self.ranks, self.console, resume=True, stop_at=step)
        if outcome.stopped_by in SIGNALS:
            raise StudyStopped(outcome.stopped_by)

    def finished(self, run: Path, config: Config) -> bool:
        """Return True if a run directory holds the end of a config's training."""

        def look() -> bool:
            if config.method == "encoder" and not (run / "encoder" / CONFIG_FILE).is_file():
                return False  # the encoder folder is written after the last checkpoint
            checkpoint = latest_checkpoint(run, self.console.warn) if (run / "checkpoints").is_dir() else None
            if checkpoint is None or checkpoint.step < config.train.steps:
                return False
            return checkpoint.state.get("rows_per_step") in (None, step_rows(config))  # `train_run` refuses other rows

        return on_main(look)


# ---------------------------------------------------------------- facts about a trained run


def training_seconds(run: Path, step: int | None = None) -> float:
    """Return the time that a run, or its first steps, and its earlier stages spent in optimizer steps, from their logs."""
    total = 0.0
    for log in [run / "metrics.jsonl", *run.glob("*-training/metrics.jsonl")]:
        if not log.is_file() or log.parent.name == "encoder-training":
            continue
        each, before = _logged_rows(run), 0
        for values in read_metrics(log):
            if "rows_per_s" in values and (step is None or log.parent != run or values["step"] <= step):
                rows = (values["step"] - before) * each
                total, before = total + rows / values["rows_per_s"], values["step"]
    return total


def _logged_rows(run: Path) -> int:
    """Return the rows of a step of a run on all its processes, which `rows_per_s` counts too."""
    begun = read_invocations(run)
    last = begun[-1] if begun else {"config": read_json_file(run / "config.json"), "processes": 1}
    return last["config"]["train"]["batch"] * last["config"]["train"]["accumulation"] * last["processes"]
