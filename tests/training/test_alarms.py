"""Alarms fire for spikes and collapses only, and a resumed run does not repeat them."""

import json
import math
import os
import random
import signal
from dataclasses import replace

import pytest
import torch
from conftest import micro_flags

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import TrainConfig
from jpeg_dlm.files import sha256_file
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.training import alarms
from jpeg_dlm.training.alarms import ADVICE, FILE, Alarms
from jpeg_dlm.training.metrics import MetricsLog, read_metrics
from jpeg_dlm.training.validation import heldout_losses

pytest_plugins = ["stand_in"]  # fixtures
HEALTHY = {"latent_rank": 0.3, "latent_text": 0.9, "latent_sigreg": 0.02}


def losses(n=300, seed=0):
    rng = random.Random(seed)
    return [{"loss": 2 + 5 * math.exp(-i / 40) + rng.gauss(0, 0.1)} for i in range(n)]


def hear(run, lines, resume=None, **options: float):
    """Steps and kinds that sounded; each line is logged before it is heard, as in training."""
    warnings: list[str] = []
    log = MetricsLog(run / "metrics.jsonl", resume)
    heard = Alarms(run, replace(TrainConfig(steps=1000), **options), warnings.append, resume)
    for step, values in lines:
        log.log(step, values)
        heard.watch(step, values)
    log.close()
    return warnings


def written(run):
    return [(row["step"], row["kind"]) for row in read_metrics(run / FILE)] if (run / FILE).exists() else []


def test_a_spike_sounds_once_and_is_written_down(tmp_path):
    lines = losses()
    for i in (150, 151, 152, 200):
        lines[i] = {"loss": 9.0}
    warnings = hear(tmp_path, enumerate(lines))
    assert written(tmp_path) == [(150, "loss spike"), (200, "loss spike")]
    assert "ALARM at step 150" in warnings[0] and "--train.lr" in warnings[0] and len(warnings) == 2
    row = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    assert row.keys() == {"step", "kind", "value", "limit"} and row["value"] == 9.0 and 2 < row["limit"] < 9


def test_the_limit_is_median_and_spread(tmp_path):
    """The losses 1..20 have the median 10.5 and deviations from it of median 5."""
    lines = list(enumerate([{"loss": float(x)} for x in range(1, 21)]))
    limit = 10.5 + 3 * 1.4826 * 5
    assert not hear(tmp_path, [*lines, (20, {"loss": limit - 1e-6})], spike_alarm=3)
    assert hear(tmp_path, [*lines, (20, {"loss": limit + 1e-6})], spike_alarm=3)
    assert read_metrics(tmp_path / FILE)[0]["limit"] == pytest.approx(limit)


@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_are_silent(tmp_path, seed):
    lines = [values | (HEALTHY if i % 50 == 49 else {}) for i, values in enumerate(losses(seed=seed))]
    lines[100] = {"loss": math.nan}  # this has a policy of its own
    lines += [{"loss": 2.0}] * 100 + [{"loss": 2.001}]  # and a loss that never moves has no spread
    assert not hear(tmp_path, enumerate(lines)) and not (tmp_path / FILE).exists()


def test_the_first_losses_and_zero_are_silent(tmp_path):
    assert not hear(tmp_path, enumerate([{"loss": 1.0}] * 10 + [{"loss": 100.0}]))
    bad = [*losses(100), {"loss": 1e6}, {"loss": 2.0} | HEALTHY, {"loss": 2.0} | HEALTHY | {"latent_rank": 0.0}]
    assert not hear(tmp_path, enumerate(bad), spike_alarm=0, collapse_alarm=0)


@pytest.mark.parametrize(
    ("measure", "value", "kind"),
    [("rank", 0.01, "latent rank"), ("text", 0.001, "latent variance"), ("sigreg", 0.4, "latent distribution")],
)
def test_each_kind_of_collapse(tmp_path, measure, value, kind):
    bad = HEALTHY | {f"latent_{measure}": value}
    warnings = hear(tmp_path, [(10, HEALTHY), (20, bad), (30, bad), (40, HEALTHY), (50, bad)])
    assert written(tmp_path) == [(20, kind), (50, kind)] and ADVICE[kind] in warnings[0] and "latent geometry" in warnings[0]


def test_a_young_space_has_its_time(tmp_path):
    bad = HEALTHY | {"latent_text": 0.003}
    assert not hear(tmp_path, [(s, bad) for s in range(50, 250, 50)])
    hear(tmp_path, [(s, bad) for s in range(50, 500, 50)])
    assert written(tmp_path) == [(300, "latent variance")]
    hear(tmp_path, [(s, bad) for s in range(50, 3000, 50)], steps=8000)  # a longer run has a quarter
    assert written(tmp_path) == [(2000, "latent variance")]


# `smoke` on a made-up text of 31 kB: step, then rank, variance due to text and SIGReg distance of the latents.
MEASURED = [
    (25, 0.136, 0.007, 0.208), (50, 0.135, 0.007, 0.354), (75, 0.134, 0.009, 0.371), (100, 0.134, 0.013, 0.374),
    (125, 0.137, 0.026, 0.371), (150, 0.148, 0.059, 0.357), (200, 0.202, 0.225, 0.310), (600, 0.373, 0.828, 0.252),
]  # fmt: skip


@pytest.mark.parametrize("steps", [60, 120, 200, 600])
def test_a_short_run_on_little_text_is_silent(tmp_path, steps):
    """Latents unfold after as many steps in a run that ends soon."""
    lines = [(step, {"latent_rank": r, "latent_text": v, "latent_sigreg": s}) for step, r, v, s in MEASURED if step <= steps]
    assert not hear(tmp_path, lines, steps=steps)
    collapsed = [(step, values | {"latent_text": 0.001}) for step, values in lines[-1:]]
    assert bool(hear(tmp_path, [*lines, *collapsed], steps=steps)) == (steps >= 200)  # they had unfolded before


def test_resuming_anywhere_gives_the_same_alarms(tmp_path):
    lines = losses()
    for i in (60, 61, 62, 100, 101, 180, 299):
        lines[i] = {"loss": 30.0}
    for i in range(9, 300, 10):
        lines[i] = lines[i] | HEALTHY | ({"latent_rank": 0.01} if 120 < i < 200 or i > 290 else {})
    hear(tmp_path, enumerate(lines))
    expected = (tmp_path / FILE).read_bytes()
    assert len(expected.splitlines()) == 6
    for resume in (5, 61, 100, 129, 150, 298):
        again = tmp_path / str(resume)
        again.mkdir()
        hear(again, enumerate(lines[: resume + 20]))  # beyond the checkpoint before it was killed
        numbered = list(enumerate(lines))
        hear(again, numbered[resume + 1 :], resume=resume)
        assert (again / FILE).read_bytes() == expected, resume


def command(data, out, *flags):
    where = ["--data", str(data), "--out", str(out), "--quiet", "--device", "cpu", "--threads", "1"]
    return ["train", "--preset", "smoke", "--resume", *where, *micro_flags(encoder__kind="random"), *flags]


def hashes(run):
    folder = run / "checkpoints" / "step-00000012"
    return {path.name: sha256_file(path) for path in folder.glob("*.safetensors")}


MEASURES = {"latent_rank", "latent_isotropy", "latent_std_min", "latent_text", "latent_sigreg", "decode_t0.3", "decode_t0.7"}


def test_one_text_says_nothing_about_the_space(micro_folders):
    """A small corpus may hold out a single row, whose latents differ from their mean by nothing."""
    model = load(micro_folders("jpeg-dlm"), "cpu")
    model.complete_method()
    row = torch.arange(8, 20)[None]

    class Rows:
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

        def rows(self, numbers):
            return row.repeat(len(numbers), 1)

        def mask(self, tokens):
            return None

    assert "latent_text" not in heldout_losses(model.method, Rows(1), Ranks())
    assert "latent_text" in heldout_losses(model.method, Rows(2), Ranks())


def test_a_run_measures_warns_resumes_and_trains_the_same(corpus_file, tmp_path, monkeypatch, capsys):
    """Limits that every latent space breaks: two evaluations, one alarm of each kind, whether or not the run was stopped."""
    plain, watched, broken = tmp_path / "plain", tmp_path / "watched", tmp_path / "broken"
    assert main(command(corpus_file, plain, "--train.eval-every", "0")) == 0
    monkeypatch.setattr(alarms, "UNFOLDING", 0)
    flags = ["--train.collapse-alarm", "0.999"]
    assert main(command(corpus_file, watched, *flags)) == 0
    assert capsys.readouterr().err.count("ALARM at step 6") >= 2
    assert hashes(plain) == hashes(watched)  # evaluations change nothing

    evaluated = [row for row in read_metrics(watched / "metrics.jsonl") if "heldout_ce" in row]
    assert [row["step"] for row in evaluated] == [6, 12] and all(row.keys() >= MEASURES for row in evaluated)
    assert all(0 < row["latent_rank"] <= 1 and 0 <= row["decode_t0.5"] <= 1 for row in evaluated)
    assert (6, "latent rank") in written(watched)

    from jpeg_dlm.training.loop import Trainer

    real_step, calls = Trainer.launch_step, []

    def step_with_signal(self, *args):
        stats = real_step(self, *args)
        calls.append(self.step)
        if len(calls) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return stats

    monkeypatch.setattr(Trainer, "launch_step", step_with_signal)
    assert [main(command(corpus_file, broken, *flags)) for _ in range(2)] == [143, 0]
    assert (broken / FILE).read_bytes() == (watched / FILE).read_bytes()
