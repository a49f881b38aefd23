"""Where the main process of a stage reports a step: metrics.jsonl, the screen, warnings, and a dashboard (`--train.log`)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import statistics
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jpeg_dlm.config import Config, TrainConfig
from jpeg_dlm.options import to_dict
from jpeg_dlm.training.metrics import HELDOUT, MetricsLog, read_metrics
from jpeg_dlm.util.console import Console, Report
from jpeg_dlm.util.errors import MissingPackageError, reason_of


@dataclass
class StageLogs:
    """The open logs of a stage."""

    config: Config
    console: Console
    metrics: MetricsLog
    tracker: Tracker
    alarms: Alarms
    show: Report

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step, or those of held-out text."""
        self.metrics.log(step, values)
        self.tracker.log(step, values)
        shown = {name: value for name, value in values.items() if not name.startswith("lr_")}
        line = "  ".join(f"{name.removeprefix(HELDOUT)} {value:.4g}" for name, value in shown.items())
        if any(name.startswith(HELDOUT) for name in values):
            self.console.say(f"step {step:,}, held out:  {line}")
        else:
            self.show(step, self.config.train.steps, line)
        for warning in self.alarms.check(step, values):
            self.console.warn(warning)


@contextlib.contextmanager
def open_logs(folder: Path, config: Config, resume: int | None, console: Console) -> Iterator[StageLogs]:
    """Open the logs of a stage that resumes at a step, or begins; lines of steps that run again are dropped."""
    path, total = folder / "metrics.jsonl", config.train.steps
    last_step = max((row["step"] for row in read_metrics(path)), default=0) if resume is not None and path.exists() else 0
    tracker = Tracker(folder, config, last_step, console.warn)
    progress = console.progress(f"Training {config.method}", "steps", total, resume or 0)
    with MetricsLog(path, resume) as metrics, progress as show:
        yield StageLogs(config, console, metrics, tracker, Alarms(config.train), show)
    tracker.close()


# ---------------------------------------------------------------- warnings, which never change the run

SPIKE = 10.0  # a loss leaps if it exceeds the median of recent ones by this multiple of their deviation (measured)
COLLAPSE = 0.05  # least acceptable share of the ideal value of each measure of latents (assumed)
WINDOW = 64  # number of recent logged losses to compare with (assumed)
FEWEST = 16  # losses needed before the first comparison (assumed)
MAD_TO_STD = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation
LEAST_SPREAD = 0.01  # share of the median: keeps a nearly constant loss from raising alarms (assumed)
GRACE = 0.25  # share of a run without collapse alarms: early latents depend on the position alone (assumed)
UNFOLDING = 300  # least length of that phase in steps, twice the longest one of `smoke` (measured)


def usual_limit(recent: Sequence[float]) -> float:
    """Return the largest usual loss: the median of recent ones plus a multiple of their deviation; infinite for few losses."""
    if len(recent) < FEWEST:
        return math.inf
    median = statistics.median(recent)
    spread = MAD_TO_STD * statistics.median(abs(loss - median) for loss in recent)
    return median + SPIKE * max(spread, LEAST_SPREAD * abs(median))


class Alarms:
    """Warns when a loss leaps or latents start to collapse; a resumed run starts to watch anew."""

    def __init__(self, train: TrainConfig) -> None:
        self.train, self.recent, self.active = train, deque[float](maxlen=WINDOW), set[str]()

    def check(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Return the warnings that a line of metrics gives reason for, each when its condition starts to hold."""
        signs: dict[str, str] = {}  # empty where all is well
        if math.isfinite(loss := values.get("loss", math.nan)):  # `train.nonfinite` decides about others
            limit = usual_limit(self.recent)
            self.recent.append(loss)
            signs["spike"] = f"the loss is {loss:.4g}, where up to {limit:.4g} would be usual" if loss > limit else ""
        if "latent_rank" in values and step >= max(GRACE * self.train.steps, UNFOLDING):
            low = [name for name in ("latent_rank", "latent_text") if values[name] < COLLAPSE]
            signs["collapse"] = " and ".join(f"{name} is {values[name]:.3g}, not near 1" for name in low)
        remedies = {
            "spike": "if it does not come back, go on from an earlier checkpoint, with a lower --train.lr or --train.clip",
            "collapse": "if it does not recover, start again with a larger weight of SIGReg or a lower --train.codec-lr",
        }
        new = [name for name, sign in signs.items() if sign and name not in self.active]
        self.active = (self.active - signs.keys()) | {name for name, sign in signs.items() if sign}
        return [f"ALARM at step {step:,}: {signs[name]}; {remedies[name]}." for name in new]


# ---------------------------------------------------------------- dashboards

EXTRAS = {"tensorboard": "track", "wandb": "wandb", "trackio": "trackio"}  # packages and the extras that install them
GROUPS = (HELDOUT, "latent_", "decode_", "lr_")  # name prefixes that form a group of charts


def check_tracker(name: str) -> None:
    """Raise an error early if the package of a tracker is not installed."""
    if name in EXTRAS and importlib.util.find_spec(name) is None:
        raise MissingPackageError(name, EXTRAS[name], f"--train.log {name}")


def chart(name: str) -> str:
    """Return the name of a measure preceded by its group of charts."""
    group = next((group for group in GROUPS if name.startswith(group)), "")
    return f"{group.removesuffix('_') or 'train'}/{name.removeprefix(group)}"


class Tracker:
    """A dashboard that receives the lines of metrics.jsonl, no step twice; if it fails, it warns once and the run goes on.

    `last_step` is the last step that was logged before; a resumed run has the same name there.
    """

    def __init__(self, run: Path, config: Config, last_step: int, warn: Callable[[str], None]) -> None:
        self.kind, self.last_step, self.warn = config.train.log, last_step, warn
        self.send: Callable[[int, dict[str, float]], object] | None = None
        self.finish: Callable[[], object] = lambda: None
        if self.kind != "none":
            self._attempt(lambda: self._open(run.resolve(), config))

    def _open(self, run: Path, config: Config) -> None:
        if self.kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(run / "tensorboard"))
            self.finish = writer.close
            self.send = lambda step, charts: [writer.add_scalar(name, value, step) for name, value in charts.items()]
            return
        id_file = run / "tracker.id"
        if not self.last_step or not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12])
        name = f"{run.parent.name}-{run.name}-{id_file.read_text()}"
        own = {"dir": str(run), "id": name} if self.kind == "wandb" else {}
        service = importlib.import_module(self.kind)  # Trackio has the interface of Weights & Biases
        client = service.init(project="jpeg-dlm", name=name, config=to_dict(config), resume="allow", **own)
        self.finish, self.send = client.finish, lambda step, charts: client.log(charts, step=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a line of metrics, unless it was sent before."""
        if (send := self.send) and step > self.last_step:
            self._attempt(lambda: send(step, {chart(name): value for name, value in values.items()}))

    def close(self) -> None:
        if self.send:
            self._attempt(self.finish)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # no error of a dashboard may end a training run
            self.send = None
            self.warn(f"{self.kind} no longer follows the run ({reason_of(error)}): metrics.jsonl has everything.")
