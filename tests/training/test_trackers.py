"""Trackers receive every step of a run once, resumed or not, according to their own readers and documented calls."""

import os
import signal
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import micro_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.training.loop import Trainer
from jpeg_dlm.training.metrics import read_metrics
from jpeg_dlm.training.trackers import chart


def command(data, out, log, *flags):
    where = ["--data", str(data), "--out", str(out), "--quiet", "--device", "cpu", "--threads", "1", "--resume"]
    return ["train", "--preset", "smoke", *where, *micro_flags(encoder__kind="random"), "--train.log", log, *flags]


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved after the step in which it comes."""


@pytest.fixture
def killed_at(monkeypatch):
    """Make the training of this process end once, after so many steps; what is logged of the step is still logged."""
    real = Trainer.launch_step

    def arrange(step):
        def until(self, *args):
            if self.step == step:
                monkeypatch.setattr(Trainer, "launch_step", real)
                raise Killed
            return real(self, *args)

        monkeypatch.setattr(Trainer, "launch_step", until)

    return arrange


def expected(run):
    """Of each chart the steps and values of metrics.jsonl."""
    found = {}
    for row in read_metrics(run / "metrics.jsonl"):
        for name, value in row.items():
            if name != "step":
                found.setdefault(chart(name), {})[row["step"]] = value
    return found


def test_names_of_charts():
    names = ["loss", "grad_norm", "heldout_ce", "latent_rank", "decode_t0.3", "lr_flow", "rows_per_s"]
    want = ["train/loss", "train/grad_norm", "heldout/ce", "latent/rank", "decode/t0.3", "lr/flow", "train/rows_per_s"]
    assert [chart(name) for name in names] == want


# ---------------------------------------------------------------- TensorBoard, by its own reader


def read_events(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("killed", [None, 3, 7])
def test_tensorboard_reads_every_step_once(killed, corpus_file, tmp_path, killed_at):
    """Checkpoints are made every 4 steps: the kill after step 3 begins anew, that after step 7 goes on from step 4."""
    pytest.importorskip("tensorboard", reason="an extra")
    if killed:
        killed_at(killed)
        with pytest.raises(Killed):
            main(command(corpus_file, tmp_path, "tensorboard"))
        assert max(step for step, _ in read_events(tmp_path)["train/loss"]) == killed
    assert main(command(corpus_file, tmp_path, "tensorboard")) == 0
    found, want = read_events(tmp_path), expected(tmp_path)
    assert found.keys() == want.keys() and len(want["train/loss"]) == 12 and set(want["heldout/ce"]) == {6, 12}
    for name, points in found.items():
        assert [step for step, _ in points] == sorted(want[name]), name
        assert [value for _, value in points] == pytest.approx([want[name][step] for step, _ in points], rel=1e-6), name


# ---------------------------------------------------------------- the documented calls of the others


class Service:
    """The part of `wandb` and `trackio` that is used: init gives a run with log and finish; runs are kept by their name."""

    def __init__(self, package):
        self.key = "id" if package == "wandb" else "name"
        self.runs: dict[str, list[tuple[int, dict]]] = {}
        self.opened, self.finished = [], 0

    def init(self, project, name=None, config=None, resume=None, id=None, dir=None):
        self.opened.append({"project": project, "name": name, "config": config, "resume": resume, "id": id, "dir": dir})
        rows = self.runs.setdefault(self.opened[-1][self.key], [])
        return SimpleNamespace(log=lambda metrics, step: rows.append((step, metrics)), finish=self.finish)

    def finish(self):
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def service(request, monkeypatch):
    found = Service(request.param)
    module = SimpleNamespace(init=found.init, __spec__=SimpleNamespace(name=request.param))
    monkeypatch.setitem(sys.modules, request.param, module)
    return request.param, found


def test_a_service_hears_every_step_once(service, corpus_file, tmp_path, killed_at):
    package, found = service
    killed_at(7)
    with pytest.raises(Killed):
        main(command(corpus_file, tmp_path / "mine", package))
    assert main(command(corpus_file, tmp_path / "mine", package)) == 0
    (rows,) = found.runs.values()  # one run, though it was opened twice
    heard = Counter((name, step) for step, metrics in rows for name in metrics)
    assert heard == {(name, step): 1 for name, points in expected(tmp_path / "mine").items() for step in points}
    assert [step for step, _ in rows] == sorted(step for step, _ in rows)
    first, second = found.opened
    assert first == second and first["project"] == "jpeg-dlm" and first["name"].startswith("mine") and found.finished == 1
    assert first["config"]["train"]["log"] == package and first["resume"] == "allow"


def test_two_runs_of_one_name_are_two_runs(service, corpus_file, tmp_path):
    package, found = service
    for place in ("a", "b"):
        assert main(command(corpus_file, tmp_path / place / "mine", package, "--train.steps", "2")) == 0
    assert len(found.runs) == 2


def test_a_failing_service_stops_no_training(corpus_file, tmp_path, monkeypatch, capsys):
    def fail(metrics, step):
        raise ConnectionError("no route to host\nlong trace")

    run = SimpleNamespace(log=fail, finish=fail)
    module = SimpleNamespace(init=lambda **_: run, __spec__=SimpleNamespace(name="wandb"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert main(command(corpus_file, tmp_path, "wandb")) == 0
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 14
    assert capsys.readouterr().err.count("wandb no longer follows the run (no route to host)") == 1


@pytest.mark.parametrize(("log", "extra"), [("tensorboard", "track"), ("wandb", "wandb"), ("trackio", "trackio")])
def test_a_missing_package_names_its_extra_before_anything_is_done(log, extra, corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jpeg_dlm.training.trackers.importlib.util.find_spec", lambda name: None)
    assert main(command(corpus_file, tmp_path / "out", log)) == 2
    error = capsys.readouterr().err
    assert f"pip install 'jpeg-dlm[{extra}]'" in error and f"--train.log {log}" in error and not (tmp_path / "out").exists()


def test_an_unknown_tracker_is_refused(corpus_file, tmp_path, capsys):
    assert main(command(corpus_file, tmp_path / "out", "mlflow")) == 2
    assert "tensorboard" in capsys.readouterr().err


def test_a_stopped_run_goes_on_in_the_same_dashboard(service, corpus_file, tmp_path, monkeypatch):
    package, found = service
    real = Trainer.launch_step

    def step_with_signal(self, *args):
        stats = real(self, *args)
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return stats

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "launch_step", step_with_signal)
        assert main(command(corpus_file, tmp_path, package)) == 143
    assert main(command(corpus_file, tmp_path, package)) == 0
    (rows,) = found.runs.values()
    assert sorted(step for step, metrics in rows if "train/loss" in metrics) == list(range(1, 13)) and found.finished == 2
