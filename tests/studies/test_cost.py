"""The cost study: counts against the networks themselves, the length where attention takes over, and what is left out."""

import json
from argparse import Namespace

import pytest
import torch
from closed_forms import ar_sampling_macs, elf_sampling_macs, own_sampling_macs, query_macs
from conftest import MICRO
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation.paper import OWN
from jpeg_dlm.evaluation.trial import Trial, run_trial
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import preset
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import markdown
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.studies import cost, cost_points
from jpeg_dlm.studies.cost_points import CACHED, UNCACHED

MICRO_BASE = override(preset("smoke"), MICRO)


@torch.no_grad()
def products(point):
    """Multiply-accumulates of one sample, seen by torch; attention as plain products."""
    method = build_method(point.config).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        method.sample(point.config.sampler, RowNoise(0, [0]))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("system", cost_points.SYSTEMS)
@pytest.mark.parametrize("length", [5, 12])
def test_operations_are_those_that_torch_sees(system, length):
    point = cost_points.at_length(MICRO_BASE, system, length, 0.25)
    ours, _ = cost_points.macs_of(point)
    if system == OWN:  # the released code repeats the query's network, ours does not
        ours -= (length - 1) * query_macs(point.config)
    if system in (UNCACHED, CACHED):
        # One token at a time is a product of a vector, which torch counts alike; the embedding is a look-up.
        assert point.config.sampler.kv_cache == (system == CACHED)
    assert ours == products(point)


def test_attention_is_the_quadratic_part():
    """At twice the length what is not attention doubles, but for the prefix and what a text costs once."""
    a, b = (cost_points.at_length(preset("lm1b"), cost_points.FULL, length, 0.25) for length in (100_000, 200_000))
    (macs_a, attention_a), (macs_b, attention_b) = cost_points.macs_of(a), cost_points.macs_of(b)
    assert attention_b / attention_a == pytest.approx(4, rel=1e-3)
    assert (macs_b - attention_b) / (macs_a - attention_a) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("base", ["smoke", "lm1b"])
@pytest.mark.parametrize("system", cost_points.SYSTEMS)
def test_operations_at_any_length_by_formula(system, base):
    for length, rate in ((2, 1), (300, 0.25), (8192, 0.01)):
        point = cost_points.at_length(preset(base), system, length, rate)
        if system == OWN:
            expected = own_sampling_macs(point.config)
            assert cost_points.macs_of(point) == (expected["total"], expected["attention"])
        else:
            by_formula = elf_sampling_macs if system == cost_points.FULL else ar_sampling_macs
            assert cost_points.macs_of(point) == by_formula(point.config)


def test_where_attention_takes_over():
    assert cost_points.half_attention_length(lambda n: n / (n + 1000.5)) == 1001
    assert cost_points.half_attention_length(lambda n: 0.4) is None
    base = preset("lm1b")
    share = cost_points.attention_share(base, cost_points.FULL, 0.25)
    length = cost_points.half_attention_length(share)
    assert share(length) > 0.5 >= share(length - 1)
    # By hand: a layer has s (4 H**2 + 3 H I) linear and 2 s**2 H quadratic, equal at s = 2 H + 1.5 I; the ends move it a bit.
    assert length == pytest.approx(2 * 768 + 1.5 * 2048, rel=0.05)


def test_the_papers_compute_stands_beside():
    for name, length, latents in (("lm1b", 128, 32), ("owt1024", 1024, 512)):
        base = preset(name)
        rows = [cost_points.counted(cost_points.at_length(base, OWN, length, rate)) for rate in (1, latents / length, 0.125)]
        assert rows[0]["macs"] / 1e12 == pytest.approx(rows[0]["paper_macs_T"], rel=0.04)
        assert rows[1]["macs"] / 1e12 == pytest.approx(rows[1]["paper_macs_T"], rel=0.02)
        assert rows[2]["paper_macs_T"] is None


def test_memory_of_a_sample():
    kept = cost_points.counted(cost_points.at_length(preset("lm1b"), CACHED, 1024, 0.25))["memory"]
    assert kept["kv_cache"] == 4 * 2 * 12 * 1024 * 768  # its rows begin with a start token of their own
    own = cost_points.counted(cost_points.at_length(preset("lm1b"), OWN, 128, 0.25))
    assert own["memory"]["weights"] == 4 * (151_468_670 - 22_262_528) and own["memory"]["kv_cache"] == 0
    assert own["memory"]["activations"] == pytest.approx(4 * 128 * 32_100, rel=0.06)  # the logits and little more
    uncached = cost_points.counted(cost_points.at_length(preset("lm1b"), UNCACHED, 1024, 0.25))["memory"]
    assert uncached["kv_cache"] == 0 and uncached["activations"] > 4 * 1024 * (768 + 4 * 768)  # a layer over the whole text


def asked(tmp_path, **changes):
    values = {
        "preset": "smoke", "lengths": "8,12", "rates": "1,0.25", "measure": False, "batch": 1, "repeats": 2, "device": "cpu",
        "limit": 60.0, "out": tmp_path, "quiet": True,
    }  # fmt: skip
    return Namespace(**(values | changes))


def fake_trials(monkeypatch, seconds):
    calls = []

    def run(config, trial):
        calls.append((config.method, config.data.token_len))
        spent = seconds(config)
        return {"seconds": spent, "built_bytes": 1000, "peak_bytes": 5e8} if spent <= trial.limit else None

    monkeypatch.setattr(cost, "run_trial", run)
    return calls


def test_measured_points_are_medians_in_turns(tmp_path, monkeypatch):
    times = iter([1.0, 2.0, 30.0] * 100)
    calls = fake_trials(monkeypatch, lambda config: 0.25 if config.method != "elf" else next(times))
    outcome = cost.study(asked(tmp_path, measure=True, lengths="12", rates="0.25", repeats=3, batch=2), MICRO)
    assert calls[: len(calls) // 3] == calls[len(calls) // 3 : 2 * len(calls) // 3]  # each round has all of them
    full = next(row for row in outcome.result["by_length"] if row["system"] == cost_points.FULL)
    assert full["measured"]["seconds"] == 2.0 and "| 1 | 0.25 GB |" in markdown(outcome.tables)  # two texts at once
    assert outcome.write(tmp_path, "cost")[-1].stat().st_size > 10_000
    again = len(calls)
    assert (
        cost.study(asked(tmp_path, measure=True, lengths="12", rates="0.25", repeats=3, batch=2), MICRO).result
        == outcome.result
    )
    assert len(calls) == again  # found on the disk


def test_slow_sizes_are_left_out_with_a_sentence(tmp_path, monkeypatch):
    calls = fake_trials(monkeypatch, lambda config: 1e-9 * config.data.token_len**4 if config.method == "ar" else 0.01)
    trial = Trial("sample", 1, limit=5.0)
    points = [cost_points.at_length(MICRO_BASE, UNCACHED, length, 0.25) for length in (100, 200, 100_000, 200_000)]
    found = cost.Measurement(trial, 2, Parts(), Console(quiet=True)).run(points)
    assert [("seconds" in found[p.key]) for p in points] == [True, True, False, False]
    assert "expected, the limit is 5" in found[points[2].key]["left_out"]
    assert ("ar", 100_000) not in calls  # its time was foreseen
    alone = cost.Measurement(trial, 1, Parts(), Console(quiet=True)).run(points[2:3])
    assert alone[points[2].key] == {"left_out": "more than the limit of 5 s"}


def test_a_failing_size_does_not_cost_the_others(monkeypatch):
    def run(config, trial):
        if config.data.token_len > 10:
            raise RuntimeError("A trial failed: out of memory")
        return {"seconds": 0.1, "built_bytes": 1, "peak_bytes": 1}

    monkeypatch.setattr(cost, "run_trial", run)
    points = [cost_points.at_length(MICRO_BASE, OWN, length, 0.25) for length in (8, 12)]
    found = cost.Measurement(Trial("sample", 1), 1, Parts(), Console(quiet=True)).run(points)
    assert found[points[0].key]["seconds"] == 0.1 and "out of memory" in found[points[1].key]["left_out"]


def test_a_trial_in_its_own_process():
    found = run_trial(cost_points.at_length(MICRO_BASE, CACHED, 8, 0.25).config, Trial("sample", 2))
    assert found is not None and found["seconds"] > 0 and found["peak_bytes"] >= 0
    with pytest.raises(RuntimeError, match="A trial failed: .*nowhere"):
        run_trial(MICRO_BASE, Trial("sample", 1, device="nowhere"))


def test_the_command(tmp_path, capsys):
    words = ["study", "cost", "--preset", "smoke", "--lengths", "16,32", "--out", str(tmp_path), "--quiet"]
    assert main([*words, "--rates", "1,0.5"]) == 0
    shown = capsys.readouterr().out
    assert "| ELF, full length |" in shown and "attention is more than half" in shown
    result = json.loads((tmp_path / "study-cost.json").read_text())
    assert [row["rate"] for row in result["by_rate"]] == [1, 0.5] and len(result["by_length"]) == 2 * len(cost_points.SYSTEMS)
    assert (tmp_path / "study-cost.png").stat().st_size > 10_000
    assert main([*words, "--rates", "2"]) == 2 and "at most 1" in capsys.readouterr().err
    assert main([*words[:4], "--lengths", "8,x", *words[6:]]) == 2 and "numbers with commas" in capsys.readouterr().err
