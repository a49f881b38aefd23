"""Plans: operations of a real step of every system, memory that adds up, and advice that works."""

import json
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jpeg_dlm.cli.main import main
from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation import plan
from jpeg_dlm.evaluation.memory import activation_bytes
from jpeg_dlm.evaluation.training_counts import STEPS, encoder_size, training_macs
from jpeg_dlm.evaluation.trial import random_batch, train_pass
from jpeg_dlm.methods.registry import build_method, for_method, names
from jpeg_dlm.presets import preset

# ---------------------------------------------------------------- operations


def seen(function) -> float:
    """Multiply-accumulates of all matrix products; attention is run as plain products so that they are seen."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / 2


def step_macs(config) -> float:
    """Of one row of a real step; the features are given, so the encoder is not in it."""
    method = build_method(config).train()
    batch = random_batch(config, config.train.batch, "cpu", type(method).uses_encoder)
    return seen(lambda: train_pass(method, config, batch)) / config.train.batch


CASES = {
    "jpeg-dlm": {}, "ar": {}, "mdlm": {}, "sedd": {}, "duo": {"objective.curriculum_steps": 100, "train.steps": 100},
    "elf": {}, "langflow": {}, "flm": {}, "cosmos": {"objective.sc_prob": 1}, "cosmos-codec": {},
}  # fmt: skip


def test_every_system_has_a_plan():
    assert set(CASES) == set(STEPS) == set(names("system", "stage")) - {"encoder"}


@pytest.mark.parametrize("name", CASES)
def test_operations_of_a_step_are_those_that_torch_sees(name):
    options = {"data.cache_features": True, "train.batch": 64}
    config = override(for_method(override(preset("smoke"), options), name), CASES[name])
    rel = 0.06 if name in ("elf", "langflow", "jpeg-dlm") else 0.02  # these choose rows at random, which nearly average out
    assert training_macs(config)["total"] == pytest.approx(step_macs(config), rel=rel)


@pytest.mark.parametrize(
    "options",
    [
        {"objective.sc_prob": 0}, {"objective.sc_prob": 1}, {"objective.ce_chunk": 64}, {"objective.ce_time_min": 0.5},
        {"objective.flow_draws": 3, "objective.sc_prob": 1},
        {"objective.sigreg_weight": 0, "objective.reg_max_rows": 16}, {"model.latent_len": 16, "model.depth": 3},
    ],
)  # fmt: skip
def test_options_of_jpeg_dlm_change_what_they_should(options):
    config = override(preset("smoke"), {"data.cache_features": True, "train.batch": 32} | options)
    rel = 0.01 if options.get("objective.sc_prob") in (0, 1) else 0.06  # else half of 32 rows is not quite 16
    assert training_macs(config)["total"] == pytest.approx(step_macs(config), rel=rel)


def test_parts_of_a_step():
    parts = training_macs(preset("lm1b"))
    assert parts["total"] == sum(n for name, n in parts.items() if name != "total")
    assert parts["backward"] == pytest.approx(2 * parts["forward"])
    again = training_macs(preset("lm1b"), recompute=True)
    assert 0 < again["again"] - parts["again"] < parts["forward"]
    assert training_macs(override(preset("lm1b"), {"data.cache_features": True}))["encoder"] == 0
    with pytest.raises(UsageError, match="flow map"):
        training_macs(override(for_method(preset("smoke"), "flm"), {"objective.flow_map": True}))


def test_the_frozen_encoder():
    size = encoder_size(EncoderConfig(feature_dim=24, depth=3, heads=2), 50)
    encoder = SmallEncoder(50, 24, 3, 2)
    matrices = sum(p.numel() for p in encoder.parameters() if p.ndim == 2)
    assert size is not None and size.parameters() == matrices
    with torch.no_grad():
        assert size.macs(7) == seen(lambda: encoder.hidden(torch.zeros(1, 7, dtype=torch.long)))
    t5 = encoder_size(preset("lm1b").encoder, 32_100)
    assert t5 is not None and t5.parameters() == 35_323_904  # 35,330,816 with its norms and position biases
    assert encoder_size(EncoderConfig(kind="hf", name="someone/large"), 10) is None


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
PLAIN, AGAIN = plan.Layout(False, False), plan.Layout(False, True)


def test_memory_of_a_device_adds_up():
    config, count = preset("lm1b"), 8
    sizes = plan.sizes_of(config)
    found = plan.memory_per_device(config, sizes, count, PLAIN)
    assert found["total"] == sum(size for name, size in found.items() if name != "total")
    weights = 4 * 151_468_670
    assert found["weights"] == found["gradients"] == found["ema"] == found["communication"] == weights
    assert (found["optimizer"], found["bf16_weights"]) == (2 * weights, weights // 2)
    assert found["activations"] == activation_bytes(config)
    sharded = plan.memory_per_device(config, sizes, count, plan.Layout(True, False))
    for name in ("weights", "gradients", "optimizer", "ema"):
        assert sharded[name] == pytest.approx(found[name] / count, rel=1e-6)
    assert sharded["communication"] < found["communication"] and sharded["activations"] == found["activations"]
    alone = plan.memory_per_device(config, sizes, 1, PLAIN)
    assert alone["communication"] == 0 and alone["weights"] == weights


@pytest.mark.parametrize("name", [name for name in names("system", "stage") if name not in ("jpeg-dlm", "encoder")])
def test_sizes_of_other_systems(name):
    config = for_method(preset("smoke"), name)
    method, sizes = build_method(config), plan.sizes_of(config)
    assert sizes.trained == sum(p.numel() for p in method.parameters() if p.requires_grad)
    assert sizes.copies == sum(p.numel() for p in method.parameters() if not p.requires_grad)
    assert 0 < sizes.layer < sizes.trained


def test_time_is_operations_over_speed():
    config = override(preset("smoke"), {"train.batch": 16, "train.accumulation": 4, "train.devices": 1})
    found = plan.make_plan(config, plan.parse_devices("2x80GB"), SPEED, 1e6)
    way = found["ways"][0]
    assert found["rows_per_step"] == 64 and found["tokens_per_step"] == 64 * 16
    row = training_macs(override(config, {"train.batch": 16}))["total"]
    assert way["seconds_per_step"] == pytest.approx(2 * row * 32 / 1e12)
    assert found["days"] == pytest.approx(600 * way["seconds_per_step"] / 86_400) and found["steps"] == 600
    assert found["tokens_per_day"] == pytest.approx(1024 * 86_400 / way["seconds_per_step"])
    # Steps out of epochs, where a preset has no number of steps.
    paper = plan.make_plan(preset("lm1b"), plan.parse_devices("8x80GB"), SPEED, 78_643_200)
    assert paper["steps"] == 20 * 78_643_200 / (6144 * 128)


def test_advice_works():
    """What is advised fits, keeps the rows of a step, and is no smaller than it must be."""
    config = preset("owt1024")
    for text in ("8x80GB", "2x24GB", "3x16GB", "1x12GB"):
        devices = plan.parse_devices(text)
        found = plan.make_plan(config, devices, SPEED)
        way = found["ways"][found["chosen"]]
        rows = -(-384 // devices.count)
        assert way["batch"] * way["accumulation"] == rows and found["rows_per_step"] == rows * devices.count
        layout, sizes = plan.Layout(way["fsdp"], way["recompute"]), plan.sizes_of(config)

        def total(batch, layout=layout, sizes=sizes, devices=devices):
            return plan.memory_per_device(plan.with_batch(config, batch), sizes, devices.count, layout)["total"]

        room = plan.USABLE * devices.capacity
        assert total(way["batch"]) <= room
        larger = [b for b in range(way["batch"] + 1, 25) if rows % b == 0]
        assert all(total(b) > room for b in larger)
        assert f"--train.batch {way['batch']} --train.accumulation {way['accumulation']}" in " ".join(plan.advice(found))


def test_the_config_is_asked_first():
    devices = plan.parse_devices("8x80GB")
    own = override(preset("lm1b"), {"train.sharding": "fsdp", "train.checkpoint_layers": True})
    found = plan.make_plan(own, devices, SPEED)
    assert found["ways"][found["chosen"]]["layout"] == "FSDP + checkpointing" and len(found["ways"]) == 4
    assert plan.layouts(own, 1)[0] == AGAIN  # one device has nothing to spread
    small = plan.make_plan(preset("lm1b"), plan.parse_devices("8x4GB"), SPEED)
    assert "--train.sharding fsdp" in " ".join(plan.advice(small))  # the state alone fills a device


def test_what_cannot_fit_is_said():
    found = plan.make_plan(preset("lm1b"), plan.parse_devices("1x0.5GB"), SPEED)
    assert all(way["batch"] == 0 for way in found["ways"])
    assert "Not even one row fits" in plan.advice(found)[0]
    wide = override(for_method(preset("lm1b"), "ar"), {"objective.ce_chunk": 0, "train.batch": 384})
    said = " ".join(plan.advice(plan.make_plan(wide, plan.parse_devices("8x40GB"), SPEED)))
    assert "--objective.ce-chunk 8192" in said
    unknown = override(preset("lm1b"), {"encoder.name": "someone/large"})
    assert "text encoder is not counted" in " ".join(plan.advice(plan.make_plan(unknown, plan.parse_devices("8x80GB"), SPEED)))


def test_a_first_stage_is_planned_too():
    config = for_method(preset("lm1b"), "cosmos")
    found = plan.full_plan(config, plan.parse_devices("8x80GB"), SPEED)
    assert (found["steps"], found["first_stage"]["steps"]) == (500_000, 200_000)
    assert "Both stages" in plan.format_plan(found)


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


def test_a_plan_of_jpeg_dlm_does_not_load_torch():
    code = (
        "import sys; from jpeg_dlm.evaluation.plan import *; from jpeg_dlm.presets import preset; c = preset('lm1b');"
        "full_plan(c, parse_devices('8x80GB'), stated_speed(c, None, None)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
