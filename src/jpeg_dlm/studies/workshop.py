"""A folder in which configurations are trained, each once: what is done is found again, what was stopped goes on.

WORKSHOP/data-*/     text, prepared once for each way of preparing it
WORKSHOP/encoder-*/  the text encoder, pretrained once and shared by every method that uses one
WORKSHOP/runs/*/     a run per configuration, named by a label and a hash of all its options
WORKSHOP/parts/      finished measurements
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from jpeg_dlm.config import Config, read_json_file, to_dict
from jpeg_dlm.encoders import FrozenEncoder, build_encoder
from jpeg_dlm.errors import JpegDlmError
from jpeg_dlm.evaluation.parts import Parts, key_of
from jpeg_dlm.methods.registry import method_class
from jpeg_dlm.studies.budget import Budget, measure_step, spend
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.training.checkpoint import latest_checkpoint
from jpeg_dlm.training.console import Console
from jpeg_dlm.training.dist import Ranks
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.training.run import encoder_config, train_run


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

    # ------------------------------------------------------------ shared conditions

    def prepared(self, config: Config) -> Path:
        """The prepared text of a config."""
        source = Path(config.data.source).expanduser()
        if (source / "index.json").is_file():
            return source
        folder = self.folder / f"data-{key_of(to_dict(config.data))[:8]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with self.console.progress("Preparing text", "bytes") as progress:
            prepare(config.data, folder, progress)
        return folder

    def conditions(self, config: Config) -> Config:
        """`config` on text prepared once and, where its method needs one, an encoder trained once for all methods."""
        folder = self.prepared(config)
        vocab_size = self.blocks(folder, "train").vocab_size  # a short text may not fill the asked vocabulary
        config = replace(config, data=replace(config.data, source=str(folder), vocab_size=vocab_size))
        e = config.encoder
        if not method_class(config.method).uses_encoder or e.kind != "small" or e.name:
            return config
        pretraining = encoder_config(config)
        key = {name: to_dict(pretraining)[name] for name in ("data", "encoder", "train")}  # all that it depends on
        run = self.folder / f"encoder-{key_of(key)[:8]}"
        self.train_in(run, pretraining)
        return replace(config, encoder=replace(e, name=str(run / "encoder")))

    def encoder(self, config: Config) -> FrozenEncoder | None:
        """The frozen encoder of a config from `conditions`."""
        if not method_class(config.method).uses_encoder:
            return None
        return build_encoder(config.encoder, config.data.vocab_size, config.train.seed, None).to(self.ranks.device)

    # ------------------------------------------------------------ training

    def budgeted(self, config: Config, budget: Budget | None) -> Config:
        """A config from `conditions` with the steps that a budget buys it; speeds are measured once and kept."""

        def seconds(of: Config) -> float:
            depends = {"kind": "step", "config": to_dict(of), "device": str(self.ranks.device)}

            def make() -> dict[str, float]:
                self.console.say(f"Timing a step of {of.method} ...")
                return {"seconds": measure_step(of, self.blocks(Path(of.data.source), "train"), self.encoder(of), self.ranks)}

            return self.parts.get_or_make(f"step-{of.method}", depends, make)["seconds"]

        return spend(config, budget, seconds)

    def train(self, label: str, config: Config) -> Path:
        """The run directory of a trained config; trains it, or what is missing of it."""
        run = self.folder / "runs" / f"{label}-{key_of(to_dict(config))[:8]}"
        self.train_in(run, config)
        return run

    def train_in(self, run: Path, config: Config) -> None:
        if self._finished(run, config):
            self.console.say(f"{run.name}: already trained.")
            return
        outcome = train_run(config, run, self.ranks, self.console, resume=True)
        if outcome.stopped_by:
            raise Stopped(outcome.stopped_by)

    def _finished(self, run: Path, config: Config) -> bool:
        checkpoint = latest_checkpoint(run, self.console.warn) if (run / "checkpoints").is_dir() else None
        return checkpoint is not None and checkpoint.step >= config.train.steps


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
