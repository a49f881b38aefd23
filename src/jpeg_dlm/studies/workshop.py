"""A folder in which configurations are trained, each once: what is done is found again, what was stopped goes on.

WORKSHOP/data-*/     text, prepared once for each way of preparing it
WORKSHOP/encoder-*/  the text encoder, pretrained once and shared by every method that uses one
WORKSHOP/runs/*/     a run per configuration, named by its method and a hash of all its options
WORKSHOP/parts/      finished measurements
WORKSHOP/locks/      what one process does while others wait

Any number of processes, on one machine or several, may work in one folder: each takes what no other is at.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jpeg_dlm.api import Model
from jpeg_dlm.config import Config
from jpeg_dlm.config_io import changed, read_json_file, to_dict
from jpeg_dlm.encoders import FrozenEncoder, build_encoder
from jpeg_dlm.encoders.small import CONFIG_FILE
from jpeg_dlm.errors import JpegDlmError
from jpeg_dlm.files import write_atomic
from jpeg_dlm.methods.registry import method_class
from jpeg_dlm.results.resumable import Parts, key_of
from jpeg_dlm.studies.budget import Budget, measure_step, spend
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.corpora import bring
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.training.checkpoint import latest_checkpoint
from jpeg_dlm.training.console import Console
from jpeg_dlm.training.dist import Ranks
from jpeg_dlm.training.lock import Locked, run_lock
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.training.run import encoder_config, fit_to_data, train_run

POLL_S = 1.0  # between looks at what another process holds (assumed: short beside any training)


class Stopped(JpegDlmError):
    """A signal asked to stop; everything is saved."""

    def __init__(self, signal: str) -> None:
        super().__init__(f"Stopped by {signal} and saved: the same command goes on from here.")
        self.exit_code = 143 if signal == "SIGTERM" else 130


class Workshop:
    def __init__(self, folder: Path, ranks: Ranks, console: Console) -> None:
        self.folder, self.ranks, self.console = folder, ranks, console
        self.parts = Parts(folder / "parts")
        self.blocks = cache(Blocks)
        self._told = ""

    # ------------------------------------------------------------ among other processes

    def take_turns(self, tasks: Sequence[Callable[[], object]], wait: bool = True) -> None:
        """Do every task; one that another process holds comes later, and is taken over should that process die.

        Without `wait`, those that others hold are left to them.
        """
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
        """The block runs in one process at a time; the others wait for it."""
        with contextlib.ExitStack() as stack:
            self.take_turns([lambda: stack.enter_context(run_lock(self.folder / "locks" / name))])
            yield

    @contextlib.contextmanager
    def recorded(self, row: dict[str, Any], title: str) -> Iterator[None]:
        """An error within becomes the row's `error`, with its traceback in a file; being asked to stop passes through."""
        try:
            yield
        except (Stopped, Locked):
            raise
        except Exception as error:  # whatever one does wrong must not cost the others
            sentence = str(error) if isinstance(error, JpegDlmError) else f"{type(error).__name__}: {error}"
            row["error"] = sentence
            self.folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")
            write_atomic(self.folder / f"error-{name}.txt", traceback.format_exc())
            self.console.warn(f"{title} failed and is left out: {sentence}")

    # ------------------------------------------------------------ shared conditions

    def prepared(self, config: Config) -> Path:
        """The prepared text of a config."""
        source = Path(os.path.expanduser(config.data.source))  # Path's own refuses a user that does not exist
        if (source / "index.json").is_file():
            return source
        folder = self.folder / f"data-{key_of(to_dict(config.data))[:8]}"
        with self.alone(folder.name):
            bring(config.data.source, folder, self.console)
            with self.console.progress("Preparing text", "bytes") as progress:
                prepare(config.data, folder, progress)
        return folder

    def conditions(self, config: Config) -> Config:
        """`config` on text prepared once and, where its method needs one, an encoder trained once for all methods."""
        folder = self.prepared(config)
        blocks = self.blocks(folder, "train")
        config = replace(config, data=replace(config.data, source=str(folder), vocab_size=blocks.vocab_size))
        steps = fit_to_data(config, blocks, self.ranks.world).train.steps  # a preset may give epochs
        config = replace(config, train=replace(config.train, steps=steps))
        e = config.encoder
        if not method_class(config.method).uses_encoder or e.kind != "small" or e.name:
            return config
        pretraining = encoder_config(config)
        groups = ("data.", "encoder.", "train.")  # all that it depends on
        key = {name: value for name, value in self.options(pretraining).items() if name.startswith(groups)}
        run = self.folder / f"encoder-{key_of(key)[:8]}"
        self.take_turns([lambda: self.train_in(run, pretraining)])
        return replace(config, encoder=replace(e, name=str(run / "encoder")))

    def encoder(self, config: Config) -> FrozenEncoder | None:
        """The frozen encoder of a config from `conditions`."""
        if not method_class(config.method).uses_encoder:
            return None
        return build_encoder(config.encoder, config.data.vocab_size, config.train.seed, None).to(self.ranks.device)

    def options(self, config: Config) -> dict[str, Any]:
        """What tells a config apart; what lies in the workshop goes by its name there, by whatever path that is reached."""
        values = changed(config)
        for name in ("data.source", "encoder.name"):
            path = Path(values.get(name, ""))
            if path.is_relative_to(self.folder):
                values[name] = str(path.relative_to(self.folder))
        return values

    # ------------------------------------------------------------ training

    def budgeted(self, config: Config, budget: Budget | None) -> Config:
        """A config from `conditions` with the steps that a budget buys it; speeds are measured once and kept."""

        def seconds(of: Config) -> float:
            # The kind of device: processes on several GPUs must buy the same steps.
            depends = {"kind": "step", "config": self.options(of), "device": self.ranks.device.type}

            def make() -> dict[str, float]:
                self.console.say(f"Timing a step of {of.method} ...")
                return {"seconds": measure_step(of, self.blocks(Path(of.data.source), "train"), self.encoder(of), self.ranks)}

            with self.alone("timing"):  # a second measurement would buy other steps, and so be another configuration
                return self.parts.get_or_make(f"step-{of.method}", depends, make)["seconds"]

        return spend(config, budget, seconds)

    def run_of(self, config: Config) -> Path:
        """The run directory of a config, the same for whoever asks."""
        return self.folder / "runs" / f"{config.method}-{key_of(self.options(config))[:8]}"

    def train(self, config: Config) -> Path:
        """The run directory of a config once it is trained; trains what is missing of it."""
        run = self.run_of(config)
        self.train_in(run, config)
        return run

    def train_in(self, run: Path, config: Config) -> None:
        """Train a config in a folder, unless that is done; `Locked` where another process is at it."""
        with run_lock(self.folder / "locks" / run.name):  # the run's own lock would leave a gap after the look at what is done
            if self._finished(run, config):
                self.console.say(f"{run.name}: already trained.")
                return
            outcome = train_run(config, run, self.ranks, self.console, resume=True)
        if outcome.stopped_by:
            raise Stopped(outcome.stopped_by)

    def _finished(self, run: Path, config: Config) -> bool:
        if config.method == "encoder" and not (run / "encoder" / CONFIG_FILE).is_file():
            return False  # the last checkpoint is written before what others read
        checkpoint = latest_checkpoint(run, self.console.warn) if (run / "checkpoints").is_dir() else None
        return checkpoint is not None and checkpoint.step >= config.train.steps


# ---------------------------------------------------------------- what is known of a trained run


def training_seconds(run: Path) -> float:
    """Time spent in optimizer steps by a run and the stages before it, from their logs."""
    total = 0.0
    for log in [run / "metrics.jsonl", *run.glob("*-training/metrics.jsonl")]:
        if not log.is_file() or log.parent.name == "encoder-training":
            continue
        train = read_json_file(run / "config.json")["train"]
        before = 0
        for values in read_metrics(log):
            if "rows_per_s" in values:
                rows = (values["step"] - before) * train["batch"] * train["accumulation"]
                total, before = total + rows / values["rows_per_s"], values["step"]
    return total


def parameter_count(model: Model) -> int:
    """Numbers that sampling needs and training has found; the frozen text encoder and target networks are not among them."""
    parameters = {p.data_ptr() for p in model.method.parameters()}
    return sum(t.numel() for t in model.method.export_state().values() if t.data_ptr() in parameters)  # names may differ
