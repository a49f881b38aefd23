"""The benchmark driver: the files it writes, and the comparison with the record, which only warns."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import run


def test_a_ratio_that_fell_is_named():
    before = {"sampling": {"int8": 2.0, "fp32": 1.2}, "training": {"tiny": 1.5}}
    now = {"sampling": {"int8": 1.5, "fp32": 1.19, "new": 0.1}, "service": {"64": 3.0}}
    assert run.fallen(now, before) == ["sampling, int8: 1.50x, on record is 2.00x."]


def test_a_record_keeps_what_was_not_run_again(tmp_path: Path):
    path = tmp_path / "ratios.json"
    run.record({"sampling": {"fp32": 1.2}, "training": {"tiny": 1.5}}, path)
    run.record({"sampling": {"fp32": 1.3}}, path)
    assert run.records(path)[run.processor()]["ratios"] == {"sampling": {"fp32": 1.3}, "training": {"tiny": 1.5}}


def test_ratios_are_compared_with_those_of_the_same_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    path = tmp_path / "ratios.json"
    monkeypatch.setattr(run, "cpu_facts", lambda: ("Another CPU", frozenset()))
    run.record({"peak": {"a over b": 3.0}}, path)
    other = run.processor()
    monkeypatch.undo()
    monkeypatch.setattr(run, "RECORD", path)
    result = {"title": "A", "markdown": "", "rows": [], "ratios": {"a over b": 1.5}}
    monkeypatch.setitem(sys.modules, "peak", SimpleNamespace(measure=lambda short: dict(result)))
    monkeypatch.setattr(sys, "argv", ["run.py", "peak", "--out", str(tmp_path / "out")])
    assert run.main() == 0
    told = capsys.readouterr().err
    assert "warning" not in told and f"No record of this CPU ({run.processor()})" in told
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--record"])
    assert run.main() == 0 and not capsys.readouterr().err
    assert {name: found["ratios"]["peak"]["a over b"] for name, found in run.records(path).items()} == {
        other: 3.0,
        run.processor(): 1.5,
    }


def test_one_benchmark_writes_table_picture_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = {"title": "A title", "markdown": "| a | b |", "rows": [], "ratios": {"a over b": 1.5}}
    monkeypatch.setitem(sys.modules, "peak", SimpleNamespace(measure=lambda short: dict(result)))
    monkeypatch.setattr(run, "RECORD", tmp_path / "none.json")
    monkeypatch.setattr(sys, "argv", ["run.py", "peak", "--short", "--out", str(tmp_path / "out")])
    assert run.main() == 0
    assert "| a | b |" in (tmp_path / "out/peak.md").read_text()
    assert (tmp_path / "out/peak.png").read_bytes().startswith(b"\x89PNG")
    assert run.results(tmp_path / "out")["peak"]["ratios"] == {"a over b": 1.5}


def test_a_fall_is_a_warning_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run.record({"peak": {"a over b": 3.0}}, tmp_path / "ratios.json")
    monkeypatch.setattr(run, "RECORD", tmp_path / "ratios.json")
    result = {"title": "A", "markdown": "", "rows": [], "ratios": {"a over b": 1.5}}
    monkeypatch.setitem(sys.modules, "peak", SimpleNamespace(measure=lambda short: dict(result)))
    monkeypatch.setattr(sys, "argv", ["run.py", "peak", "--out", str(tmp_path / "out")])
    assert run.main() == 0
    assert "warning: peak, a over b: 1.50x, on record is 3.00x." in capsys.readouterr().err
