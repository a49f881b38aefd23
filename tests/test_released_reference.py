"""The plain implementation that is the baseline for speed computes the same as the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from conftest import MICRO, assert_same_tokens, perturb

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import override
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def both(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from released import Released

    config = validate(override(preset("smoke"), MICRO | {"model.depth": 2, "model.codec_layers": 2, "model.position_scale": 0.0,
                                                         "model.decode_residual": False}))  # fmt: skip
    torch.manual_seed(0)
    method = perturb(JpegDlm(config).eval(), 0.1)
    with torch.no_grad():
        method.decompressor.pos_emb.weight.mul_(4)  # so that places differ in their tokens
    method.latent_scale.copy_(torch.linspace(0.5, 2, 16))
    yield method, Released(method.export_state(), config.model.heads, config.model.codec_heads)
    sys.modules.pop("released")


@torch.no_grad()
def test_evaluations_and_tokens_agree(both):
    method, released = both
    z, s, w = torch.randn(2, 3, 16), torch.randn(2, 3, 16), torch.full((2,), 3.0)
    for given in (None, s):
        expected = method.dit(z, torch.full((2,), 0.3), given, w)
        torch.testing.assert_close(released.evaluate(z, 0.3, given, 3.0), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        released.evaluate(z, 1.0, None, 3.0, decode=True), method.decode_latents(z, w), atol=1e-5, rtol=1e-4
    )
    assert_same_tokens(released.tokens(z, 3.0), method.tokens(z, 3.0))


def test_samples_agree(both):
    method, released = both
    z, grid = torch.randn(3, 3, 16), torch.tensor([0.0, 0.1, 0.25, 1.0])
    expected = method.latent_sampler.integrate(z, grid, method.config.sampler)
    assert_same_tokens(released.sample(z, grid.tolist(), method.config.sampler.w), expected)
    assert len(expected.unique()) > 3  # agreement says something
