"""Guides against enumeration: given tokens, and words that stand somewhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from jpeg_dlm.flow.guides import all_of, contains, given_tokens

B, L, V, END = 3, 4, 5, 0


def logits() -> torch.Tensor:
    return torch.randn(B, L, V, generator=torch.Generator().manual_seed(0))


def test_given_tokens_cost_their_mean_surprise():
    x, given = logits(), torch.tensor([[1, -1, 2, -1], [-1, -1, -1, -1], [3, 3, 3, 3]])
    p = x.softmax(-1)
    expected = [
        -(math.log(p[0, 0, 1]) + math.log(p[0, 2, 2])) / 2,
        0.0,
        -sum(math.log(p[2, place, 3]) for place in range(L)) / 4,
    ]
    assert given_tokens(given)(x).tolist() == pytest.approx(expected, abs=1e-5)
    # An end is unwanted in the hole before position 2, not after it.
    end = -math.log(1 - p[0, 1, END]) / 2
    assert given_tokens(given, END)(x).tolist() == pytest.approx([expected[0] + end, *expected[1:]], abs=1e-5)


@pytest.mark.parametrize("end", [None, END])
@pytest.mark.parametrize("word", [[[3]], [[1, 2]], [[2], [1, 4]]])
def test_a_word_costs_the_surprise_of_its_places(word, end):
    """The expected number of places, by enumeration of all rows."""
    x = logits()
    p = x.double().softmax(-1)
    expected = torch.zeros(B, dtype=torch.float64)
    for row in itertools.product(range(V), repeat=L):
        chance = math.prod(p[:, place, token] for place, token in enumerate(row))
        for ids in word:
            for place in range(L - len(ids) + 1):
                open_before = end is None or end not in row[:place]
                expected += chance * (list(row[place : place + len(ids)]) == ids and open_before)
    assert contains([word], end)(x).tolist() == pytest.approx((-expected.log()).clamp_min(0).tolist(), abs=1e-4)


def test_words_and_guides_add_up():
    x = logits()
    one, two = contains([[[3]]]), contains([[[1, 2]]])
    assert torch.allclose(contains([[[3]], [[1, 2]]])(x), (one(x) + two(x)) / 2)
    assert torch.allclose(all_of([one, two])(x), one(x) + two(x)) and all_of([one]) is one


def test_losses_stay_finite_at_certainty():
    x = torch.full((1, L, V), -1e4).index_fill(2, torch.tensor([END]), 1e4).requires_grad_()
    for guide in (contains([[[3]]], END), given_tokens(torch.tensor([[1, -1, 2, -1]]), END)):
        loss = guide(x)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all() and gradient.isfinite().all()
