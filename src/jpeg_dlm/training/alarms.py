"""Alarms for loss spikes and latent collapse. They warn and write `RUN/alarms.jsonl`; they never change the run.

Alarms depend on the metrics alone: a resumed run silently replays its own `metrics.jsonl` and continues as if it had never
stopped. An alarm fires when its condition starts to hold, and again only after a line on which it did not hold.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.methods.common.latent_geometry import POINT_DISTANCE
from jpeg_dlm.training.metrics import MetricsLog, read_metrics

FILE = "alarms.jsonl"
WINDOW = 64  # number of recent logged losses to compare with (assumed)
FEWEST = 16  # losses needed before the first comparison (assumed)
MAD_TO_STD = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation
GRACE = 0.25  # share of a run without collapse alarms: early latents depend on the position alone (assumed)
# Least length of that phase in steps, twice the measured one: with `smoke`, the variance due to text rose above 0.05
# between steps 100 and 150, on sotu-modern and on synthetic texts of 5, 21 and 31 kB.
UNFOLDING = 300
LEAST_SPREAD = 0.01  # share of the median: keeps a nearly constant loss from raising alarms (assumed)

_WATCH = "watch 'latent geometry' in metrics.png, and if it does not recover,"
_FLOW = "or, if it is set, a lower --objective.flow-to-compressor"
ADVICE = {  # by kind of alarm
    "loss spike": "if it does not come back, go on from an earlier checkpoint, with a lower --train.lr or --train.clip",
    "latent rank": f"{_WATCH} start again with a larger weight of covariance or SIGReg, a lower --train.codec-lr, {_FLOW}",
    "latent variance": f"{_WATCH} train for more steps, or start again with a lower --train.codec-lr, {_FLOW}",
    "latent distribution": f"{_WATCH} start again with a larger weight of SIGReg, a lower --train.codec-lr, {_FLOW}",
}


@dataclass(frozen=True)
class Alarm:
    """`value` crossed `limit`; `text` describes this to the user, and `ADVICE` says what to do."""

    kind: str
    value: float
    limit: float
    text: str


class SpikeWatch:
    """Compares a loss with the median of the previous ones in units of their median absolute deviation."""

    def __init__(self, times: float) -> None:
        self.times = times
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def __call__(self, values: Mapping[str, float]) -> list[Alarm]:
        loss, limit = values["loss"], self.limit()
        if not math.isfinite(loss):  # `train.nonfinite` decides about these
            return []
        self.recent.append(loss)
        text = f"the loss is {loss:.4g}, where up to {limit:.4g} would be usual"
        return [Alarm("loss spike", loss, limit, text)] if loss > limit else []

    def limit(self) -> float:
        """Return the largest loss that raises no alarm."""
        if not self.times or len(self.recent) < FEWEST:
            return math.inf
        median = statistics.median(self.recent)
        spread = MAD_TO_STD * statistics.median(abs(loss - median) for loss in self.recent)
        return median + self.times * max(spread, LEAST_SPREAD * abs(median))


def collapse(values: Mapping[str, float], share: float) -> list[Alarm]:
    """Return an alarm for each sign of collapse: low effective rank, low variance due to text, large distance from N(0, I).

    `share` is the least acceptable fraction of the ideal value of each measure; 0 disables the alarms.
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
    """Applies `collapse` once the latents have been healthy, or once the grace period is over."""

    def __init__(self, share: float, steps: int) -> None:
        self.share, self.grace, self.unfolded = share, max(GRACE * steps, UNFOLDING), False

    def __call__(self, values: Mapping[str, float]) -> list[Alarm]:
        found = collapse(values, self.share)
        self.unfolded |= not found
        return found if self.unfolded or values["step"] >= self.grace else []


class Alarms:
    """The alarms of a run. `resume` is the step it resumes at; the metrics must already be rewound to that step."""

    def __init__(self, run: Path, train: TrainConfig, warn: Callable[[str], None], resume: int | None) -> None:
        self.path, self.warn = run / FILE, warn
        # Keyed by the measure that a line must have to be checked.
        self.judges: dict[str, Callable[[Mapping[str, float]], list[Alarm]]] = {
            "loss": SpikeWatch(train.spike_alarm),
            "latent_rank": CollapseWatch(train.collapse_alarm, train.steps),
        }
        self.sounding: dict[str, set[str]] = {measure: set() for measure in self.judges}
        if self.path.exists():
            MetricsLog(self.path, resume).close()  # drops the alarms of steps that run again
        for row in read_metrics(run / "metrics.jsonl") if resume is not None else []:
            self.begun(row)

    def watch(self, step: int, values: Mapping[str, float]) -> None:
        """Check one line of metrics; report and record each alarm that starts."""
        for alarm in self.begun({"step": step, **values}):
            self.warn(f"ALARM at step {step:,}: {alarm.text}; {ADVICE[alarm.kind]}.")
            with MetricsLog(self.path, step) as log:
                log.log(step, {"kind": alarm.kind, "value": alarm.value, "limit": alarm.limit})

    def begun(self, values: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms of this line that were not active on the line before."""
        new = []
        for measure, judge in self.judges.items():
            if measure in values:
                found = judge(values)
                new += [alarm for alarm in found if alarm.kind not in self.sounding[measure]]
                self.sounding[measure] = {alarm.kind for alarm in found}
        return new
