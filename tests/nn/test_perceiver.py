"""Compressor and decompressor against slow second versions written from the description of the released code."""

import pytest
import torch
from reference import codec_norm, slow_compress, slow_decompress

from jpeg_dlm.nn.perceiver import CodecRMSNorm, Compressor, Decompressor, Gate

B, L, N, F, D, HEADS, LAYERS = 2, 7, 3, 5, 8, 2, 2


def build(cls, position_scale=0.0):
    torch.manual_seed(0)
    module = cls(L, N, F, D, 4, LAYERS, HEADS, 4.0, 0.0, position_scale)
    with torch.no_grad():  # gates, gains and biases away from their neutral start
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module.eval()


def features(rows=B):
    return torch.randn(rows, L, F, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- slow second versions, one row at a time


@torch.no_grad()
def test_compressor_agrees_with_the_slow_version():
    compressor, h = build(Compressor), features()
    p = compressor.state_dict()
    slow = torch.stack([slow_compress(p, HEADS, row) for row in h])
    assert torch.allclose(compressor(h), slow, atol=1e-5)


@torch.no_grad()
def test_decompressor_agrees_with_the_slow_version():
    decompressor = build(Decompressor)
    z = torch.randn(B, N, D, generator=torch.Generator().manual_seed(2))
    p = decompressor.state_dict()
    slow = torch.stack([slow_decompress(p, HEADS, row) for row in z])
    assert slow.std() > 0.1
    assert torch.allclose(decompressor(z), slow, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- norm and gate


def test_norm_of_ordinary_vectors():
    module = CodecRMSNorm(6)
    x = torch.randn(4, 6)
    assert torch.allclose(module(x).square().mean(-1), torch.ones(4), atol=1e-5)
    assert torch.allclose(module(x), codec_norm(x, torch.ones(6)), atol=1e-6)
    assert torch.allclose(module(1000 * x), module(x), atol=1e-5)  # an added epsilon would show on small vectors:
    assert torch.allclose(module(1e-6 * x), module(x), atol=1e-3)


def test_the_epsilon_is_a_floor():
    module = CodecRMSNorm(4)
    assert torch.equal(module(torch.zeros(1, 4)), torch.zeros(1, 4))
    tiny = torch.full((1, 4), 1e-12)
    assert torch.allclose(module(tiny), tiny / 1e-8, rtol=1e-4)


def test_norms_are_full_precision():
    assert CodecRMSNorm(4)(torch.randn(2, 4).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(("weight", "bias"), [(0.0, 0.0), (0.5, -0.2), (-1.0, 0.0)])
def test_a_gate_is_one_plus_weight_plus_bias(weight, bias):
    module = Gate()
    assert torch.equal(module(torch.ones(3)), torch.ones(3))  # the identity at first
    with torch.no_grad():
        module.scale_mlp.weight.fill_(weight)
        module.scale_mlp.bias.fill_(bias)
    y = torch.randn(2, 3, 4)
    assert torch.allclose(module(y), y * (1 + weight + bias), atol=1e-6)
    m = torch.ones(1)  # the linear of the released code, applied to a mask of ones
    assert torch.allclose(module(y), y * (1 + module.scale_mlp(m)), atol=1e-6)


# ---------------------------------------------------------------- padding


@torch.no_grad()
def test_padded_tokens_are_removed_not_just_weakened():
    compressor, h = build(Compressor), features()
    mask = torch.tensor([[True] * L, [True, True, False, True, False, False, False]])
    masked = compressor(h, mask)
    kept = mask[1].nonzero().squeeze(1)
    assert torch.allclose(masked[1], slow_compress(compressor.state_dict(), HEADS, h[1], kept), atol=1e-5)
    assert torch.allclose(masked[0], compressor(h)[0], atol=1e-5)
    changed = torch.where(mask[..., None], h, 1e4 * torch.randn_like(h))
    assert torch.allclose(compressor(changed, mask), masked, atol=1e-5)
    assert not torch.allclose(masked[1], compressor(h)[1], atol=1e-3)


@torch.no_grad()
def test_a_row_without_real_tokens_is_still_finite():
    assert build(Compressor)(features(), torch.zeros(B, L, dtype=torch.bool)).isfinite().all()


# ---------------------------------------------------------------- properties


@torch.no_grad()
def test_fresh_latents_have_unit_rms():
    torch.manual_seed(0)
    z = Compressor(L, N, F, D, 4, LAYERS, HEADS, 4.0, 0.0, 0.0)(features())
    assert z.shape == (B, N, D) and z.dtype == torch.float32
    assert torch.allclose(z.square().mean(-1), torch.ones(B, N), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cls", [Compressor, Decompressor])
def test_position_scale_zero_means_the_released_one(cls):
    x = features() if cls is Compressor else torch.randn(B, N, D)
    released, explicit, larger = (build(cls, scale)(x) for scale in (0.0, D**-0.5, 1.0))
    assert torch.equal(released, explicit) and not torch.allclose(released, larger, atol=1e-3)


@torch.no_grad()
def test_token_order_matters_to_the_compressor_and_latent_order_to_the_decompressor():
    compressor, decompressor = build(Compressor), build(Decompressor)
    h, z = features(), torch.randn(B, N, D)
    assert not torch.allclose(compressor(h), compressor(h.flip(1)), atol=1e-3)
    assert not torch.allclose(decompressor(z), decompressor(z.flip(1)), atol=1e-3)


@torch.no_grad()
def test_rows_do_not_see_each_other():
    compressor, decompressor, h = build(Compressor), build(Decompressor), features(3)
    z = compressor(h)
    assert torch.allclose(z[1], compressor(h[1:2])[0], atol=1e-5)
    assert torch.allclose(decompressor(z)[1], decompressor(z[1:2])[0], atol=1e-5)
