"""Chunked cross-entropy: the same numbers and gradients as all logits at once."""

import pytest
import torch
from torch import nn

from jpeg_dlm.nn.token_loss import token_nll

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
    assert torch.allclose(parts, whole, atol=1e-6)
    for got, want in zip(torch.autograd.grad((parts * weight).sum(), [h, head.weight, head.bias]), wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-6)


def test_chunks_never_hold_more_rows_of_logits_than_asked_for():
    head, h, tokens = case()
    seen = []

    def project(rows):
        seen.append(len(rows))
        return head(rows)

    token_nll(project, h, tokens, 4).sum().backward()
    assert max(seen) <= 4 and sum(seen) == 2 * B * L  # once forward, once again in backward


def test_the_loss_is_full_precision_even_for_half_logits():
    head, h, tokens = case()
    assert token_nll(lambda rows: head(rows).bfloat16(), h, tokens).dtype == torch.float32
