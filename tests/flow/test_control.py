"""Moves along a gradient: direction, length, clipping, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.control import EARLY, LATE, REFINEMENTS, REFINING, Control, Origin, Steering, keep_given, steering

B, N, D = 3, 2, 4


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
        move = Steering(identity, far(100), strength).moved(x, t) - x
        assert torch.allclose(move.flatten(1).norm(dim=1), torch.full((B,), strength * length * math.sqrt(N * D)))
        assert torch.equal(move.sign(), -x.sign())


def test_a_small_loss_moves_in_proportion_and_none_not_at_all():
    x = latents()
    loss = far(0.1)(x)
    move = Steering(identity, far(0.1)).moved(x, 1.0) - x
    assert torch.allclose(move.flatten(1).norm(dim=1), loss * LATE * math.sqrt(N * D))
    for guide in (far(1e-4), lambda x: far(1)(x) - 10):  # satisfied; below zero
        assert torch.equal(Steering(identity, guide).moved(x, 0.0), x)


def test_a_row_moves_alike_in_any_batch():
    x, steer = latents(), Steering(identity, far(1))
    alone = torch.cat([steer.refined(row[None]) for row in x])
    assert torch.equal(steer.refined(x), alone)


def test_refinement_lowers_the_loss_and_ends_early():
    calls = []

    def guide(x):
        calls.append(len(x))
        return (x - 1).square().flatten(1).mean(1)

    steer = Steering(identity, guide)
    x = latents()
    assert (guide(steer.refined(x)) < guide(x)).all() and len(calls) <= REFINEMENTS + 2
    calls.clear()
    steer.refined(torch.ones(B, N, D))
    assert len(calls) == 1 and REFINING > 0
    assert torch.equal(Steering(identity, guide, 0.0).refined(x), x)


def test_tensors_of_inference_mode_are_moved_too():
    with torch.inference_mode():
        x = latents()
        found = Steering(identity, far(100)).moved(x, 0.5)
    assert torch.equal(found, Steering(identity, far(100)).moved(latents(), 0.5))


@pytest.mark.parametrize(("guide", "error"), [
    (lambda x: x.sum(), r"one loss per row, a tensor of shape \(3,\), not shape \(\)"),
    (lambda x: x.mean(-1), r"not shape \(3, 2\)"), (lambda x: 0.5, "not a float"), (lambda x: None, "not a NoneType"),
    (lambda x: x.flatten(1).sum(1) * torch.nan, "not finite"), (lambda x: x.flatten(1).sum(1) / 0, "not finite"),
    (lambda x: torch.ones(B), "no gradient"), (lambda x: x.argmax(-1).sum(1).float(), "no gradient"),
    (lambda x: 1 + (0 * x).flatten(1).sum(1).sqrt(), "gradient that is not finite"),
])  # fmt: skip
def test_a_guide_that_cannot_guide_is_refused(guide, error):
    with pytest.raises(UsageError, match=error):
        Steering(identity, guide).moved(latents(), 0.0)


def test_given_tokens_and_guides_steer_together():
    given = torch.tensor([[1, -1]])
    logits = torch.zeros(1, 2, 4)
    assert steering(identity, None, None) is None and steering(identity, None, Control(strength=2)) is None
    steer = steering(identity, given, Control(lambda x: x.flatten(1).sum(1) + 1, 2.0))
    assert steer is not None and steer.strength == 2.0
    assert steer.guide(logits).item() == pytest.approx(math.log(4) + 1)
    assert keep_given(torch.tensor([[3, 3]]), given).tolist() == [[1, 3]]


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
def test_an_origin_is_a_state_of_the_path(noise):
    z, eps, grid = latents(), latents().flip(0), torch.tensor([0.0, 0.5, 0.75, 1.0])
    origin = Origin(z, torch.zeros(B, 1), noise)
    assert torch.allclose(origin.state(z, eps), (1 - noise) * z + noise * eps)
    assert origin.rest(grid).tolist() == {0.0: [1.0], 0.25: [0.75, 1.0], 1.0: [0.0, 0.5, 0.75, 1.0]}[noise]
    if noise == 1:
        assert torch.equal(origin.state(z, eps), eps)
    if noise == 0:
        assert torch.equal(origin.state(z, eps), z)
