"""A folder in which each configuration is trained once: finished runs are reused, stopped ones continue.

It has data-*/ and encoder-*/ (prepared once), runs/METHOD-HASH/ with models/ along the way, parts/ (finished measurements)
and locks/. Any number of commands, on one machine or several, may share a folder: each takes work that no other holds. The
processes of one torchrun do everything together; the main one holds the locks and writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from jpeg_dlm.api import Model
from jpeg_dlm.config import Config
from jpeg_dlm.config_io import changed, read_json_file
from jpeg_dlm.encoders import FrozenEncoder, build_encoder
from jpeg_dlm.encoders.small import CONFIG_FILE
from jpeg_dlm.errors import JpegDlmError, UsageError
from jpeg_dlm.files import write_atomic
from jpeg_dlm.folders.checkpoint import latest_checkpoint, newest_step
from jpeg_dlm.folders.model_folder import read_model, write_model
from jpeg_dlm.machine.collectives import failed_together, on_main
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.registry import method_class
from jpeg_dlm.results.resumable import Parts, key_of
from jpeg_dlm.studies.budget import Budget, measure_step, spend, split_rows, step_rows
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.corpora import bring
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.training.diagnosis_plot import diagnoses
from jpeg_dlm.training.encoder_stage import encoder_config
from jpeg_dlm.training.lock import Locked, lock_together
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.training.record import INVOCATIONS, read_rows
from jpeg_dlm.training.run import fit_to_data, train_run

SIGNALS = ("SIGTERM", "SIGINT")
POLL_S = 1.0  # between attempts to take a lock (assumed: short compared to any training)


class StudyStopped(JpegDlmError):
    """A signal asked to stop; everything is saved."""

    def __init__(self, signal: str) -> None:
        super().__init__(f"Stopped by {signal} and saved: repeat the command to continue.")
        self.exit_code = 143 if signal == "SIGTERM" else 130


class NotTrained(JpegDlmError):
    """A workshop that must not train lacks a run."""


class Workshop:
    def __init__(self, folder: Path, ranks: Ranks, console: Console, trains: bool = True) -> None:
        self.folder, self.ranks, self.console, self.trains = folder, ranks, console, trains
        self.parts = Parts(folder / "parts")
        self.blocks = cache(Blocks)
        self._told, self._tried = "", 0

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
                self._wait_for([locked for _, locked in busy])
            left = [task for task, _ in busy]

    def _wait_for(self, locks: Sequence[Locked]) -> None:
        told = f"Waiting for {', '.join(f'{locked.run.name} ({locked.holder})' for locked in locks)} ..."
        if told != self._told:
            self.console.say(told)
            self._told = told
        time.sleep(POLL_S)

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Run the block in one process at a time; the others wait."""
        with contextlib.ExitStack() as stack:
            self.take_turns([lambda: stack.enter_context(lock_together(self.folder / "locks" / name))])
            yield

    @contextlib.contextmanager
    def recorded(self, row: dict[str, Any], title: str) -> Iterator[None]:
        """Record an error within the block as the row's `error`, with its traceback in a file; let `Stopped` pass.

        An error of some processes only is raised: the others may wait for them, and end when they do.
        """
        self._tried += 1
        try:
            yield
        except NotTrained:
            return
        except (StudyStopped, Locked):
            raise
        except Exception as error:  # no error of one row may end the others
            if not failed_together(f"failed-{self._tried}"):
                raise
            sentence = str(error) if isinstance(error, JpegDlmError) else f"{type(error).__name__}: {error}"
            row["error"] = sentence
            if not self.ranks.is_main:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")
            write_atomic(self.folder / f"error-{name}.txt", traceback.format_exc())
            self.console.warn(f"{title} failed and is left out: {sentence}")

    # ------------------------------------------------------------ shared conditions

    def prepared(self, config: Config) -> Path:
        """Prepare the text of a config, unless that is done, and return its folder."""
        source = Path(os.path.expanduser(config.data.source))  # Path.expanduser raises an error for unknown users
        if (source / "index.json").is_file():
            return source
        folder = self.folder / f"data-{key_of(config.data.options())[:8]}"

        def make() -> None:
            bring(config.data.source, folder, self.console)
            with self.console.progress("Preparing text", "bytes") as progress:
                prepare(config.data, folder, progress)

        with self.alone(folder.name):
            on_main(make)
        return folder

    def conditions(self, config: Config) -> Config:
        """Return `config` with the shared prepared text and, if its method needs one, the shared pretrained encoder."""
        folder = self.prepared(config)
        blocks = self.blocks(folder, "train")
        config = replace(config, data=replace(config.data, source=str(folder), vocab_size=blocks.vocab_size))
        steps = fit_to_data(config, blocks, config.train.devices).train.steps  # a preset may give epochs
        config = replace(config, train=replace(config.train, steps=steps))
        e = config.encoder
        if not method_class(config.method).needs_encoder(config) or e.kind != "small" or e.name:
            return config
        pretraining = encoder_config(config)
        groups = ("data.", "encoder.", "train.")  # options that it depends on
        key = {name: value for name, value in self.options(pretraining).items() if name.startswith(groups)}
        run = self.folder / f"encoder-{key_of(key)[:8]}"
        self.take_turns([lambda: self.train_in(run, pretraining)])
        return replace(config, encoder=replace(e, name=str(run / "encoder")))

    def encoder(self, config: Config) -> FrozenEncoder | None:
        """Build the frozen encoder of a config from `conditions`."""
        if not method_class(config.method).needs_encoder(config):
            return None
        return build_encoder(config.encoder, config.data.vocab_size, config.train.seed, None).to(self.ranks.device)

    def options(self, config: Config) -> dict[str, Any]:
        """Return the options that identify a config; paths in the workshop are relative to it."""
        values = changed(config)
        for name in ("data.source", "encoder.name"):
            path = Path(values.get(name, ""))
            if path.is_relative_to(self.folder):
                values[name] = str(path.relative_to(self.folder))
        return values

    # ------------------------------------------------------------ training

    def budgeted(self, config: Config, budget: Budget | None) -> Config:
        """Set the steps that a budget allows for a config from `conditions`; speeds are measured once and stored."""

        def seconds(of: Config) -> float:
            # The type of device, not its index: processes on several GPUs must get the same steps.
            depends = {"kind": "step", "config": self.options(of), "device": self.ranks.device.type}
            depends |= {"processes": self.ranks.world} if self.ranks.world > 1 else {}

            def make() -> dict[str, float]:
                self.console.say(f"Timing a step of {of.method} ...")
                split, blocks = split_rows(of, self.ranks.world), self.blocks(Path(of.data.source), "train")
                return {"seconds": measure_step(split, blocks, self.encoder(of), self.ranks)}

            with self.alone("timing"):  # a second measurement would give other steps, and so another configuration
                return self.parts.get_or_make(f"step-{of.method}", depends, make)["seconds"]

        return spend(config, budget, seconds)

    def run_of(self, config: Config) -> Path:
        """Return the run directory of a config, the same in every process."""
        return self.folder / "runs" / f"{config.method}-{key_of(self.options(config))[:8]}"

    def train(self, config: Config) -> Path:
        """Train a config, unless that is done, and return its run directory."""
        run = self.run_of(config)
        self.train_in(run, config)
        return run

    def model_of(self, config: Config, step: int) -> Path:
        """Return the folder of a config's model at a step, which exists once training has reached it."""
        return self.run_of(config) / "models" / f"step-{step:08d}"

    def models(self, config: Config, steps: Sequence[int]) -> list[Path]:
        """Train a config and return the model at each of these increasing steps, at which training stops to write it."""
        run = self.run_of(config)
        found = [self.model_of(config, step) for step in steps]

        def write(step: int, path: Path) -> None:
            if newest_step(run) != step:
                raise UsageError(f"'{run}' lacks the model of step {step} and is past it: delete the folder to train again.")
            write_model(read_model(run, self.console.warn), path)

        with lock_together(self.folder / "locks" / run.name):
            for step, path in zip(steps, found, strict=True):
                if on_main(path.is_dir):
                    continue
                last = step == config.train.steps
                if not (last and self.finished(run, config)):
                    split, stop_at = split_rows(config, self.ranks.world), None if last else step
                    outcome = train_run(split, run, self.ranks, self.console, resume=True, stop_at=stop_at)
                    if outcome.stopped_by in SIGNALS:
                        raise StudyStopped(outcome.stopped_by)
                on_main(partial(write, step, path))
        return found

    def train_in(self, run: Path, config: Config) -> None:
        """Train a config in a folder, unless that is done; raise `Locked` if another process is training it."""
        with lock_together(self.folder / "locks" / run.name):  # `train_run` takes its own lock only after the check below
            if self.finished(run, config):
                self.console.say(f"{run.name}: already trained.")
                return
            if not self.trains:
                raise NotTrained(f"'{run.name}' is not trained yet.")
            outcome = train_run(split_rows(config, self.ranks.world), run, self.ranks, self.console, resume=True)
        if outcome.stopped_by:
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
        each, before = logged_rows(run), 0
        for values in read_metrics(log):
            if "rows_per_s" in values and (step is None or log.parent != run or values["step"] <= step):
                rows = (values["step"] - before) * each
                total, before = total + rows / values["rows_per_s"], values["step"]
    return total


def logged_rows(run: Path) -> int:
    """Return the rows of a step of a run on all its processes, which `rows_per_s` counts too."""
    begun = read_rows(run / INVOCATIONS)
    last = begun[-1] if begun else {"config": read_json_file(run / "config.json"), "processes": 1}
    return last["config"]["train"]["batch"] * last["config"]["train"]["accumulation"] * last["processes"]


def last_latents(run: Path) -> dict[str, float]:
    """Return the effective rank of a run's latents and their variance due to text at its last evaluation, where it has any."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "latent_rank" in row]
    return {name: rows[-1][name] for name in ("latent_rank", "latent_text")} if rows else {}


def last_diagnosis(run: Path) -> dict[str, float]:
    """Return the diagnostic measures of a run's last evaluation, if it was trained with `train.diagnose`."""
    return list(diagnoses(run / "metrics.jsonl").values() or [{}])[-1]


def parameter_count(model: Model) -> int:
    """Count the trained parameters that sampling needs, without the frozen text encoder and target networks."""
    parameters = {p.data_ptr() for p in model.method.parameters()}
    return sum(t.numel() for t in model.method.export_state().values() if t.data_ptr() in parameters)  # names may differ
