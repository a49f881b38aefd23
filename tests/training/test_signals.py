"""Stop signals, sent to a real process."""

import signal
import subprocess
import sys

import pytest
from conftest import micro_flags

from jpeg_dlm.cli.main import main
from jpeg_dlm.training.signals import StopSignal
from jpeg_dlm.training.trainer import Trainer

WORK = """
import sys, time
from jpeg_dlm.training.signals import StopSignal
with StopSignal(float(sys.argv[2]), "continue with --resume") as stop:
    print("ready", flush=True)
    while stop.requested is None:
        time.sleep(0.005)
    try:  # before the line that makes the test send the second signal
        print(stop.requested, flush=True)
        while sys.argv[1] == "stuck":
            time.sleep(0.05)  # a signal just before one long sleep would be handled only after it
    finally:
        if sys.argv[1] == "stuck":
            print("cleaned", flush=True)
print("saved", flush=True)
"""


def work(mode, echo=0.0):
    child = subprocess.Popen([sys.executable, "-c", WORK, mode, str(echo)], stdout=-1, stderr=-1, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def test_second_signal_leaves_at_once():
    with work("stuck") as child:
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "SIGINT\n"
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=600)
    assert (out, err, child.returncode) == ("cleaned\n", "\ncontinue with --resume\n", 143)


def test_a_run_that_stops_in_a_stage_names_it(corpus_file, tmp_path, monkeypatch, capsys):
    real, run = Trainer.launch_step, tmp_path / "run"
    monkeypatch.setattr(Trainer, "launch_step", lambda *args: (real(*args), signal.raise_signal(signal.SIGINT))[0])
    words = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(run), "--device", "cpu"]
    assert main([*words, *micro_flags()]) == 130
    assert "step 1 of the stage 'encoder'" in " ".join(capsys.readouterr().err.split())
    assert (run / "encoder-training" / "checkpoints" / "step-00000001").is_dir()


def test_an_echo_is_not_a_second_signal():
    with work("willing", echo=600.0) as child:
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=600)
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
