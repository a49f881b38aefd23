"""Attention beside its formula, in the types and on the paths that training and sampling take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jpeg_dlm.nn.layers import attend


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q.double() @ k.double().transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.double()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("masked", [None, "causal", "mask"])
def test_values_and_gradients_are_those_of_the_formula(masked: str | None, dtype: torch.dtype, autocast: bool) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 16, 8, generator=g).to(dtype).requires_grad_() for _ in range(3))
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    mask = {None: None, "causal": None, "mask": causal}[masked]
    weights = torch.randn(2, 3, 16, 8, generator=g)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = attend(q, k, v, mask, is_causal=masked == "causal")
    found = torch.autograd.grad((y.float() * weights).sum(), (q, k, v))
    wanted_y = formula(q, k, v, torch.ones_like(causal) if masked is None else causal)
    wanted = torch.autograd.grad((wanted_y * weights.double()).sum(), (q, k, v))

    exact = dtype == torch.float32 and not autocast
    tolerance = 1e-5 if exact else 0.05  # a bf16 number has 8 bits
    assert (y.double() - wanted_y).abs().max() < tolerance
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype and (one.double() - other.double()).abs().max() < tolerance


def test_bf16_of_few_keys_is_computed_by_products_and_of_many_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, *args: Tensor, **kwargs: bool) -> Tensor:
        seen.append(q.shape[-2])
        return kernel(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for keys in (4, 256, 257):
        q = torch.randn(1, 2, keys, 8, dtype=torch.bfloat16)
        assert attend(q, q, q).dtype == torch.bfloat16
    assert seen == [257]
