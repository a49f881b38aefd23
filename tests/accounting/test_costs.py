"""Costs measured on shapes: against real tensors of every method, closed forms, and figures of the released model."""

import pytest
import torch
from closed_forms import own_parameters, own_sampling_macs, query_macs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jpeg_dlm.accounting import costs
from jpeg_dlm.accounting.info import as_released
from jpeg_dlm.accounting.meter import Meter
from jpeg_dlm.accounting.shapes import ShapeNoise
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation.trial import random_batch, train_pass
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method, names
from jpeg_dlm.nn.recompute import recompute_in_backward
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.training.sharding import repeated_layers

# An odd size in every place, so that no two terms of a formula can be exchanged unnoticed.
ODD = {
    "data.token_len": 11, "data.vocab_size": 37, "encoder.feature_dim": 20, "model.latent_len": 5, "model.latent_dim": 24,
    "model.bottleneck_dim": 7, "model.codec_layers": 3, "model.codec_heads": 2, "model.codec_mlp_ratio": 2.5,
    "model.proj_dim": 13, "model.hidden": 36, "model.depth": 2, "model.heads": 3, "model.mlp_ratio": 3.0,
    "model.freq_dim": 10, "model.time_tokens": 1, "model.sc_tokens": 2, "model.mode_tokens": 3, "sampler.steps": 6,
}  # fmt: skip


def odd(**more):
    return override(preset("smoke"), ODD | more)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", names("system", "stage"))
def test_parameters_are_those_of_the_method_with_weights(name):
    config = for_method(preset("smoke"), name)
    method, parts = build_method(config), costs.parameter_parts(costs.build_weightless(config))
    assert parts["total"] == sum(p.numel() for p in method.parameters() if p.requires_grad)
    assert parts.get("frozen", 0) == sum(p.numel() for p in method.parameters() if not p.requires_grad)


def test_a_weightless_method_takes_no_memory():
    large = override(preset("lm1b"), {"model.hidden": 76_800, "model.latent_dim": 51_200})  # about a trillion numbers
    method = costs.build_weightless(large)
    assert sum(p.numel() for p in method.parameters()) > 10**11
    assert all(p.is_meta for p in method.parameters() if p.ndim > 1)


# ---------------------------------------------------------------- training


class RealNoise(ShapeNoise):
    """The same rows are chosen, and all noise has values."""

    def _draw(self, law, purpose, shape):
        if len(shape) < 2:
            return super()._draw(law, purpose, shape)
        return {"normal": torch.randn, "uniform": torch.rand}[law]((len(self.rows) * self.copies, *shape))


def real_pass(config, rows, recompute, place):
    """A step on real tensors, with what `Meter` sees of them."""
    method = build_method(config).train()
    for layer in repeated_layers(method) if recompute else ():
        recompute_in_backward(layer)
    for p in method.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    step = round(place * config.train.steps)
    return costs._training_pass(method, config, RealNoise(0, range(rows), step, place=place))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", names("system", "stage"))
def test_a_step_on_shapes_costs_what_a_real_one_does(name, precision, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.nn.attention.faster_in_fp32", lambda v: False)  # shapes stand for a GPU
    config = for_method(override(preset("smoke"), {"train.precision": precision, "train.steps": 100}), name)
    for recompute in (False, True):
        ours = costs._training_cost(config, 6, recompute, [0.75], shapes=True)
        real = real_pass(config, 6, recompute, 0.75)
        assert (ours.forward, ours.backward) == (real.forward, real.backward)
        assert (ours.activations, ours.casts) == (real.activations, real.casts)
        peak, real_peak = (cost.activations + cost.casts + cost.working for cost in (ours, real))
        assert peak == pytest.approx(real_peak, rel=0.15 if recompute else 0.02)  # weights may be cast once more


def seen(function):
    """Multiply-accumulates of all matrix products; attention is run as plain products so that they are seen."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("name", [name for name in names("system", "stage") if name != "encoder"])
def test_operations_of_a_step_are_about_those_that_torch_sees(name):
    """With the trainer's own noise, whose choices nearly average out; plain attention has a product less in backward."""
    config = for_method(override(preset("smoke"), {"train.batch": 64}), name)
    method = build_method(config).train()
    batch = random_batch(config, 64, "cpu", type(method).uses_encoder)
    steps = [round(place * config.train.steps) for place in costs.PLACES]
    found = [seen(lambda step=step: train_pass(method, config, batch, step)) / 64 for step in steps]
    rel = 0.3 if name == "cosmos" else 0.08  # whose batches are conditioned all at once or not at all
    assert costs.training_cost(config, 64).macs == pytest.approx(sum(found) / 2, rel=rel)


def test_probabilities_decide_how_many_rows_take_part():
    config = override(preset("smoke"), {"train.batch": 8})
    none, half, all_ = (costs.training_cost(override(config, {"objective.sc_prob": p}), 8).forward for p in (0, 0.5, 1))
    assert half == pytest.approx((none + all_) / 2) and all_ > none
    cosmos = for_method(config, "cosmos")
    none, half, all_ = (costs.training_cost(override(cosmos, {"objective.sc_prob": p}), 8).forward for p in (0, 0.5, 1))
    assert half == pytest.approx((none + all_) / 2) and all_ > none


def test_phases_of_a_training_count_by_their_length():
    def forward(**options):
        config = override(
            for_method(preset("smoke"), "duo"), {"train.steps": 100} | {f"objective.{k}": v for k, v in options.items()}
        )
        return costs.training_cost(config, 4).forward

    never, half, always = forward(curriculum="none"), forward(), forward(curriculum_steps=100)
    assert half == pytest.approx((never + always) / 2) and always > never


def test_recomputed_layers_keep_little_and_cost_a_forward_pass():
    config = override(preset("lm1b"), {"model.depth": 4, "model.codec_layers": 2})
    plain, again = (costs.training_cost(config, 32, recompute) for recompute in (False, True))
    assert again.forward == plain.forward and 0 < again.backward - plain.backward < plain.forward
    inputs = 4 * 32 * (2 * (128 + 32) * 512 + 4 * 2 * (32 + 12) * 768)  # of every layer, in fp32
    assert inputs < again.activations < plain.activations / 2


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
def test_operations_of_a_sample(solver):
    config = odd(**{"sampler.solver": solver})
    expected = own_sampling_macs(config)
    released = costs.sampling_cost(config, prepare=as_released)
    assert (released.macs, released.attention) == (expected["total"], expected["attention"])
    assert released.parts["unembed_proj"] + released.parts["lm_head"] == expected["projection"]
    assert (released.parts["dit"], released.parts["decompressor"]) == (expected["dit"], expected["decompressor"])
    ours = costs.sampling_cost(config)
    assert expected["total"] - ours.macs == (config.data.token_len - 1) * query_macs(config)
    method = JpegDlm(config).eval()
    assert ours.macs == seen(lambda: method.sample(config.sampler, RowNoise(0, [0])))
    assert ours.weights == 4 * (own_parameters(config)["total"] - own_parameters(config)["compressor"])


def test_stored_times_have_no_other_number_of_steps():
    times = tuple(i / 7 for i in range(8))
    config = odd(**{"sampler.grid": "stored", "sampler.times": times, "sampler.steps": 7})
    assert costs.sampling_cost(config, prepare=as_released).macs == own_sampling_macs(config)["total"]


@pytest.mark.parametrize("name", ["jpeg-dlm", "elf", "cosmos", "flm", "ar"])
def test_sampling_holds_what_a_real_run_holds(name):
    config = override(for_method(preset("smoke"), name), {} if name == "ar" else {"sampler.steps": 5})
    ours, method = costs.sampling_cost(config, 3), build_method(config).eval()
    with Meter([*method.parameters(), *method.buffers()]) as meter:
        method.sample(config.sampler, RowNoise(0, range(3)))
    assert ours.macs == meter.macs // 3 and ours.attention == meter.attention // 3
    assert ours.peak == pytest.approx(meter.peak, rel=0.02)
