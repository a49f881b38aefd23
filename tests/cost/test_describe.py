"""The description of a config: parameters and operations by formula, and beside the paper's figures."""

import json

import pytest
from closed_forms import own_parameters, own_sampling_macs, query_macs

from jpeg_dlm.cost.plan import describe, description_table
from jpeg_dlm.methods.registry import build_method, for_method, names
from jpeg_dlm.presets import preset


def row(description, label: str) -> tuple:
    """The cells beside a label."""
    return next(cells for name, *cells in description_table(description).rows if name == label)


@pytest.mark.parametrize(
    ("name", "compressor", "decompressor", "total", "compressed", "full"),
    [  # counted on a reconstruction of the released model; the paper prints 154M, 0.13 / 0.40 and 1.68 / 3.56 T
        ("lm1b", 22_262_528, 24_362_778, 151_468_670, 0.130, 0.414),
        ("owt1024", 22_967_040, 25_067_290, 152_877_694, 1.702, 3.646),
    ],
)
def test_the_released_models(name, compressor, decompressor, total, compressed, full):
    config = preset(name)
    description = describe(config)
    parts, macs = description["parameters"], description["macs"]
    assert parts.pop("frozen") == compressor
    assert parts == own_parameters(config)
    assert (parts["compressor"], parts["decompressor"], parts["total"]) == (compressor, decompressor, total)
    assert (macs["compressed"] / 1e12, macs["full"] / 1e12) == pytest.approx((compressed, full), abs=5e-4)
    expected = own_sampling_macs(config)["total"] - (config.data.token_len - 1) * query_macs(config)
    assert macs["compressed"] == expected  # the released code repeats the query of the decompressor before its network
    assert json.loads(json.dumps(description)) == description

    assert row(description, "DiT and token projection") == [104_843_364, "105M"]
    assert row(description, "all parameters") == [total, "154M"]
    assert row(description, "rows per step")[1] == description["paper"]["global_batch"]
    assert row(description, "Gen-PPL") == [None, description["paper"]["gen_ppl"]]


@pytest.mark.parametrize("name", names("system"))
def test_every_method_is_described(name):
    config = for_method(preset("smoke"), name)
    description = describe(config)
    assert json.loads(json.dumps(description)) == description
    method = build_method(config)  # with weights this time
    assert description["parameters"]["total"] == sum(p.numel() for p in method.parameters() if p.requires_grad)
    assert description["parameters"].get("frozen", 0) == sum(p.numel() for p in method.parameters() if not p.requires_grad)
    assert description["macs"]["step"] > 0 and description["sampler"]["evaluations"] == config.sampler.evaluations(16)
    assert row(description, "tokens per step") == [1024]
