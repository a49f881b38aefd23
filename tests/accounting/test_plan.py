"""Plans: memory that adds up, advice that works, and a plan for a method that nobody has heard of."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jpeg_dlm.accounting import plan, plan_text
from jpeg_dlm.accounting.encoder import encoder_size
from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods import registry
from jpeg_dlm.methods.ar import Ar
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset

# ---------------------------------------------------------------- the frozen encoder


def test_the_frozen_encoder():
    size = encoder_size(
        override(preset("smoke"), {"encoder.feature_dim": 24, "encoder.depth": 3, "encoder.heads": 2, "data.vocab_size": 50})
    )
    encoder = SmallEncoder(50, 24, 3, 2)
    matrices = sum(p.numel() for p in encoder.parameters() if p.ndim == 2)
    assert size is not None and size.parameters() == matrices
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        encoder.hidden(torch.zeros(1, 7, dtype=torch.long))
    assert size.macs(7) == counter.get_total_flops() / 2
    t5 = encoder_size(preset("lm1b"))
    assert t5 is not None and t5.parameters() == 35_323_904  # 35,330,816 with its norms and position biases
    assert encoder_size(override(preset("lm1b"), {"encoder.name": "someone/large"})) is None


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("text", "count", "capacity"),
    [("8x80GB", 8, 80e9), ("2x24GB", 2, 24e9), ("1x0.5GB", 1, 0.5e9), (" 4 x 40 GiB ", 4, 40 * 2**30), ("1×900MB", 1, 9e8)],
)
def test_devices_are_read(text, count, capacity):
    devices = plan.parse_devices(text)
    assert (devices.count, devices.capacity) == (count, capacity)


@pytest.mark.parametrize(
    "text", ["", "8", "80GB", "8x", "8x80", "0x80GB", "8x0GB", "-1x8GB", "8x80GBs", "x80GB", "2.5x80GB", "8x1e3GB"]
)
def test_other_devices_are_refused(text):
    with pytest.raises(UsageError, match="8x80GB"):
        plan.parse_devices(text)


def test_tokens_and_speeds():
    assert [plan.parse_tokens(t) for t in ("1.2B", "800M", "5000", "3 k")] == [1.2e9, 8e8, 5000, 3000]
    for wrong in ("", "many", "-5", "0", "1Q"):
        with pytest.raises(UsageError):
            plan.parse_tokens(wrong)
    config = preset("lm1b")
    assert plan.stated_speed(config, 100, 0.5).flops == 5e13
    assert plan.stated_speed(config, None, None).flops == 312e12 * 0.3
    for wrong in ((0, None), (-1, None), (10, 0.0), (10, 1.5)):
        with pytest.raises(UsageError):
            plan.stated_speed(config, *wrong)


# ---------------------------------------------------------------- memory and time

SPEED = plan.Speed(1e12, "made up")
PLAIN, AGAIN = plan.Placement(False, False), plan.Placement(False, True)


def linear_costs(config):
    """Costs that grow with the rows, in place of measured ones: a gigabyte a row, a tenth with layers computed again."""

    def cost(rows, recompute):
        kept = round(rows * 1e9 * (0.1 if recompute else 1))
        return SimpleNamespace(forward=1e9, backward=3e9 if recompute else 2e9, activations=kept, casts=3 * 10**8, working=0)

    return plan.Training(config, 151_468_670, 22_262_528, None, cost)


def test_memory_of_a_device_adds_up():
    training, count = linear_costs(preset("lm1b")), 8
    found = training.memory(2, count, PLAIN)
    assert found["total"] == sum(size for name, size in found.items() if name != "total")
    weights = 4 * 151_468_670
    assert found["weights"] == found["gradients"] == found["ema"] == found["communication"] == weights
    assert (found["optimizer"], found["bf16_weights"], found["activations"]) == (2 * weights, 3 * 10**8, 2 * 10**9)
    sharded = training.memory(2, count, plan.Placement(True, False))
    for name in ("weights", "gradients", "optimizer", "ema"):
        assert sharded[name] == pytest.approx(found[name] / count, rel=1e-6)
    assert sharded["communication"] == weights and sharded["activations"] == found["activations"]
    alone = training.memory(2, 1, PLAIN)
    assert alone["communication"] == 0 and alone["weights"] == weights


def test_time_is_operations_over_speed():
    config = override(preset("smoke"), {"train.batch": 16, "train.accumulation": 4, "train.devices": 1})
    found = plan.make_plan(config, plan.parse_devices("2x80GB"), SPEED, 1e6)
    way = found["ways"][0]
    assert found["rows_per_step"] == 64 and found["tokens_per_step"] == 64 * 16
    row = plan.measured_training(config).row_macs(16, False)
    assert row["encoder"] > 0 and row["total"] == row["encoder"] + row["forward"] + row["backward"]
    assert way["seconds_per_step"] == pytest.approx(2 * row["total"] * 32 / 1e12)
    assert found["days"] == pytest.approx(600 * way["seconds_per_step"] / 86_400) and found["steps"] == 600
    assert found["tokens_per_day"] == pytest.approx(1024 * 86_400 / way["seconds_per_step"])


@pytest.fixture
def measured_at_once(monkeypatch):
    monkeypatch.setattr(plan, "measured_training", linear_costs)


def test_steps_out_of_epochs(measured_at_once):
    paper = plan.make_plan(preset("lm1b"), plan.parse_devices("8x80GB"), SPEED, 78_643_200)
    assert paper["steps"] == 20 * 78_643_200 / (6144 * 128)


def test_advice_works(measured_at_once):
    """What is advised fits, keeps the rows of a step, and is no smaller than it must be."""
    config = preset("owt1024")
    training = linear_costs(config)
    for text in ("8x80GB", "2x24GB", "3x16GB", "1x12GB"):
        devices = plan.parse_devices(text)
        found = plan.make_plan(config, devices, SPEED)
        way = found["ways"][found["chosen"]]
        rows = -(-384 // devices.count)
        assert way["batch"] * way["accumulation"] == rows and found["rows_per_step"] == rows * devices.count
        layout, room = plan.Placement(way["fsdp"], way["recompute"]), plan.USABLE * devices.capacity
        totals = {b: training.memory(b, devices.count, layout)["total"] for b in range(1, 25) if rows % b == 0}
        assert totals[way["batch"]] <= room and all(total > room for b, total in totals.items() if b > way["batch"])
        assert f"--train.batch {way['batch']} --train.accumulation {way['accumulation']}" in " ".join(plan_text.advice(found))


def test_the_config_is_asked_first(measured_at_once):
    devices = plan.parse_devices("8x800GB")
    own = override(preset("lm1b"), {"train.sharding": "fsdp", "train.checkpoint_layers": True})
    found = plan.make_plan(own, devices, SPEED)
    assert found["ways"][found["chosen"]]["layout"] == "FSDP + checkpointing" and len(found["ways"]) == 4
    assert plan.layouts(own, 1)[0] == AGAIN  # one device has nothing to spread
    small = plan.make_plan(preset("lm1b"), plan.parse_devices("8x4GB"), SPEED)
    assert "--train.sharding fsdp" in " ".join(plan_text.advice(small))  # the state alone fills a device


def test_what_cannot_fit_is_said(measured_at_once):
    found = plan.make_plan(preset("lm1b"), plan.parse_devices("1x0.5GB"), SPEED)
    assert all(way["batch"] == 0 for way in found["ways"])
    assert "Not even one row fits" in plan_text.advice(found)[0]
    unknown = override(preset("lm1b"), {"encoder.name": "someone/large"})
    said = " ".join(plan_text.advice(plan.make_plan(unknown, plan.parse_devices("8x80GB"), SPEED)))
    assert "text encoder is not counted" in said


def test_logits_that_are_many_are_said():
    wide = override(
        for_method(preset("smoke"), "ar"), {"objective.ce_chunk": 0, "data.vocab_size": 30_000, "train.batch": 2048}
    )
    found = plan.make_plan(wide, plan.parse_devices("1x4GB"), SPEED)
    assert found["logit_share"] > 0.3 and "--objective.ce-chunk 8192" in " ".join(plan_text.advice(found))


def test_a_first_stage_is_planned_too(measured_at_once):
    config = for_method(preset("lm1b"), "cosmos")
    found = plan.full_plan(config, plan.parse_devices("8x80GB"), SPEED)
    assert (found["steps"], found["first_stage"]["steps"]) == (500_000, 200_000)
    assert "Both stages" in plan_text.format_plan(found)
    unknown = found | {"steps": 0, "days": 0.0}  # an unknown corpus
    assert "whole run" in plan_text.format_plan(unknown) and "Both stages" not in plan_text.format_plan(unknown)


class Stranger(Ar):
    """A method of someone else, which looks at what its network says."""

    title = "Stranger"

    def losses(self, batch, noise):
        losses = super().losses(batch, noise)
        return {name: loss * (2 if loss.item() > 0 else 1) for name, loss in losses.items()}


def test_a_new_method_has_a_plan_without_being_known_here(monkeypatch):
    config = for_method(preset("smoke"), "ar")
    known = plan.make_plan(config, plan.parse_devices("1x8GB"), SPEED)
    monkeypatch.setitem(registry.METHODS, "stranger", registry.Entry("system", f"{__name__}:Stranger"))
    found = plan.make_plan(replace(config, method="stranger"), plan.parse_devices("1x8GB"), SPEED)
    assert found["row_macs"] == known["row_macs"]  # measured on real rows, as its method needs values
    for ours, theirs in zip(found["ways"], known["ways"], strict=True):
        assert ours["memory"]["total"] == pytest.approx(theirs["memory"]["total"], rel=0.1)


def test_the_speed_of_this_machine():
    config = override(preset("smoke"), {"train.batch": 4})
    speed = plan.measured_speed(config, "cpu")
    assert 1e6 < speed.flops < 1e16 and "measured here (cpu" in speed.said and "4 rows" in speed.said


# ---------------------------------------------------------------- the command


def test_the_command(capsys):
    assert main(["info", "--plan", "--devices", "8x80GB", "--tflops", "100", "--utilization", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "lm1b (jpeg-dlm), bf16, on 8x80GB" in shown and "100 TFLOP/s (stated) x 0.5 utilization" in shown
    assert "It fits with DDP" in shown and "6,144" in shown and max(map(len, shown.splitlines())) <= 128
    assert main(["info", "--plan", "--method", "ar", "--devices", "2x24GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "ar" and found["steps"] == 1_000_000 and len(found["ways"]) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "8x80GB"], "--devices belongs to a plan"),
        (["--plan", "--devices", "eight"], "such as 8x80GB"),
        (["--plan", "--measured", "--tflops", "3"], "either measured or stated"),
        (["--plan", "--tokens", "lots"], "such as 800M"),
    ],
)
def test_wrong_requests(words, said, capsys):
    assert main(["info", *words]) == 2
    assert said in capsys.readouterr().err
