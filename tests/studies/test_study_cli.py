"""`jpeg-dlm study` for studies that train: the command, its refusals, and several processes in one folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from conftest import micro_flags

from jpeg_dlm.cli import study_verb
from jpeg_dlm.cli.main import main

pytest_plugins = ["tiny_evaluation"]  # fixtures


def words(corpus_file, byte_gpt2, out, budget="1steps"):
    scoring = ["-n", "2", "--seeds", "1", "--scorer", f"hf:{byte_gpt2}", "--mauve", "off"]
    common = ["study", "regularizers", "--preset", "smoke", "--data", str(corpus_file), "--budget", budget, *scoring]
    return [*common, "--out", str(out), *micro_flags(encoder__kind="random")]


def test_the_command(corpus_file, byte_gpt2, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.training.run.plot_metrics", lambda run: None)
    asked = words(corpus_file, byte_gpt2, tmp_path)
    assert main([*asked, "--train-only", "--quiet"]) == 0
    assert capsys.readouterr().out == "" and len(list((tmp_path / "runs").iterdir())) == 4
    assert main([*asked, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == (tmp_path / "study-regularizers.md").read_text().strip()
    assert "| no regularizer" in shown and "| 63.11 | 4.09 | 0.856 |" in shown and "± is the deviation over sampling" in shown
    result = json.loads((tmp_path / "study-regularizers.json").read_text())
    assert (result["preset"], result["budget"]["text"], len(result["rows"])) == ("smoke", "1steps", 4)
    assert (tmp_path / "study-regularizers.png").is_file() and len(list((tmp_path / "runs").iterdir())) == 4


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--jobs", "0"], "--jobs must be a whole number of at least 1"),
        (["--train-seeds", "0"], "--train-seeds must be a whole number of at least 1"),
        (["--objective.sigma", "2"], "sets objective.sigma itself"),
        (["--model.latentdim", "2"], "did you mean 'model.latent_dim'"),
        (["--budget", "much"], "A budget is a number and a unit"),
    ],
)
def test_refusals(more, sentence, tmp_path, capsys):
    assert main(["study", "ablations", "--out", str(tmp_path / "out"), *more]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_help_says_what_there_is(capsys):
    for asked, said in ((["study", "--help"], "joint-vs-two-stage"), (["study", "rates", "--help"], "--train-seeds")):
        with pytest.raises(SystemExit) as left:
            main(asked)
        shown = capsys.readouterr().out
        assert left.value.code == 0 and said in shown and "--train-only" not in shown


def test_other_processes_get_the_training_options_and_a_share_of_the_machine(monkeypatch, tmp_path):
    import torch

    from jpeg_dlm.machine.console import Console

    started = []

    class Popen:
        returncode = 3

        def __init__(self, words, **_):
            started.append(words)

        def poll(self):
            return self.returncode

        wait = poll

    told = []
    console = Console(quiet=True)
    monkeypatch.setattr(console, "warn", told.append)
    monkeypatch.setattr(study_verb.subprocess, "Popen", Popen)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    shares = []
    monkeypatch.setattr(torch, "set_num_threads", shares.append)
    parser = study_verb.argparse.ArgumentParser()
    study_verb.add_arguments(parser)
    args = parser.parse_args(["widths", "--budget", "3min", "--jobs", "3", "--out", str(tmp_path), "--device", "cpu"])
    before = signal.getsignal(signal.SIGTERM)
    with study_verb._workers(args, ["--train.lr", "1"], console):
        assert shares == [2] and signal.getsignal(signal.SIGTERM) is not before
    assert shares == [2, 8] and signal.getsignal(signal.SIGTERM) is before
    assert len(started) == 2 and len(told) == 2 and "exited with code 3" in told[0]  # a warning, not an error
    again = parser.parse_args(started[0][4:-2])
    assert started[0][:4] == [sys.executable, "-m", "jpeg_dlm", "study"] and started[0][-2:] == ["--train.lr", "1"]
    kept = ("study", "preset", "data", "budget", "train_seeds", "out", "device")
    assert all(getattr(again, name) == getattr(args, name) for name in kept)
    assert again.train_only and again.quiet and (again.jobs, again.threads) == (1, 2)


# ---------------------------------------------------------------- real processes


def start(asked):
    command = [sys.executable, "-m", "jpeg_dlm.cli.main", *asked]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def trained(log):
    """Runs by method and start, as the console tells them."""
    return re.findall(r"Training jpeg-dlm: .* starting at step (\d+)", log)


@pytest.mark.slow
def test_two_commands_share_the_work_and_train_nothing_twice(corpus_file, byte_gpt2, tmp_path):
    asked = words(corpus_file, byte_gpt2, tmp_path, "60steps")
    logs = []
    with start(asked) as one, start(asked) as other:
        for process in (one, other):
            logs.append(process.communicate())
    assert one.returncode == other.returncode == 0, logs
    assert logs[0][0].splitlines()[:6] == logs[1][0].splitlines()[:6]  # the same table
    counts = [trained(log) for _, log in logs]
    assert sorted(counts[0] + counts[1]) == ["0"] * 4 and all(counts)  # four configurations, and both took part
    for run in (tmp_path / "runs").iterdir():
        steps = Counter(values["step"] for values in map(json.loads, open(run / "metrics.jsonl")) if "rows_per_s" in values)
        assert set(steps) == set(range(1, 61)) and set(steps.values()) == {1}


@pytest.mark.slow
def test_a_killed_worker_does_not_cost_the_study(corpus_file, byte_gpt2, tmp_path):
    asked = words(corpus_file, byte_gpt2, tmp_path, "40steps")
    with start([*asked, "--train-only"]) as worker:
        while not list((tmp_path / "runs").glob("*/checkpoints/step-00000010")):  # in the middle of the first of four
            assert worker.poll() is None
            time.sleep(0.02)
        worker.kill()
    with start([*asked, "--jobs", "2"]) as process:
        out, log = process.communicate()
    assert process.returncode == 0, log
    assert "| no regularizer" in out and any(int(step) >= 10 for step in trained(log))  # taken over where it was
    assert not [row for row in json.loads((tmp_path / "study-regularizers.json").read_text())["rows"] if "error" in row]
    assert (tmp_path / "worker-1.log").is_file()
