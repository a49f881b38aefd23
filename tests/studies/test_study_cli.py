"""`jpeg-dlm study` for studies that train: the command, its refusals, and several processes in one folder."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
from conftest import micro_flags

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
    assert "| no regularizer" in shown and "| 63.11 | 4.090 | 0.856 |" in shown and "± is the deviation over sampling" in shown
    result = json.loads((tmp_path / "study-regularizers.json").read_text())
    assert (result["preset"], result["budgets"][0]["text"], len(result["records"])) == ("smoke", "1steps", 4)
    assert result["command"].startswith("jpeg-dlm study regularizers") and result["scorer_precision"] == "fp32"
    assert (tmp_path / "study-regularizers.png").is_file() and len(list((tmp_path / "runs").iterdir())) == 4


@pytest.mark.parametrize(
    "more", [("--train-seeds", "0"), ("--objective.sigma", "2"), ("--model.latentdim", "2"), ("--budget", "much")]
)
def test_refusals(more, tmp_path, capsys):
    assert main(["study", "ablations", "--out", str(tmp_path / "out"), *more]) == 2
    assert more[0].lstrip("-") in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- real processes


def start(asked):
    command = [sys.executable, "-m", "jpeg_dlm", *asked]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def trained(log):
    """Runs by method and start, as the console tells them."""
    return re.findall(r"Training jpeg-dlm: .* from step (\d+)", log)


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
    with start(asked) as process:
        out, log = process.communicate()
    assert process.returncode == 0, log
    assert "| no regularizer" in out and any(int(step) >= 10 for step in trained(log))  # taken over where it was
    assert not json.loads((tmp_path / "study-regularizers.json").read_text())["errors"]
