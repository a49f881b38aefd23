"""Sends metrics to a dashboard: TensorBoard, Weights & Biases or Trackio, chosen by `--train.log`.

`metrics.jsonl` stays the record of a run, and a tracker receives the same lines. A resumed run logs no step twice. If a
tracker fails, training goes on without it.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import MissingPackageError, reason_of
from jpeg_dlm.files import write_atomic
from jpeg_dlm.training.metrics import HELDOUT, read_metrics

PROJECT = "jpeg-dlm"  # project name in Weights & Biases and Trackio
GROUPS = (HELDOUT, "latent_", "decode_", "lr_")  # name prefixes that form a group of charts


class Tracker(Protocol):
    """Interface of a dashboard."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Start:
    """Arguments for opening a tracker; `resume` is the step of the loaded checkpoint, or None for a new run."""

    run: Path
    config: Config
    resume: int | None

    @property
    def name(self) -> str:
        """Name of the run's folder; for a stage, preceded by the name of its run."""
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
    """A run of Weights & Biases or Trackio, which share an interface; steps up to `heard` are already logged there."""

    def __init__(self, hosted: Any, heard: int) -> None:
        self.hosted, self.heard = hosted, heard

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self.heard:
            self.hosted.log({chart(name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self.hosted.finish()


def open_wandb(start: Start) -> Hosted:
    """Open a run of Weights & Biases, with its files in RUN/wandb."""
    import wandb  # pyright: ignore[reportMissingImports] - an extra

    identity, heard = identify(start, "wandb")
    config = to_dict(start.config)
    names = {"project": PROJECT, "id": identity, "name": start.name}
    return Hosted(wandb.init(**names, dir=str(start.run), config=config, resume="allow"), heard)


def open_trackio(start: Start) -> Hosted:
    """Open a run of Trackio, which identifies runs by name."""
    import trackio  # pyright: ignore[reportMissingImports] - an extra

    identity, heard = identify(start, "trackio")
    name, config = f"{start.name}-{identity}", to_dict(start.config)
    return Hosted(trackio.init(project=PROJECT, name=name, config=config, resume="allow"), heard)


def identify(start: Start, service: str) -> tuple[str, int]:
    """Return the run's id at a service, kept in RUN/SERVICE.id for resuming, and the last step logged there."""
    path = start.run / f"{service}.id"
    if path.is_file() and start.resume is not None:
        return path.read_text("ascii").strip(), last_logged(start.run)
    identity = uuid.uuid4().hex[:12]
    write_atomic(path, identity + "\n")
    return identity, 0


@dataclass(frozen=True)
class Kind:
    """A kind of tracker: its package, the extra that installs it, and the function that opens it."""

    package: str
    extra: str
    open: Callable[[Start], Tracker]


TRACKERS = {
    "tensorboard": Kind("tensorboard", "track", TensorBoard),
    "wandb": Kind("wandb", "wandb", open_wandb),
    "trackio": Kind("trackio", "trackio", open_trackio),
}


def chart(name: str) -> str:
    """Return the name of a measure preceded by its group of charts."""
    group = next((group for group in GROUPS if name.startswith(group)), "")
    return f"{group.removesuffix('_') or 'train'}/{name.removeprefix(group)}"


def check_tracker(name: str) -> None:
    """Raise an error early if the package of a tracker is not installed."""
    kind = TRACKERS.get(name)
    if kind and importlib.util.find_spec(kind.package) is None:
        raise MissingPackageError(kind.package, kind.extra, f"--train.log {name}")


def last_logged(run: Path) -> int:
    """Return the last step in the metrics of a run; after a kill it is later than the step of the checkpoint."""
    return max((row["step"] for row in read_metrics(run / "metrics.jsonl")), default=0)


class Follower:
    """The tracker of a run, if any; if it fails, warns once and goes on without it.

    Create it before the metrics are rewound: they tell which steps the tracker already has.
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
        except Exception as error:  # no error of a dashboard may end a training run
            self.tracker = None
            self.warn(f"{self.name} no longer follows the run ({reason_of(error)}): metrics.jsonl has everything.")
