"""The metrics file through kills and resumes, warnings, dashboards, and the picture of a run."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from micro import micro_config

from jpeg_dlm.config import TrainConfig
from jpeg_dlm.training.logs import FEWEST, UNFOLDING, Alarms, Tracker, check_tracker, usual_limit
from jpeg_dlm.training.metrics import MetricsLog, read_metrics
from jpeg_dlm.training.plots import plot_metrics
from jpeg_dlm.util.errors import DataError, MissingPackageError

# ---------------------------------------------------------------- metrics.jsonl


@given(cut=st.integers(0, 400), resume=st.integers(0, 12))
def test_cut_anywhere_and_resumed(tmp_path_factory, cut, resume):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsLog(path, None) as log:
        for step in range(1, 11):
            log.log(step, {"loss": step / 2})
            log.log(step, {"heldout_ce": math.inf})
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    expected = [json.loads(line) for line in whole.split(b"\n")[:-1]]
    assert read_metrics(path) == expected
    with MetricsLog(path, resume) as log:
        log.log(99, {})
    assert read_metrics(path) == [row for row in expected if row["step"] <= resume] + [{"step": 99}]
    with MetricsLog(path, None):
        assert path.read_bytes() == b""  # a new run


def test_damage_inside_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n{"step": 4')
    for read in (read_metrics, lambda path: MetricsLog(path, 3)):
        with pytest.raises(DataError, match="Line 2"):
            read(path)


def test_a_run_is_drawn_also_where_it_was_not_finite(tmp_path):
    assert plot_metrics(tmp_path) is None
    with MetricsLog(tmp_path / "metrics.jsonl", None) as log:
        for step in range(1, 300):
            log.log(step, {"loss": math.nan if step == 50 else 1000.0 / step, "rows_per_s": 5.0, "lr_flow": 1e-3})
        log.log(300, {"heldout_loss": 3.0, "latent_rank": 0.5})
    assert plot_metrics(tmp_path) == tmp_path / "metrics.png"
    assert imread(tmp_path / "metrics.png").shape[1] > 1000


# ---------------------------------------------------------------- warnings


def test_a_spike_is_measured_in_deviations_and_reported_once():
    recent = [2.0 + 0.1 * (-1) ** i for i in range(FEWEST)]  # median 2, deviation 0.148
    assert usual_limit(recent) == pytest.approx(2.0 + 10 * 0.148, rel=1e-3)
    assert usual_limit(recent[1:]) == math.inf
    assert usual_limit([2.0] * FEWEST) == pytest.approx(2.2)  # a constant loss has the least deviation, a hundredth
    alarms = Alarms(TrainConfig(steps=1000))
    losses = [2.0, 2.1] * FEWEST + [9.0, 9.5, 2.0, 9.0, math.nan, math.inf]
    counts = [len(alarms.check(step, {"loss": loss})) for step, loss in enumerate(losses)]
    assert counts[-6:] == [1, 0, 0, 1, 0, 0] and sum(counts) == 2


@pytest.mark.parametrize("bad", ["latent_rank", "latent_text"])
def test_a_collapse_is_reported_once_except_early(bad):
    healthy = {"latent_rank": 0.8, "latent_text": 0.9}
    values = [(10, bad), (UNFOLDING, bad), (UNFOLDING + 1, bad), (UNFOLDING + 2, ""), (UNFOLDING + 3, bad)]
    alarms = Alarms(TrainConfig(steps=100))
    counts = [len(alarms.check(step, healthy | ({name: 0.01} if name else {}))) for step, name in values]
    assert counts == [0, 1, 0, 0, 1]


# ---------------------------------------------------------------- dashboards


class Service(ModuleType):
    """A stand-in for wandb and trackio, which share an interface."""

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__(name)
        self.started, self.lines, self.finished, self.fails = [], [], 0, fails

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, values, step):
        if self.fails:
            raise OSError("no network")
        self.lines.append((step, values))

    def finish(self):
        self.finished += 1


def test_a_service_gets_each_step_once_under_one_name(tmp_path, monkeypatch):
    service = Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    for last_step, steps in ((0, (1, 2, 3)), (3, (2, 3, 4))):  # killed after step 3 and resumed at step 1
        tracker = Tracker(tmp_path, micro_config(train__log="wandb"), last_step, pytest.fail)
        for step in steps:
            tracker.log(step, {"loss": 1.0, "heldout_ce": 2.0})
        tracker.close()
    assert [step for step, _ in service.lines] == [1, 2, 3, 4] and service.finished == 2
    assert service.lines[0][1] == {"train/loss": 1.0, "heldout/ce": 2.0}
    assert service.started[0]["name"] == service.started[1]["name"]


def test_a_failing_or_missing_service(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", Service("trackio", fails=True))
    warnings = []
    tracker = Tracker(tmp_path, micro_config(train__log="trackio"), 0, warnings.append)
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    assert len(warnings) == 1 and "no network" in warnings[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tracker("none")
    with pytest.raises(MissingPackageError, match="wandb"):
        check_tracker("wandb")


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = Tracker(tmp_path, micro_config(train__log="tensorboard"), 0, pytest.fail)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))
