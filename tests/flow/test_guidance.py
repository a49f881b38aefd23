"""Guidance: moves along a gradient, refusals, and guides against enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from jpeg_dlm.flow.guidance import (
    EARLY,
    LATE,
    REFINEMENTS,
    EditSource,
    Guidance,
    GuidedDecoder,
    contains,
    given_tokens,
    guided_decoder,
    keep_fixed,
)
from jpeg_dlm.util.errors import UsageError

B, N, D = 3, 2, 4
L, V, END = 4, 5, 0


def identity(x):
    return x


def far(scale):
    """A guide whose loss is `scale` times the mean distance to 0 of each coordinate, at least as wanted."""
    return lambda x: scale * x.abs().flatten(1).mean(1)


def latents():
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("t", "length"), [(0.0, EARLY), (0.5, (EARLY + LATE) / 2), (1.0, LATE)])
def test_a_large_loss_moves_by_the_full_length_of_the_time(t, length):
    x = latents()
    for strength in (1.0, 0.3):
        move = GuidedDecoder(identity, far(100), strength).nudge(x, t) - x
        assert torch.allclose(move.flatten(1).norm(dim=1), torch.full((B,), strength * length * math.sqrt(N * D)))
        assert torch.equal(move.sign(), -x.sign())


def test_a_small_loss_moves_in_proportion_and_none_not_at_all():
    x = latents()
    loss = far(0.1)(x)
    move = GuidedDecoder(identity, far(0.1)).nudge(x, 1.0) - x
    assert torch.allclose(move.flatten(1).norm(dim=1), loss * LATE * math.sqrt(N * D))
    for guide in (far(1e-4), lambda x: far(1)(x) - 10):  # satisfied; below zero
        assert torch.equal(GuidedDecoder(identity, guide).nudge(x, 0.0), x)


def test_a_row_moves_alike_in_any_batch():
    x, guided = latents(), GuidedDecoder(identity, far(1))
    alone = torch.cat([guided.refine(row[None]) for row in x])
    assert torch.equal(guided.refine(x), alone)


def test_refinement_lowers_the_loss_and_ends_early():
    calls = []

    def guide(x):
        calls.append(len(x))
        return (x - 1).square().flatten(1).mean(1)

    guided = GuidedDecoder(identity, guide)
    x = latents()
    assert (guide(guided.refine(x)) < guide(x)).all() and len(calls) <= REFINEMENTS + 2
    calls.clear()
    guided.refine(torch.ones(B, N, D))
    assert len(calls) == 1
    assert torch.equal(GuidedDecoder(identity, guide, 0.0).refine(x), x)


def test_tensors_of_inference_mode_are_moved_too():
    with torch.inference_mode():
        x = latents()
        moved = GuidedDecoder(identity, far(100)).nudge(x, 0.5)
    assert torch.equal(moved, GuidedDecoder(identity, far(100)).nudge(latents(), 0.5))


@pytest.mark.parametrize(
    "guide",
    [
        lambda x: x.sum(),
        lambda x: x.mean(-1),
        lambda x: 0.5,
        lambda x: x.flatten(1).sum(1) * torch.nan,
        lambda x: torch.ones(B),
        lambda x: x.argmax(-1).sum(1).float(),
        lambda x: 1 + (0 * x).flatten(1).sum(1).sqrt(),
    ],
)
def test_a_guide_that_cannot_guide_is_refused(guide):
    with pytest.raises(UsageError):
        GuidedDecoder(identity, guide).nudge(latents(), 0.0)


def test_given_tokens_and_guides_steer_together():
    given = torch.tensor([[1, -1]])
    logits = torch.zeros(1, 2, 4)
    assert guided_decoder(identity, None, None) is None and guided_decoder(identity, None, Guidance(strength=2)) is None
    guided = guided_decoder(identity, given, Guidance(lambda x: x.flatten(1).sum(1) + 1, 2.0))
    assert guided is not None and guided.strength == 2.0
    assert guided.guide(logits).item() == pytest.approx(math.log(4) + 1)
    assert keep_fixed(torch.tensor([[3, 3]]), given).tolist() == [[1, 3]]


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
def test_an_source_is_a_state_of_the_path(noise):
    z, eps, grid = latents(), latents().flip(0), torch.tensor([0.0, 0.5, 0.75, 1.0])
    source = EditSource(z, torch.zeros(B, 1), noise)
    assert torch.allclose(source.state(z, eps), (1 - noise) * z + noise * eps)
    assert source.rest(grid).tolist() == {0.0: [1.0], 0.25: [0.75, 1.0], 1.0: [0.0, 0.5, 0.75, 1.0]}[noise]
    assert noise not in (0, 1) or torch.equal(source.state(z, eps), eps if noise else z)


# ---------------------------------------------------------------- guides


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


def test_losses_stay_finite_at_certainty():
    x = torch.full((1, L, V), -1e4).index_fill(2, torch.tensor([END]), 1e4).requires_grad_()
    for guide in (contains([[[3]]], END), given_tokens(torch.tensor([[1, -1, 2, -1]]), END)):
        loss = guide(x)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all() and gradient.isfinite().all()
