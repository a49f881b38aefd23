"""Counts and memory by formula against the networks themselves, and against figures of the released model."""

import dataclasses
import subprocess
import sys
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation import counts, memory
from jpeg_dlm.evaluation.trial import random_batch, train_pass
from jpeg_dlm.methods.base import Method
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise

# An odd size in every place, so that no two terms of a formula can be exchanged unnoticed.
ODD = {
    "data.token_len": 11, "data.vocab_size": 37, "encoder.feature_dim": 20, "model.latent_len": 5, "model.latent_dim": 24,
    "model.bottleneck_dim": 7, "model.codec_layers": 3, "model.codec_heads": 2, "model.codec_mlp_ratio": 2.5,
    "model.proj_dim": 13, "model.hidden": 36, "model.depth": 2, "model.heads": 3, "model.mlp_ratio": 3.0,
    "model.freq_dim": 10, "model.time_tokens": 1, "model.sc_tokens": 2, "model.mode_tokens": 3, "sampler.steps": 6,
}  # fmt: skip


def odd(**more) -> Config:
    return override(preset("smoke"), ODD | more)


def size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "compressor", "decompressor", "total"),
    [  # counted on a reconstruction of the released model
        ("lm1b", 22_262_528, 24_362_778, 151_468_670),
        ("owt1024", 22_967_040, 25_067_290, 152_877_694),
    ],
)
def test_parameters_of_the_released_models(name, compressor, decompressor, total):
    assert counts.parameter_counts(preset(name)) == {
        "compressor": compressor,
        "decompressor": decompressor,
        "dit": 88_113_408,
        "unembed_proj": 262_656,
        "lm_head": 16_467_300,
        "dit_and_projection": 104_843_364,
        "total": total,
    }


@pytest.mark.parametrize("config", [preset("smoke"), preset("tiny"), odd(), odd(**{"model.shared": False})])
def test_parameters_equal_those_of_the_modules(config):
    method = JpegDlm(config)
    parts = counts.parameter_counts(config)
    modules = {name: size(getattr(method, name)) for name in parts if name not in ("dit_and_projection", "total")}
    assert {name: parts[name] for name in modules} == modules
    assert parts["total"] == size(method) - size(method.target)


# ---------------------------------------------------------------- operations


@pytest.mark.parametrize(
    ("name", "compressed", "full"),
    [  # 1e12 multiply-accumulates, counted on the released model; the paper prints 0.13 / 0.40 and 1.68 / 3.56
        ("lm1b", 0.131, 0.414),
        ("owt1024", 1.704, 3.648),
    ],
)
def test_operations_of_the_released_models(name, compressed, full):
    config = preset(name)
    ours = counts.sampling_macs(config)
    assert ours["evaluations"] == 33
    assert ours["total"] / 1e12 == pytest.approx(compressed, abs=5e-4)
    assert counts.sampling_macs(config, config.data.token_len)["total"] / 1e12 == pytest.approx(full, abs=5e-4)


@torch.no_grad()
def measured(function) -> int:
    """Multiply-accumulates of all matrix products; attention is run as plain products so that they are seen."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("config", [preset("smoke"), odd()])
def test_operations_equal_what_the_networks_do(config):
    method = JpegDlm(config).eval()
    m, tokens = config.model, config.data.token_len
    z, one = torch.randn(1, m.latent_len, m.latent_dim), torch.ones(1)
    assert counts.dit_macs(config, m.latent_len) == measured(lambda: method.dit(z, one, None, one))
    # The released code runs the query network at every token, ours once for all.
    saved = (tokens - 1) * 2 * m.latent_dim * counts.codec_inner(config)
    assert counts.decompressor_macs(config, m.latent_len) - saved == measured(lambda: method.decompressor(z))
    h = torch.randn(1, tokens, config.encoder.feature_dim)
    assert counts.projection_macs(config) == measured(lambda: method.project(h))


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
def test_operations_of_a_whole_sample(solver):
    config = odd(**{"sampler.solver": solver})
    method, m = JpegDlm(config).eval(), config.model
    saved = (config.data.token_len - 1) * 2 * m.latent_dim * counts.codec_inner(config)
    seen = measured(lambda: method.sample(config.sampler, RowNoise(0, [0])))
    assert seen == counts.sampling_macs(config)["total"] - saved


def test_full_length_means_one_latent_per_token():
    config = odd()
    full = override(config, {"model.latent_len": config.data.token_len})
    assert counts.sampling_macs(config, config.data.token_len) == counts.sampling_macs(full)


# ---------------------------------------------------------------- steps and memory


@pytest.mark.parametrize(("name", "tokens"), [("lm1b", 6144 * 128), ("owt1024", 384 * 1024)])
def test_tokens_per_step(name, tokens):
    assert counts.tokens_per_step(preset(name)) == tokens


def saved_for_backward(method: Method, config: Config) -> int:
    """Bytes of distinct storages that autograd keeps, weights left out."""
    own = {p.untyped_storage().data_ptr() for p in [*method.parameters(), *method.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    rows, bf16 = config.train.batch, config.train.precision == "bf16"
    batch = random_batch(config, rows, "cpu", type(method).uses_encoder)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        losses = method.losses(batch, RowNoise(0, range(rows)))  # noqa: F841 - the graph must live while storages are summed
    return sum(storage.nbytes() for storage in kept.values())


BLOCKS = {"jpeg-dlm": "dit", "elf": "dit", "ar": "causal", "mdlm": "ddit", "duo": "ddit", "flm": "capped", "cosmos": "unet"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_layer_keeps_for_backward(name, precision):
    """A layer more, and rows more, keep what the formula says: everything else of a step is in the difference twice."""
    config = override(for_method(preset("smoke"), name), {"train.precision": precision})

    def kept(depth: int, rows: int) -> int:
        sized = override(config, {"model.depth": depth, "train.batch": rows})
        return saved_for_backward(build_method(sized).train(), sized)

    rows = 8
    found = (kept(3, 2 * rows) - kept(2, 2 * rows) - kept(3, rows) + kept(2, rows)) / rows
    [stack] = [stack for stack in memory.stacks(config) if stack.kind == BLOCKS[name]]
    assert stack.bytes_per_layer(precision == "bf16") == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("options", [{}, {"model.depth": 5}, {"model.codec_layers": 5}, {"data.vocab_size": 3000}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_activation_estimate(options, precision):
    """Of rows more: under autocast also the weights are kept, once."""
    config = override(preset("smoke"), {"train.precision": precision, "objective.sigreg_weight": 0} | options)
    found, kept = [], []
    for rows in (8, 16):
        sized = override(config, {"train.batch": rows})
        # Autograd's list lacks the second copy of the logits, which exists only for a moment.
        moment = memory.FP32 * rows * config.data.token_len * config.data.vocab_size
        found.append(memory.activation_bytes(sized) - moment)
        kept.append(saved_for_backward(JpegDlm(sized), sized))
    assert found[1] - found[0] == pytest.approx(kept[1] - kept[0], rel=0.15)


def test_recomputed_layers_keep_their_input_alone():
    config = override(preset("lm1b"), {"train.batch": 1})
    inputs = 4 * (6 * (128 + 32) * 512 + 12 * 2 * (32 + 12) * 768)
    largest = max(stack.bytes_per_layer(bf16=True) for stack in memory.stacks(config))
    again = memory.activation_bytes(config, recompute=True) - memory.logit_bytes(config)
    assert again == pytest.approx(inputs + largest, abs=1) and again < memory.activation_bytes(config) / 5


class Held(TorchDispatchMode):
    """The most bytes that tensors hold at once within the block, those of the method left out: no system counts them."""

    def __init__(self, method: Method):
        super().__init__()
        self.own = {t.untyped_storage().data_ptr() for t in [*method.parameters(), *method.buffers()]}
        self.held, self.peak = WeakIdKeyDictionary(ref_type=weakref.ref), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.own:
                self.held[t.untyped_storage()] = t.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.held.values()))
        return out


def test_the_estimate_against_the_peak_of_a_pass():
    """Forward and backward hold what the formula says, and the gradients."""
    sizes = {"data.vocab_size": 64, "data.token_len": 16, "model.latent_len": 16, "train.precision": "fp32", "train.batch": 32}
    config = override(preset("smoke"), sizes | {"model.depth": 8, "model.codec_layers": 4})  # many layers kept, one at work
    method = build_method(config).train()
    batch, gradients = random_batch(config, 32, "cpu", True), sum(p.nbytes for p in method.parameters())
    with Held(method) as held:
        train_pass(method, config, batch)
    assert held.peak == pytest.approx(memory.activation_bytes(config) + gradients / 2, abs=gradients)


def test_memory_adds_up():
    config = preset("lm1b")
    found, parts = memory.memory_estimate(config), counts.parameter_counts(config)
    assert found["weights"] == found["gradients"] == found["ema"] == 4 * parts["total"]
    assert found["adamw"] == 8 * parts["total"] and found["target_compressor"] == 4 * parts["compressor"]
    assert found["training"] == sum(v for k, v in found.items() if k not in ("training", "sampling"))


def test_memory_grows_and_shrinks_with_what_it_should():
    config = override(preset("lm1b"), {"objective.ce_chunk": 0})
    activations = memory.activation_bytes(config)
    half = dataclasses.replace(config.train, batch=config.train.batch // 2)
    at_once = 4 * 32100 * ((1 << 23) // 32100)  # logits of one chunk, whatever the batch
    halves = 2 * memory.activation_bytes(dataclasses.replace(config, train=half))
    assert halves - at_once == pytest.approx(activations, abs=2)
    chunked = override(config, {"objective.ce_chunk": 1024})
    assert memory.activation_bytes(chunked) - activations == 4 * 32100 * 1024 - at_once
    # Logits are the largest moment here: 128 tokens x 32,100 words x 4 bytes for each further sample.
    more = memory.memory_estimate(config, 17)["sampling"] - memory.memory_estimate(config, 16)["sampling"]
    assert more == 128 * 32100 * 4


def test_counting_does_not_load_torch():
    code = "import sys, jpeg_dlm.evaluation.info; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
