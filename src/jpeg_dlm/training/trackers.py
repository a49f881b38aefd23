"""Metrics in a dashboard as well: TensorBoard, Weights & Biases or Trackio, by `--train.log`.

`metrics.jsonl` stays the record of a run, and every tracker gets the lines that are written there. A run that resumes
tells no step twice: TensorBoard is told from where on what it has is void, and the others, which keep what they have, are
not told again what they heard before the run stopped. A tracker that fails is left behind, and training goes on.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import MissingPackageError, reason_of
from jpeg_dlm.files import write_atomic
from jpeg_dlm.training.metrics import HELDOUT, read_metrics

PROJECT = "jpeg-dlm"  # under which Weights & Biases and Trackio list the runs
GROUPS = (HELDOUT, "latent_", "decode_", "lr_")  # beginnings of names that are one group of charts


class Tracker(Protocol):
    """Something that follows a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Start:
    """What a tracker is opened with: `resume` is the step of the loaded checkpoint, None for a run that starts from nothing."""

    run: Path
    config: Config
    resume: int | None

    @property
    def name(self) -> str:
        """The folder; for a stage of a run also the folder of the run."""
        path = self.run.resolve()
        return f"{path.parent.name}-{path.name}" if path.name.endswith("-training") else path.name


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = 0 if start.resume is None else start.resume + 1
        self.writer = SummaryWriter(str(start.run / "tensorboard"), purge_step=first)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(chart(name), value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Hosted:
    """A run of Weights & Biases or of Trackio, which know the same three calls.

    RUN/NAME.id holds what the run is called there, so that a run that resumes is the same one.
    """

    def __init__(self, start: Start, package: str) -> None:
        path = start.run / f"{package}.id"
        known = path.is_file() and start.resume is not None
        self.heard = last_logged(start.run) if known else 0
        if not known:
            write_atomic(path, uuid.uuid4().hex[:12] + "\n")
        identity = path.read_text("ascii").strip()
        options = {"project": PROJECT, "config": to_dict(start.config), "resume": "allow"}
        if package == "wandb":
            options |= {"id": identity, "name": start.name, "dir": str(start.run)}
        else:  # Trackio knows a run by its name
            options |= {"name": f"{start.name}-{identity}"}
        self.hosted: Any = import_module(package).init(**options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self.heard:
            self.hosted.log({chart(name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self.hosted.finish()


@dataclass(frozen=True)
class Kind:
    """How to open a tracker, which package it needs and which extra brings that."""

    package: str
    extra: str
    open: Callable[[Start], Tracker]


TRACKERS = {
    "tensorboard": Kind("tensorboard", "track", TensorBoard),
    "wandb": Kind("wandb", "wandb", lambda start: Hosted(start, "wandb")),
    "trackio": Kind("trackio", "trackio", lambda start: Hosted(start, "trackio")),
}


def chart(name: str) -> str:
    """The name of a measure with the group that dashboards show it in."""
    group = next((group for group in GROUPS if name.startswith(group)), "")
    return f"{group.removesuffix('_') or 'train'}/{name.removeprefix(group)}"


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is absent, before anything long."""
    kind = TRACKERS.get(name)
    if kind and importlib.util.find_spec(kind.package) is None:
        raise MissingPackageError(kind.package, kind.extra, f"--train.log {name}")


def last_logged(run: Path) -> int:
    """The last step in the metrics of a run; after a kill it is later than that of the checkpoint."""
    return max((row["step"] for row in read_metrics(run / "metrics.jsonl")), default=0)


class Follower:
    """The tracker of a run, or none; warns once when it fails and does without it.

    It has to be made before the metrics are rewound, which say what a tracker has heard.
    """

    def __init__(self, start: Start, warn: Callable[[str], None]) -> None:
        self.name, self.warn = start.config.train.log, warn
        self.tracker: Tracker | None = None
        if self.name != "none":
            self._attempt(lambda: setattr(self, "tracker", TRACKERS[self.name].open(start)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        tracker = self.tracker
        if tracker:
            self._attempt(lambda: tracker.log(step, values))

    def close(self) -> None:
        tracker = self.tracker
        if tracker:
            self._attempt(tracker.close)

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # of any kind, it is not ours: a dashboard is not worth a training
            self.tracker = None
            self.warn(f"{self.name} no longer follows the run ({reason_of(error)}): metrics.jsonl has everything.")
