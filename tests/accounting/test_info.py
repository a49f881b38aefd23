"""The description of a config: complete, JSON-able, and readable beside the paper's figures."""

import json
import re
from functools import cache

import pytest
from closed_forms import own_parameters, own_sampling_macs

from jpeg_dlm.accounting.info import describe, format_description, gigabytes, operations, own_memory, sampling_macs
from jpeg_dlm.accounting.info import own_parameters as measured_parameters
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation.paper import paper_figures
from jpeg_dlm.methods.registry import build_method, for_method, names
from jpeg_dlm.presets import PRESETS, preset


@cache
def described(name):
    """Of a preset; measuring takes a while."""
    return describe(preset(name))


@pytest.mark.parametrize("name", PRESETS)
def test_descriptions_are_json_and_complete(name):
    description = described(name)
    assert json.loads(json.dumps(description)) == description
    assert {"preset", "sizes", "parameters", "macs", "memory", "step", "paper"} <= set(description)
    assert description["preset"] == name and description["paper"] == paper_figures(name)


def test_the_papers_figures():
    # Tables "Unconditional generation", "Model and training configurations" and "Ablations" (row Base).
    paper = {name: paper_figures(name) for name in PRESETS if paper_figures(name)}
    assert set(paper) == {"lm1b", "owt1024", "owt128"}
    quality = {name: (f.get("gen_ppl"), f.get("entropy"), f.get("mauve")) for name, f in paper.items()}
    assert quality == {"lm1b": (96.76, 4.263, 0.951), "owt1024": (34.52, 5.067, 0.801), "owt128": (48.00, 4.064, 0.912)}
    assert (paper["lm1b"].get("macs_compressed_T"), paper["lm1b"].get("macs_full_T")) == (0.13, 0.40)
    assert (paper["owt1024"].get("macs_compressed_T"), paper["owt1024"].get("macs_full_T")) == (1.68, 3.56)


def row(text: str, label: str) -> list[str]:
    """The columns of the line that starts with a label."""
    line = next(line for line in text.splitlines() if line.startswith(label))
    return re.split(r"\s{2,}", line[len(label) :].strip())


def test_ours_stands_beside_the_papers():
    text = format_description(described("lm1b"))
    assert row(text, "DiT and token projection") == ["104,843,364", "105M"]
    assert row(text, "all parameters") == ["151,468,670", "154M"]
    assert row(text, "operations per sample, N latents") == ["0.131 T", "0.13 T"]
    assert row(text, "operations per sample, one latent per token") == ["0.414 T", "0.40 T"]
    assert row(text, "rows per step") == ["6,144", "6,144"]
    assert row(text, "Gen-PPL") == ["96.76"]
    assert row(text, "rate N / L") == ["0.25"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_is_aligned_and_fits_a_terminal(name):
    lines = format_description(described(name)).splitlines()
    assert max(map(len, lines)) <= 80
    edge = lines[1].index("ours") + len("ours")
    ours = [line[:edge] for line in lines[2:] if line[:edge].strip() and len(line) <= edge]
    assert ours and all(len(line) == edge for line in ours)
    assert ("paper" in lines[1]) == bool(paper_figures(name))


def test_changed_options_show():
    description = describe(override(preset("tiny"), {"model.latent_len": 4, "model.shared": False, "train.batch": 3}))
    assert description["sizes"]["rate"] == 0.125
    assert description["parameters"]["predictor"] == description["parameters"]["dit"]
    assert description["step"]["tokens_per_step"] == 3 * 32


def test_units():
    assert [operations(n) for n in (130_763_488_256, 1_798_809_600, 17_683_840)] == ["0.131 T", "1.799 G", "17.684 M"]
    assert [gigabytes(n) for n in (605_874_680, 2_406_824)] == ["0.61 GB", "2.4 MB"]


@pytest.mark.parametrize("name", [name for name in names("system") if name != "jpeg-dlm"])
def test_every_method_is_described(name):
    config = for_method(preset("smoke"), name)
    description = describe(config)
    assert json.loads(json.dumps(description)) == description
    trained = sum(p.numel() for p in build_method(config).parameters() if p.requires_grad)  # with weights this time
    assert description["parameters"]["total"] == trained
    assert description["sampler"]["evaluations"] == config.sampler.evaluations(16)
    text = format_description(description)
    assert row(text, "all parameters") == [f"{trained:,}"] and row(text, "tokens per step") == ["1,024"]


def test_a_method_stands_beside_its_own_row_of_the_paper():
    text = format_description(describe(for_method(preset("lm1b"), "ar")))
    assert row(text, "all parameters")[1] == "130M" and row(text, "Gen-PPL") == ["151.36"]
    assert row(text, "speed with KV cache") == ["1.62"]


# ---------------------------------------------------------------- JPEG-DLM


@pytest.mark.parametrize(
    ("name", "compressor", "decompressor", "total"),
    [  # counted on a reconstruction of the released model
        ("lm1b", 22_262_528, 24_362_778, 151_468_670),
        ("owt1024", 22_967_040, 25_067_290, 152_877_694),
    ],
)
def test_parameters_of_the_released_models(name, compressor, decompressor, total):
    assert described(name)["parameters"] == own_parameters(preset(name)) == {
        "compressor": compressor,
        "decompressor": decompressor,
        "dit": 88_113_408,
        "unembed_proj": 262_656,
        "lm_head": 16_467_300,
        "dit_and_projection": 104_843_364,
        "total": total,
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"model.shared": False}, {"model.codec_mlp_ratio": 2.5, "model.mlp_ratio": 3.0}])
def test_parameters_by_formula(options):
    config = override(preset("smoke"), options)
    assert measured_parameters(config) == own_parameters(config)


@pytest.mark.parametrize(
    ("name", "compressed", "full"),
    [  # 1e12 multiply-accumulates, counted on the released model; the paper prints 0.13 / 0.40 and 1.68 / 3.56
        ("lm1b", 0.131, 0.414),
        ("owt1024", 1.704, 3.648),
    ],
)
def test_operations_of_the_released_models(name, compressed, full):
    config, macs = preset(name), described(name)["macs"]
    assert macs["compressed"]["evaluations"] == 33
    assert macs["compressed"]["total"] / 1e12 == pytest.approx(compressed, abs=5e-4)
    assert macs["full"]["total"] / 1e12 == pytest.approx(full, abs=5e-4)
    by_formula = own_sampling_macs(config)
    assert all(macs["compressed"][part] == by_formula[part] for part in ("dit", "decompressor", "projection", "total"))
    assert macs["full"] == sampling_macs(override(config, {"model.latent_len": config.data.token_len}))


def test_memory_adds_up():
    config = override(preset("smoke"), {"train.batch": 4})
    found, parts = own_memory(config), own_parameters(config)
    assert found["weights"] == found["gradients"] == found["ema"] == 4 * parts["total"]
    assert found["adamw"] == 8 * parts["total"] and found["target_compressor"] == 4 * parts["compressor"]
    assert found["training"] == sum(v for k, v in found.items() if k not in ("training", "sampling"))
    # Sampling holds its weights, the logits of a batch and little more.
    logits = 4 * 16 * config.data.token_len * config.data.vocab_size
    weights = 4 * (parts["total"] - parts["compressor"])
    assert weights + logits < found["sampling"] < weights + 2 * logits


def test_the_paper_sizes_of_memory():
    found = described("lm1b")["memory"]
    assert 15e9 < found["activations"] < 22e9
    assert found["sampling"] == pytest.approx(4 * (151_468_670 - 22_262_528) + 4 * 16 * 128 * 32_100, rel=0.05)
