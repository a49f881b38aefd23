"""Compressor and decompressor against slow second versions written from the description of the released code."""

import torch
from micro import perturb
from reference import slow_compress, slow_decompress

from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.nn.perceiver import CodecRMSNorm, Compressor, Decompressor

B, L, N, F, D, HEADS = 2, 7, 3, 5, 8, 2
SIZES = JpegDlmModel(latent_len=N, latent_dim=D, bottleneck_dim=4, codec_layers=2, codec_heads=HEADS, position_scale=0.0)


def build(cls):
    torch.manual_seed(0)
    return perturb(cls(SIZES, L, F)).eval()  # gates, gains and biases away from their neutral start


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


def test_the_epsilon_is_a_floor():
    module = CodecRMSNorm(4)
    assert torch.equal(module(torch.zeros(1, 4)), torch.zeros(1, 4))
    tiny = torch.full((1, 4), 1e-12)
    assert torch.allclose(module(tiny), tiny / 1e-8, rtol=1e-4)


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
