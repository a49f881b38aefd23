"""The warm-up, gradients that leave values alone, and standardization by the batch."""

import math

import pytest
import torch

from jpeg_dlm.methods.common.flow_gradient import batch_standardized, warmup_factor, with_gradient_of


def test_the_warmup_is_a_sigmoid_from_zero_to_one():
    assert warmup_factor(0.0, 0.0) == warmup_factor(0.5, 0.0) == 1.0  # none
    assert warmup_factor(0.0, 0.4) == 0.0
    assert warmup_factor(0.4, 0.4) == warmup_factor(1.0, 0.4) == 1.0
    rising = [warmup_factor(0.4 * i / 100, 0.4) for i in range(101)]
    assert all(a < b for a, b in zip(rising, rising[1:], strict=False))
    low, half, high = (1 / (1 + math.exp(-x)) for x in (-8, 0, 2))  # 10 (x - 0.8) at the ends and at the center
    assert rising[80] == pytest.approx((half - low) / (high - low))
    assert rising[50] < 0.06  # the codec learns to reconstruct first


def test_a_gradient_is_scaled_and_the_value_kept():
    value, source = torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    out = with_gradient_of(value, source**2, 0.5)
    assert torch.equal(out, value)
    (out * torch.tensor([1.0, 10.0])).sum().backward()
    assert value.grad is None and torch.allclose(source.grad, 0.5 * torch.tensor([2.0, 40.0]))


def test_neither_shift_nor_scale_of_a_channel_lowers_a_loss_of_standardized_latents():
    g = torch.Generator().manual_seed(0)
    z = (3 * torch.randn(6, 4, 5, generator=g) + 2).requires_grad_()
    out = batch_standardized(z, 1e-4)
    rows = out.detach().flatten(0, 1)
    assert torch.allclose(rows.mean(0), torch.zeros(5), atol=1e-5)
    assert torch.allclose(rows.var(0, unbiased=False), torch.ones(5), atol=1e-4)
    (out * torch.randn(out.shape, generator=g)).sum().backward()
    gradient, centered = z.grad.flatten(0, 1), (z - z.mean((0, 1))).detach().flatten(0, 1)
    size = (gradient.abs() * centered.abs()).sum(0)
    assert gradient.abs().sum() > 0.1
    assert ((gradient.sum(0).abs() / gradient.abs().sum(0)) < 1e-4).all()
    assert (((gradient * centered).sum(0).abs() / size) < 1e-4).all()
