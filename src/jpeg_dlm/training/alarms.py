"""Alarms of a run: a loss that jumps, latents that collapse. They warn and write `RUN/alarms.jsonl`; they change nothing.

What sounds depends on the metrics alone: a run that resumes hears its own `metrics.jsonl` again, silently, and goes on as
if it had never stopped. An alarm sounds when its condition begins, and again only after a line without it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.geometry import POINT_DISTANCE
from jpeg_dlm.training.metrics import MetricsLog, read_metrics

FILE = "alarms.jsonl"
WINDOW = 64  # logged losses that are recent (assumed)
FEWEST = 16  # losses before which there is nothing to compare with (assumed)
MAD_TO_STD = 1.4826  # the deviation of a normal distribution in units of its median absolute deviation
GRACE = 0.25  # of a run: until it has unfolded once, a young space depends on the position alone (assumed)
# Steps that this takes whatever the length of the run, twice what was measured: with `smoke`, the text moved the latents by a
# variance above 0.05 between steps 100 and 150, on sotu-modern as on made-up texts of 5, 21 and 31 kB.
UNFOLDING = 300
LEAST_SPREAD = 0.01  # of the median: a loss that hardly moves is not watched under a microscope (assumed)

_WATCH = "watch 'latent geometry' in metrics.png, and if it does not recover,"
ADVICE = {  # by kind of alarm
    "loss spike": "if it does not come back, go on from an earlier checkpoint, with a lower --train.lr or --train.clip",
    "latent rank": f"{_WATCH} start again with a larger weight of covariance or SIGReg, or a lower --train.codec-lr",
    "latent variance": f"{_WATCH} train for more steps, or start again with a lower --train.codec-lr",
    "latent distribution": f"{_WATCH} start again with a larger weight of SIGReg, or a lower --train.codec-lr",
}


@dataclass(frozen=True)
class Alarm:
    """`value` crossed `limit`; `text` says so to a person, and `ADVICE` what to do."""

    kind: str
    value: float
    limit: float
    text: str


class SpikeWatch:
    """Compares a loss with the median of those before it, in units of their spread; a few outliers move neither."""

    def __init__(self, times: float) -> None:
        self.times = times
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def __call__(self, values: Mapping[str, float]) -> list[Alarm]:
        loss, limit = values["loss"], self.limit()
        if not math.isfinite(loss):  # the training loop has its own policy for these
            return []
        self.recent.append(loss)
        text = f"the loss is {loss:.4g}, where up to {limit:.4g} would be usual"
        return [Alarm("loss spike", loss, limit, text)] if loss > limit else []

    def limit(self) -> float:
        """The largest loss that is not alarming."""
        if not self.times or len(self.recent) < FEWEST:
            return math.inf
        median = statistics.median(self.recent)
        spread = MAD_TO_STD * statistics.median(abs(loss - median) for loss in self.recent)
        return median + self.times * max(spread, LEAST_SPREAD * abs(median))


def collapse(values: Mapping[str, float], share: float) -> list[Alarm]:
    """What is wrong with latents that use too few directions, hardly vary, or are as far from N(0, I) as a single point.

    `share` of what would be best is the least that each of the three may have; 0 finds nothing wrong.
    """
    if not share:
        return []
    far = (1 - share) * POINT_DISTANCE
    rank, text, sigreg = (values[f"latent_{name}"] for name in ("rank", "text", "sigreg"))
    checks = [
        (rank < share, "latent rank", rank, share, f"the latents use {rank:.1%} of the directions that they have"),
        (text < share, "latent variance", text, share, f"the text moves the latents by a variance of {text:.3g}, not of 1"),
        (sigreg > far, "latent distribution", sigreg, far, f"the latents are as far from N(0, I) as one point ({sigreg:.3g})"),
    ]
    return [Alarm(kind, value, limit, text) for bad, kind, value, limit, text in checks if bad]


class CollapseWatch:
    """`collapse` of a space that has been fine before, or that has had its time to become so."""

    def __init__(self, share: float, steps: int) -> None:
        self.share, self.grace, self.unfolded = share, max(GRACE * steps, UNFOLDING), False

    def __call__(self, values: Mapping[str, float]) -> list[Alarm]:
        found = collapse(values, self.share)
        self.unfolded |= not found
        return found if self.unfolded or values["step"] >= self.grace else []


class Alarms:
    """The alarms of a run that starts, or of one that resumes at step `resume`; the metrics must be rewound already."""

    def __init__(self, run: Path, train: TrainConfig, warn: Callable[[str], None], resume: int | None) -> None:
        self.path, self.warn = run / FILE, warn
        # By the measure without which a line says nothing about the alarm.
        self.judges: dict[str, Callable[[Mapping[str, float]], list[Alarm]]] = {
            "loss": SpikeWatch(train.spike_alarm),
            "latent_rank": CollapseWatch(train.collapse_alarm, train.steps),
        }
        self.sounding: dict[str, set[str]] = {measure: set() for measure in self.judges}
        if self.path.exists():
            MetricsLog(self.path, resume).close()  # steps that run again alarm again
        for row in read_metrics(run / "metrics.jsonl") if resume is not None else []:
            self.begun(row)

    def watch(self, step: int, values: Mapping[str, float]) -> None:
        """Hear one line of metrics; warn of each alarm that begins, and write it down."""
        for alarm in self.begun({"step": step, **values}):
            self.warn(f"ALARM at step {step:,}: {alarm.text}; {ADVICE[alarm.kind]}.")
            with MetricsLog(self.path, step) as log:
                log.log(step, {"kind": alarm.kind, "value": alarm.value, "limit": alarm.limit})

    def begun(self, values: Mapping[str, float]) -> list[Alarm]:
        """The alarms of this line that did not sound in the one before."""
        new = []
        for measure, judge in self.judges.items():
            if measure in values:
                found = judge(values)
                new += [alarm for alarm in found if alarm.kind not in self.sounding[measure]]
                self.sounding[measure] = {alarm.kind for alarm in found}
        return new
