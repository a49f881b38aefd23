"""The sampling benchmarks run and fill their tables; no test depends on measured speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peak
import sampling
import shares
import systems
from conftest import MICRO

from jpeg_dlm.config_io import override
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset


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


def test_every_system_is_timed_at_every_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(systems, "POSITIONS", 5 * 12)
    monkeypatch.setattr(systems, "WHOLE", 8 * 12)
    result = systems.measure(presets=["smoke", "tiny"], batches=(1, 9), changes=MICRO)
    rows = {row["system"]: row for row in result["rows"] if row["preset"] == "smoke"}
    assert list(rows)[:3] == [systems.AR, systems.CACHED, systems.ELF] and len(rows) == 6 and len(result["rows"]) == 12
    evaluations = {name: row["evaluations"] for name, row in rows.items()}
    assert evaluations[systems.AR] == MICRO["data.token_len"] and evaluations["JPEG-DLM, fp32, all steps"] == 4
    assert all(row["texts_per_s"][batch] > 0 for row in rows.values() for batch in (1, 9))
    assert set(rows[systems.AR]["ratio"].values()) == {1.0} and len(result["ratios"]) == 20
    assert result["ratios"]["smoke, AR, KV cache, batch 9"] == rows[systems.CACHED]["ratio"][9]
    said = result["markdown"]
    assert said.count("\n| ") == 2 * (2 + len(rows)) and systems.draw(result, tmp_path / "systems.png").exists()
    assert "At batches above 5, AR, no KV cache and ELF were timed with 5 texts" in said
    assert "At batches above 8, AR, KV cache was timed at 32 tokens of a text." in said


def test_where_ar_with_a_cache_wins_is_said():
    rows = [{"system": name, "texts_per_s": {1: a, 8: b}} for name, a, b in (("AR, KV cache", 2.0, 6.0), ("last", 4.0, 3.0))]
    assert systems.winner(rows, (1, 8)) == (
        "last against AR, KV cache: 2.00x at batch 1, 0.50x at batch 8. AR, KV cache wins at batch 8."
    )


def test_ar_with_a_cache_is_timed_at_tokens_that_follow_a_filled_one(monkeypatch: pytest.MonkeyPatch):
    ar = systems.built(override(preset("smoke"), MICRO | {"data.token_len": 32}), "ar")
    seen, now = [], [0.0]

    def states(tokens_BL, cache, states=ar.backbone.states):
        seen.append((len(tokens_BL), tokens_BL.shape[1], cache[0].length))
        now[0] += 1
        return states(tokens_BL, cache)

    monkeypatch.setattr(ar.backbone, "states", states)
    monkeypatch.setattr(systems, "clock", lambda: now[0])
    monkeypatch.setattr(systems, "WHOLE", 0)
    monkeypatch.setattr(systems, "TOKENS", 2)
    assert systems.with_cache(ar, 3) == 32  # an evaluation for each token
    assert seen == [(3, 1, i + k) for i in (4, 12, 20, 28) for k in (0, 1)]


def test_evaluations_of_large_batches_are_scaled(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(systems, "clock", lambda: now[0])
    monkeypatch.setattr(systems, "POSITIONS", 40)

    def spend(each):
        return lambda z: now.__setitem__(0, now[0] + each * len(z))

    assert systems.diffusion(spend(1.0), spend(3.0), torch.zeros(16, 10, 2), evaluations=5) == 16 * (4 * 1 + 3)


def test_ar_without_a_cache_costs_what_its_tokens_cost(monkeypatch: pytest.MonkeyPatch):
    """If the token at position i costs i + 1 seconds, a text of 8 tokens costs 1 + 2 + ... + 8."""
    now = [0.0]

    class Counted:
        config = override(for_method(preset("smoke"), "ar"), {"data.token_len": 8})

        def sample(self, sampler, noise, given_BL):
            assert not sampler.kv_cache
            now[0] += 1 + (given_BL[0] == -1).nonzero().item()

    monkeypatch.setattr(systems, "clock", lambda: now[0])
    monkeypatch.setattr(systems, "PARTS", 8)
    assert systems.without_cache(Counted(), 1) == 36


def test_the_profile_divides_the_whole_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(shares, "preset", lambda name: override(preset("smoke"), MICRO))
    monkeypatch.setattr(shares, "REFERENCE", "engine fp32")  # the released network has no options of small budgets
    result = shares.measure(short=True)
    for row in result["rows"]:
        assert sum(value for kind, value in row.items() if kind not in ("sampler", "seconds")) == pytest.approx(1)
    int8 = next(row for row in result["rows"] if row["sampler"] == "engine int8")
    assert int8["quantization"] > 0 and int8["matrix products"] > 0
    assert shares.draw(result, tmp_path / "shares.png").exists()
