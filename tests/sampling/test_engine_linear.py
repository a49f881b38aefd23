"""Prepared linears against the formula of each type, in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jpeg_dlm.sampling import linear
from jpeg_dlm.sampling.linear import Int8Linear, full_precision, linear_maker, weight_levels

G = torch.Generator().manual_seed(0)
X, W, B = torch.randn(9, 40, generator=G), torch.randn(6, 40, generator=G), torch.randn(6, generator=G)


def by_hand(x: np.ndarray, w: np.ndarray, b: np.ndarray | float, levels: int) -> np.ndarray:
    """Whole numbers times whole numbers, one row and one channel at a time."""
    out = np.zeros((len(x), len(w)))
    for i, row in enumerate(x):
        for j, channel in enumerate(w):
            s_row, s_channel = np.abs(row).max() / 127, np.abs(channel).max() / levels
            whole = np.floor(row / s_row + 0.5).astype(int) @ np.rint(channel / s_channel).astype(int)
            out[i, j] = whole * s_row * s_channel
    return out + b


@pytest.mark.parametrize("levels", sorted({63, weight_levels(torch.device("cpu"))}))  # 127 only where nothing overflows
def test_int8_is_the_product_of_whole_numbers(levels, monkeypatch):
    monkeypatch.setattr(linear, "weight_levels", lambda device: levels)
    found = Int8Linear(W, B)(X).numpy()
    np.testing.assert_allclose(found, by_hand(X.numpy(), W.numpy(), B.numpy(), levels), rtol=1e-4, atol=1e-4)


def test_the_largest_numbers_do_not_overflow():
    x, w = torch.full((2, 64), 3.0), torch.full((5, 64), -2.0)
    torch.testing.assert_close(Int8Linear(w, None)(x), torch.full((2, 5), -384.0))
    torch.testing.assert_close(Int8Linear(w, None)(-x), torch.full((2, 5), 384.0))


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-5), ("int8", 2e-2)])
def test_a_norm_before_the_product(dtype, tolerance):
    x = 30 * X
    normed = torch.from_numpy(x.numpy() / np.sqrt((x.numpy() ** 2).mean(1, keepdims=True) + 0.5))
    found = linear_maker(dtype)(W, B).of_unit_rms(x, 0.5)
    torch.testing.assert_close(found, normed @ W.T + B, atol=tolerance * found.abs().max().item(), rtol=0)
    torch.testing.assert_close(found, linear_maker(dtype)(W, B)(normed), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [B, None], ids=["bias", "no bias"])
def test_few_rows_meet_packed_weights_and_many_do_not(bias, monkeypatch):
    layer, expected = full_precision(W, bias), X @ W.T + (0 if bias is None else bias)
    monkeypatch.setattr(linear, "FEW_ROWS", len(X) - 1)
    torch.testing.assert_close(layer(X), expected)
    assert layer.packed is None
    torch.testing.assert_close(layer(X[1:]), expected[1:])
    assert layer.packed is not None
    monkeypatch.setattr(layer, "weight_NK", torch.zeros_like(W))  # no longer what few rows meet
    torch.testing.assert_close(layer(X[1:]), expected[1:])


def test_few_rows_reach_the_kernel_of_an_accelerator_padded(monkeypatch):
    """CUDA's integer product refuses 16 rows and fewer; here the CPU's stands in for it."""
    layer, sizes = Int8Linear(W, B), []
    layer.on_cpu, layer.packed = False, linear.quantize_channels(W, weight_levels(torch.device("cpu")))[0].t()
    product = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda q, w: sizes.append(len(q)) or product(q, w))
    many = X.repeat(3, 1)
    torch.testing.assert_close(layer(X), Int8Linear(W, B)(X), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer(many), Int8Linear(W, B)(many), atol=1e-4, rtol=1e-4)
    assert min(sizes) > 16 and sizes[-1] == len(many)


def test_a_row_of_zeros_gives_the_bias():
    torch.testing.assert_close(Int8Linear(W, B)(torch.zeros(1, 40)), B[None])


def test_a_row_with_large_numbers_leaves_its_neighbors_alone():
    layer, disturbed = Int8Linear(W, B), X.clone()
    disturbed[3] *= 1000
    assert torch.equal(layer(disturbed)[:3], layer(X)[:3])


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 0.2), ("int8", 0.5)])
@pytest.mark.parametrize("bias", [B, None], ids=["bias", "no bias"])
def test_added_to_a_residual_stream_in_place(dtype, tolerance, bias):
    stream = torch.randn(9, 6, generator=G)
    expected = stream + X @ W.T + (0 if bias is None else bias)
    found = linear_maker(dtype)(W, bias).add_to(stream, X)
    assert found.data_ptr() == stream.data_ptr() and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
