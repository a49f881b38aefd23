"""Messages and progress on standard error."""

from __future__ import annotations

import io
import sys

import pytest

from jpeg_dlm.util import console as module
from jpeg_dlm.util.console import Console


def test_a_log_file_gets_a_line_now_and_then(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with Console().progress("Work", "rows", 100, 20) as report:
        for done in range(20, 101, 10):
            clock[0] += 12.0
            report(done, 100, "loss 1.5")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "Work ..." and len(lines) == 5
    assert lines[1] == "Work  30/100 30%  3 min left  loss 1.5"


@pytest.mark.parametrize("error", [OSError("full"), ValueError("closed")])
def test_a_stream_that_fails_ends_nothing(error, monkeypatch):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr(sys, "stderr", Broken())
    Console().say("into the void")
    Console(quiet=True).warn("into the void")
