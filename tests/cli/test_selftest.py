"""The self-test: what is right passes, and what is wrong is reported as failed."""

import contextlib
import subprocess
import time
from pathlib import Path

import pytest

from jpeg_dlm.cli import selftest
from jpeg_dlm.cli.main import main
from jpeg_dlm.util.console import Console


def test_a_process_that_hangs_ends_with_its_children(monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    tail = "open(sys.argv[1] + '.new', 'w').write(str(p.pid))\nos.rename(sys.argv[1] + '.new', sys.argv[1])"
    child = "import os, subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"

    def communicate(self, timeout):  # patience ends when the child has a child
        while not pid.exists():
            time.sleep(0.05)
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(subprocess.TimeoutExpired):
        selftest.run_process(["-c", f"{child}{tail}\ntime.sleep(1000)", str(pid)])
    stat = Path(f"/proc/{pid.read_text()}/stat")
    with contextlib.suppress(OSError):  # it is gone, once init has collected it
        while stat.read_text().split()[2] != "Z":
            time.sleep(0.05)


def test_trainings_that_fail_or_differ_are_reported(monkeypatch, tmp_path, capsys):
    def losses(folder, processes=1, **options):
        if options.get("train__compile"):
            raise RuntimeError("Traceback\nRuntimeError: Failed to find C compiler\n")
        if options.get("method") == "ar":
            raise RuntimeError("W torchrun\nerror: The loss is not finite.\nmore\n")
        return [2.0, 1.0 if processes == 1 else 1.2]

    monkeypatch.setattr(selftest, "losses", losses)
    words = ["doctor", "--selftest", "--only", "methods", "processes", "compile", "--out", str(tmp_path / "report.md")]
    assert main(words) == 1
    text = (tmp_path / "report.md").read_text()
    assert "| methods | failed | ar: error: The loss is not finite. |" in text and text in capsys.readouterr().out
    assert "| processes | failed | cpu: losses of 2 steps differ by at most 0.2 " in text
    assert "| compile | not available |" in text


@pytest.mark.slow
def test_all_checks_pass_here():
    rows = selftest.run_checks(list(selftest.CHECKS), Console(quiet=True))
    assert all(result == "ok" or (check, result) == ("compile", "not available") for check, result, _, _ in rows), rows
