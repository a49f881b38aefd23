"""Chunked cross-entropy: the same numbers and gradients as all logits at once."""

import pytest
import torch
from torch import nn

from jpeg_dlm.nn.token_loss import linear_cross_entropy, token_nll

B, L, F, V = 3, 5, 4, 11


def case():
    torch.manual_seed(0)
    head = nn.Linear(F, V)
    return head, torch.randn(B, L, F, requires_grad=True), torch.randint(0, V, (B, L))


def test_it_is_minus_the_log_probability_of_each_token():
    head, h, tokens = case()
    nll = token_nll(head, h, tokens)
    assert nll.shape == (B, L)
    for b in range(B):
        for i in range(L):
            p = torch.softmax(head(h[b, i]), dim=-1)[tokens[b, i]]
            assert nll[b, i].item() == pytest.approx(-p.log().item(), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 14, 15, 16, 1000])
def test_chunks_change_neither_values_nor_gradients(chunk):
    head, h, tokens = case()
    weight = torch.rand(B, L)
    whole = token_nll(head, h, tokens)
    wanted = torch.autograd.grad((whole * weight).sum(), [h, head.weight, head.bias])
    parts = token_nll(head, h, tokens, chunk)
    assert torch.allclose(parts, whole, atol=1e-5)
    for got, want in zip(torch.autograd.grad((parts * weight).sum(), [h, head.weight, head.bias]), wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


# ---------------------------------------------------------------- loss and gradients chunk by chunk


def rows_case(dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in ((B * L, F), (V, F), (V,))
    )
    return x, weight, bias, torch.randint(0, V, (B * L,), generator=g), torch.rand(B * L, generator=g, dtype=torch.float64)


def plain(x, weight, bias, target, share):
    return (share * nn.functional.cross_entropy(x @ weight.T + bias, target, reduction="none")).sum()


@pytest.mark.parametrize("chunk", [0, 1, 4, 15, 100])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(chunk):
    x, weight, bias, target, share = rows_case()
    wanted = plain(x, weight, bias, target, share)
    expected = torch.autograd.grad(3 * wanted, [x, weight, bias])
    loss = linear_cross_entropy(x, weight, bias, target, share, chunk)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for got, want in zip(torch.autograd.grad(3 * loss, [x, weight, bias]), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-12)


def test_large_logits_do_not_overflow():
    x, weight, bias, target, share = rows_case()
    loss = linear_cross_entropy(1e4 * x, weight, bias, target, share, 4)
    assert loss.item() == pytest.approx(plain(1e4 * x, weight, bias, target, share).item())


def test_under_autocast_products_are_half_and_the_rest_is_full():
    x, weight, bias, target, share = rows_case(torch.float32)
    expected = torch.autograd.grad(plain(x, weight, bias, target, share), [x, weight, bias])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, bias, target, share, 4)
        gradients = torch.autograd.grad(loss, [x, weight, bias])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(plain(x, weight, bias, target, share).item(), rel=1e-2)
    for got, want in zip(gradients, expected, strict=True):
        assert got.dtype == torch.float32 and (got - want).norm() < 0.02 * want.norm()


def test_gradients_are_taken_once_and_not_made_without_need():
    x, weight, bias, target, share = rows_case()
    loss = linear_cross_entropy(x, weight, bias, target, share)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already called"):
        loss.backward()
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, bias, target, share).requires_grad
