"""The sampling benchmarks run and fill their tables; no test depends on measured speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peak
import sampling
from conftest import MICRO


def test_every_contestant_is_in_the_table_and_agrees(monkeypatch: pytest.MonkeyPatch):
    peaks = {"fp32": 100.0, "bf16": 10.0, "int8": 200.0}
    monkeypatch.setattr(sampling, "peak", peaks.__getitem__)
    # The smoke preset as the released network is: without the options that only small budgets need.
    changes = MICRO | {"model.decode_residual": False, "model.position_scale": 0.0}
    bf16 = ["engine bf16"] if sampling.computes_in_bf16(torch.device("cpu")) else []
    result = sampling.measure(setups={"smoke": {2: 1}}, changes=changes)
    rows = {row["sampler"]: row for row in result["rows"]}
    assert list(rows) == [
        sampling.REFERENCE,
        sampling.KEPT,
        "engine fp32",
        *bf16,
        "engine int8",
        "onnxruntime fp32",
        "openvino fp32",
    ]
    assert rows[sampling.REFERENCE]["ratio"] == 1
    assert rows[sampling.KEPT]["agreement"] == rows["engine fp32"]["agreement"] == rows["openvino fp32"]["agreement"] == 1
    assert rows["onnxruntime fp32"]["agreement"] == 1 and rows["engine int8"]["agreement"] > 0.5
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["texts_per_s"] / rows[sampling.REFERENCE]["texts_per_s"])
        assert row["of_peak"] == pytest.approx(row["gflops"] / peaks.get(row["sampler"].removeprefix("engine "), 100))
    assert result["markdown"].count("\n| ") == 2 + len(rows) and "torch" in result["markdown"].splitlines()[-1]
    assert set(result["ratios"]) == {f"smoke, batch 2, {name}" for name in rows if name != sampling.REFERENCE}


def test_a_runtime_is_recommended_only_where_it_is_clearly_faster_over_all_set_ups():
    speeds = {"engine fp32": (1.0, 4.0), "onnxruntime fp32": (1.5, 3.0), "openvino fp32": (1.3, 4.4)}

    def rows():
        return [{"setup": i, "sampler": name, "texts_per_s": pair[i]} for i in (0, 1) for name, pair in speeds.items()]

    assert sampling.recommended_runtime(rows()) == "openvino fp32" and "--format openvino" in sampling.recommendation(rows())
    speeds |= {"onnxruntime fp32": (1.4, 3.0), "openvino fp32": (1.2, 3.5)}
    assert sampling.recommended_runtime(rows()) is None and "stay with torch" in sampling.recommendation(rows())


def test_a_peak_is_measured_for_every_type(monkeypatch: pytest.MonkeyPatch):
    for name in ("ROWS", "WIDTH", "OUT"):
        monkeypatch.setattr(peak, name, 16)
    monkeypatch.setattr(peak, "peak", lambda dtype, seconds, measured=peak.peak: measured(dtype, 0.0))
    result = peak.measure(short=True)
    assert [row["dtype"] for row in result["rows"]] == ["fp32", "bf16", "int8"]
    assert all(row["gflops"] > 0 for row in result["rows"])
    assert result["ratios"]["int8 peak"] == pytest.approx(result["rows"][2]["gflops"] / result["rows"][0]["gflops"])
