"""Plans of a training: memory that adds up, micro-batches that fit, time."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jpeg_dlm.cli.main import main
from jpeg_dlm.cost import flops, plan
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.util.errors import UsageError

SPEED = plan.Speed(1e12, "made up")


def test_the_frozen_encoder():
    sizes = {"encoder.feature_dim": 24, "encoder.depth": 3, "encoder.heads": 2, "data.vocab_size": 50, "data.token_len": 7}
    parameters, macs = plan.encoder_cost(override(preset("smoke"), sizes))
    encoder = SmallEncoder(50, 24, 3, 2)
    assert parameters == sum(p.numel() for p in encoder.parameters() if p.ndim == 2)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        encoder.hidden(torch.zeros(1, 7, dtype=torch.long))
    assert macs == counter.get_total_flops() / 2
    assert plan.encoder_cost(preset("lm1b"))[0] == 35_323_904  # T5-small; 35,330,816 with norms and position biases


def test_devices_tokens_and_speeds_are_read():
    cases = {"8x80GB": (8, 80e9), "1x0.5GB": (1, 0.5e9), " 4 x 40 GiB ": (4, 40 * 2**30), "1×900MB": (1, 9e8)}
    for text, expected in cases.items():
        devices = plan.parse_devices(text)
        assert (devices.count, devices.capacity) == expected
    for wrong in ("", "8", "80GB", "8x80", "0x80GB", "8x0GB", "-1x8GB", "2.5x80GB", "8x1e3GB"):
        with pytest.raises(UsageError):
            plan.parse_devices(wrong)
    assert [plan.parse_tokens(t) for t in ("1.2B", "800M", "5000", "3 k")] == [1.2e9, 8e8, 5000, 3000]
    for wrong in ("", "many", "-5", "0", "1Q"):
        with pytest.raises(UsageError):
            plan.parse_tokens(wrong)
    assert plan.stated_speed(preset("lm1b"), 100, 0.5).flops == 5e13
    assert plan.stated_speed(preset("lm1b"), None, None).flops == 312e12 * 0.3


def test_memory_adds_up_and_time_is_operations_over_speed():
    config = override(preset("smoke"), {"train.batch": 16, "train.accumulation": 4})
    planned = plan.make_plan(config, plan.parse_devices("2x80GB"), SPEED, 1e6)
    parts, cost = flops.parameter_parts(flops.build_weightless(config)), flops.training_cost(config, 16)
    plain, sharded = (planned["placements"][name]["memory"] for name in ("none", "fsdp"))
    weights = 4 * parts["total"]
    assert plain["weights"] == plain["gradients"] == plain["ema"] == plain["communication"] == weights
    assert (plain["optimizer"], plain["copies"], plain["activations"]) == (2 * weights, 4 * parts["frozen"], cost.activations)
    assert sharded["optimizer"] == pytest.approx(weights, rel=1e-6) and sharded["communication"] == weights
    assert plain["total"] == sum(size for name, size in plain.items() if name != "total")
    assert planned["rows_per_step"] == 64 and planned["tokens_per_step"] == 64 * 16
    assert planned["row_macs"] == plan.encoder_cost(config)[1] + cost.forward + cost.backward
    assert planned["seconds_per_step"] == pytest.approx(2 * planned["row_macs"] * 32 / 1e12)
    (time,) = (row[1] for row in plan.plan_tables(planned | {"days": 5 / 86_400})[0].rows if row[0] == "whole run")
    assert time == "5 s"
    assert planned["days"] == pytest.approx(600 * planned["seconds_per_step"] / 86_400) and planned["steps"] == 600


def test_the_largest_micro_batch_that_fits(monkeypatch):
    def a_gigabyte_a_row(config, rows):
        return flops.TrainingCost(1e9, 2e9, rows * 10**9)

    monkeypatch.setattr(plan, "training_cost", a_gigabyte_a_row)
    for text in ("8x80GB", "2x24GB", "3x16GB", "1x12GB"):
        devices = plan.parse_devices(text)
        planned = plan.make_plan(preset("owt1024"), devices, SPEED)
        rows = math.ceil(384 / devices.count)
        for placement in planned["placements"].values():
            state, room = placement["memory"]["total"] - planned["batch"] * 1e9, plan.USABLE * devices.capacity
            fitting = [b for b in range(1, planned["batch"] + 1) if rows % b == 0 and state + b * 1e9 <= room]
            assert placement["fits"] == max(fitting)
    tight = plan.make_plan(preset("lm1b"), plan.parse_devices("8x4GB"), SPEED, 78_643_200)
    assert tight["placements"]["none"]["fits"] == 0 < tight["placements"]["fsdp"]["fits"]  # the state alone fills a device
    assert tight["steps"] == 20 * 78_643_200 / (6144 * 128)
    cosmos, devices = for_method(preset("lm1b"), "cosmos"), plan.parse_devices("8x80GB")
    first, second = (plan.make_plan(stage, devices, SPEED) for stage in plan.stages(cosmos))
    assert (first["steps"], second["steps"]) == (200_000, 500_000)


def test_the_command(capsys):
    assert main(["info", "--plan", "--preset", "smoke", "--devices", "8x80GB", "--tflops", "100", "--utilization", "0.5"]) == 0
    assert "--train.batch" in capsys.readouterr().out
    for wrong in (["--devices", "8x80GB"], ["--plan", "--devices", "eight"], ["--plan", "--tokens", "lots"]):
        assert main(["info", *wrong]) == 2
