"""Stop signals, sent to a real process."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import micro_flags

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reliability import straight_end
from reliability_runs import MOMENTS, SIGNALS, signal_case, write_text

from jpeg_dlm.cli.main import main
from jpeg_dlm.training import run as run_module
from jpeg_dlm.training.loop import Trainer
from jpeg_dlm.training.run import last_words
from jpeg_dlm.training.signals import StopSignal

WORK = """
import sys, time
from jpeg_dlm.training.signals import StopSignal
with StopSignal(float(sys.argv[2])) as stop:
    print("ready", flush=True)
    while stop.requested is None:
        time.sleep(0.005)
    try:  # before the line that makes the test send the second signal
        print(stop.requested, flush=True)
        if sys.argv[1] == "stuck":
            time.sleep(30)
    finally:
        if sys.argv[1] == "stuck":
            print("cleaned", flush=True)
print("saved", flush=True)
"""


def work(mode, echo=0.0):
    child = subprocess.Popen([sys.executable, "-c", WORK, mode, str(echo)], stdout=-1, stderr=-1, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_asks(number):
    with work("willing") as child:
        child.send_signal(number)
        out, err = child.communicate(timeout=20)
    assert (out, err, child.returncode) == (f"{number.name}\nsaved\n", "", 0)


@pytest.mark.parametrize("first, second, code", [
    (signal.SIGINT, signal.SIGINT, 130), (signal.SIGTERM, signal.SIGTERM, 143), (signal.SIGINT, signal.SIGTERM, 143),
])  # fmt: skip
def test_second_signal_leaves_at_once(first, second, code):
    with work("stuck") as child:
        child.send_signal(first)
        assert child.stdout.readline() == f"{first.name}\n"
        child.send_signal(second)
        out, err = child.communicate(timeout=20)
    assert (out, err, child.returncode) == ("cleaned\n", "", code)


def test_the_second_signal_has_a_last_word():
    script = WORK.replace("StopSignal(float(sys.argv[2]))", "StopSignal(0.0, lambda: 'step 4 is kept')")
    with subprocess.Popen([sys.executable, "-c", script, "stuck"], stdout=-1, stderr=-1, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "SIGINT\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
    assert err == "\nstep 4 is kept\n" and child.returncode == 130


def test_last_words_tell_what_is_kept(tmp_path):
    assert last_words(tmp_path) == "Stopped without saving: no checkpoint was saved yet; continue with --resume."
    (tmp_path / "encoder-training" / "checkpoints" / "step-00000006").mkdir(parents=True)
    assert "step 6 of encoder-training is kept" in last_words(tmp_path)
    (tmp_path / "checkpoints" / "step-00001234").mkdir(parents=True)
    assert f"step 1,234 of {tmp_path.name} is kept" in last_words(tmp_path)


def stopped_run(corpus_file, tmp_path, monkeypatch, owner, name, **changes):
    """The run directory of a training that gets Ctrl-C right after the first call of a function."""
    real = getattr(owner, name)

    def interrupted(*args, **kwargs):
        result = real(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, interrupted)
    words = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main([*words, *micro_flags(**changes)]) == 130
    return tmp_path / "run"


def test_a_run_that_stops_before_its_first_step_says_that_nothing_was_saved(corpus_file, tmp_path, monkeypatch, capsys):
    run = stopped_run(
        corpus_file, tmp_path, monkeypatch, run_module, "fit_to_data", encoder__kind="random", encoder__scale="none"
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "before the first step, so there is no checkpoint" in said and "and saved" not in said
    assert not list(run.rglob("checkpoints/*"))


def test_a_run_that_stops_in_a_stage_names_it(corpus_file, tmp_path, monkeypatch, capsys):
    run = stopped_run(corpus_file, tmp_path, monkeypatch, Trainer, "launch_step")
    assert "at step 1 of the stage 'encoder' and saved: continue with --resume" in " ".join(capsys.readouterr().err.split())
    assert (run / "encoder-training" / "checkpoints" / "step-00000001").is_dir()


def test_an_echo_is_not_a_second_signal():
    with work("willing", echo=30.0) as child:
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=20)
    assert child.returncode == 0 and out.endswith("saved\n")


def test_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.raises(ValueError), StopSignal() as stop:
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        raise ValueError
    assert {number: signal.getsignal(number) for number in before} == before
    with StopSignal(), pytest.raises(SystemExit) as leave:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert leave.value.code == 130
    assert {number: signal.getsignal(number) for number in before} == before


def test_another_thread_is_harmless():
    seen = []

    def run():
        with StopSignal() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="module")
def straight(stories, tmp_path_factory):
    return straight_end("jpeg-dlm", stories, tmp_path_factory.mktemp("runs") / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_at_any_moment_changes_no_bit(number, moment, stories, straight, tmp_path):
    found = signal_case(number, moment, stories, tmp_path, straight)
    assert found.exit_code == found.expected and found.exact
