"""Costs measured on shapes: against real tensors of every method, and closed forms."""

import pytest
import torch
from closed_forms import own_sampling_macs, query_macs
from micro import PIECES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jpeg_dlm.cost import flops
from jpeg_dlm.cost.flops import CostMeter, ShapeNoise
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method, names
from jpeg_dlm.nn.layers import recompute_in_backward
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.training.sharding import repeated_layers
from jpeg_dlm.util.rng import RowNoise

# An odd size in every place, so that no two terms of a formula can be exchanged unnoticed.
MODEL = {"latent_len": 5, "latent_dim": 24, "bottleneck_dim": 7, "codec_layers": 3, "codec_heads": 2}
MODEL |= {"proj_dim": 13, "hidden": 36, "depth": 2, "heads": 3, "freq_dim": 10}
MODEL |= {"time_tokens": 1, "sc_tokens": 2, "mode_tokens": 3}
ODD = PIECES | {f"model.{name}": size for name, size in MODEL.items()}
ODD |= {"data.token_len": 11, "data.vocab_size": 37, "encoder.feature_dim": 20, "sampler.steps": 6}


def test_a_weightless_method_takes_no_memory():
    large = override(preset("lm1b"), {"model.hidden": 76_800, "model.latent_dim": 51_200})  # about a trillion numbers
    method = flops.build_weightless(large)
    assert sum(p.numel() for p in method.parameters()) > 10**11
    assert all(p.is_meta for p in method.parameters() if p.ndim > 1)


class RealNoise(ShapeNoise):
    """The same rows are chosen, and all noise has values."""

    def _draw(self, law, purpose, shape):
        if len(shape) < 2:
            return super()._draw(law, purpose, shape)
        return {"normal": torch.randn, "uniform": torch.rand}[law]((len(self.rows) * self.copies, *shape))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", names("system", "stage"))
def test_a_step_on_shapes_costs_what_a_real_one_does(name, recompute, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.nn.layers.PRODUCT_KEYS", 0)  # shapes stand for a GPU
    monkeypatch.setattr(flops, "PLACES", (0.75,))
    options = {"train.precision": "bf16", "train.steps": 100, "train.checkpoint_layers": recompute}
    config = for_method(override(preset("smoke"), options), name)
    method = build_method(config).train()
    for layer in repeated_layers(method) if recompute else ():
        recompute_in_backward(layer)
    for p in method.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    real = flops.training_pass(method, config, RealNoise(0, range(6), 75, place=0.75))
    ours = flops.training_cost(config, 6)
    assert (ours.forward, ours.backward) == (real.forward, real.backward)
    # Weights may be cast once more where layers are computed again.
    assert ours.activations == pytest.approx(real.activations, rel=0.15 if recompute else 0.02)


def forward_macs(config, **options):
    return flops.training_cost(override(config, {f"objective.{name}": value for name, value in options.items()}), 8).forward


def test_probabilities_and_phases_count_by_their_share():
    duo = override(for_method(preset("smoke"), "duo"), {"train.steps": 100})
    never, half, always = forward_macs(duo, curriculum="none"), forward_macs(duo), forward_macs(duo, curriculum_steps=100)
    assert half == pytest.approx((never + always) / 2) and always > never


@pytest.mark.parametrize("solver", ["euler", "sde"])
def test_operations_of_a_sample(solver):
    config = override(preset("smoke"), ODD | {"sampler.solver": solver})
    ours, repeated = flops.sampling_macs(config), (config.data.token_len - 1) * query_macs(config)  # by the released code
    assert ours == own_sampling_macs(config)["total"] - repeated
    method = JpegDlm(config).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # attention as products that are seen
        method.sample(config.sampler, RowNoise(0, [0]))
    assert ours == counter.get_total_flops() / 2


@pytest.mark.parametrize("name", ["elf", "cosmos", "flm", "ar"])
def test_sampling_costs_what_a_real_run_does(name):
    config = for_method(preset("smoke"), name)
    config = config if name == "ar" else override(config, {"sampler.steps": 5})
    method = build_method(config).eval()
    with CostMeter() as meter:
        method.sample(config.sampler, RowNoise(0, [0]))
    assert flops.sampling_macs(config) == meter.macs
