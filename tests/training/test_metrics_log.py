"""The metrics file: valid JSON, no step twice, torn lines."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jpeg_dlm.errors import DataError
from jpeg_dlm.training.metrics import MetricsLog, read_metrics


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_lines_are_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, None) as log:
        log.log(1, {"loss": 0.5, "t": torch.tensor(2.0), "n": np.float32(0.25), "i": torch.tensor(3), "note": "a\nb"})
        assert path.read_text().endswith("\n")  # visible before closing
        log.log(2, {"loss": float("nan"), "a": torch.tensor(float("inf")), "b": -math.inf})
        log.sync()
    lines = [strict(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"step": 1, "loss": 0.5, "t": 2.0, "n": 0.25, "i": 3, "note": "a\nb"}
    assert lines[1] == {"step": 2, "loss": "NaN", "a": "Infinity", "b": "-Infinity"}
    rows = read_metrics(path)
    assert rows[0] == lines[0] and math.isnan(rows[1]["loss"]) and rows[1]["a"] == math.inf == -rows[1]["b"]


def fill(path, steps):
    with MetricsLog(path, None) as log:
        for step in steps:
            log.log(step, {"loss": step / 2})
            log.log(step, {"heldout_ce": step / 3})


def test_resuming_drops_later_steps_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(path, range(0, 100, 10))
    with MetricsLog(path, 40) as log:
        log.log(50, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(path)] == [0, 0, 10, 10, 20, 20, 30, 30, 40, 40, 50]
    before = path.stat().st_ino
    MetricsLog(path, 50).close()
    assert path.stat().st_ino == before  # nothing to drop, nothing rewritten
    MetricsLog(path, None).close()
    assert path.read_bytes() == b""


@given(cut=st.integers(0, 400), resume=st.integers(0, 12))
def test_cut_anywhere_and_resumed(tmp_path_factory, cut, resume):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    fill(path, range(1, 11))
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    expected = [strict(line) for line in whole.split(b"\n")[:-1]]
    assert read_metrics(path) == expected
    with MetricsLog(path, resume) as log:
        log.log(99, {})
    assert read_metrics(path) == [row for row in expected if row["step"] <= resume] + [{"step": 99}]


def test_damage_inside_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n{"step": 4')
    with pytest.raises(DataError, match="Line 2"):
        read_metrics(path)
    with pytest.raises(DataError, match="Line 2"):
        MetricsLog(path, 3)
    MetricsLog(path, 1).close()  # whatever follows step 1 is dropped anyway
    assert path.read_bytes() == b'{"step": 1}\n'
    with pytest.raises(DataError, match="Cannot read"):
        read_metrics(tmp_path / "absent")


def test_a_partial_write_is_taken_back(tmp_path, monkeypatch):
    import os

    path = tmp_path / "metrics.jsonl"
    write = os.write
    with MetricsLog(path, None) as log:
        log.log(1, {"loss": 1.0})
        monkeypatch.setattr("jpeg_dlm.training.metrics.os.write", lambda fd, data: write(fd, data[:5]))
        with pytest.raises(DataError, match="disk is full"):
            log.log(2, {"loss": 1.0})
        monkeypatch.undo()
        log.log(3, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
