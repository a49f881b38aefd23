"""Random words in the decode branch: which tokens they replace, and that the denoise branch never sees them."""

import pytest
import torch
from test_jpeg_dlm import FROZEN_STEP, VOCAB, batch, build, moved, noise

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.common.word_swaps import swapped
from jpeg_dlm.rng import RowNoise


def test_a_share_of_the_real_tokens_becomes_uniform_draws():
    rows, length = 400, 50
    mask = torch.arange(length) < torch.tensor([[20], [50]]).repeat(rows // 2, 1)
    text = Batch(torch.full((rows, length), 7), mask, torch.zeros(rows, length, 3))
    found = swapped(text, 0.3, 100, RowNoise(0, range(rows), 5))
    changed = found.tokens_BL != 7
    assert not changed[~mask].any(), "padding stays"
    assert changed[mask].float().mean().item() == pytest.approx(0.3 * 0.99, abs=4 * (0.21 / mask.sum().item()) ** 0.5)
    counts = torch.bincount(found.tokens_BL[changed], minlength=100)
    expected = counts.sum().item() / 99
    assert counts[7] == 0 and (counts.sum() - counts[7]) == changed.sum()
    assert ((counts.float() - expected) ** 2 / expected)[torch.arange(100) != 7].sum() < 98 + 5 * (2 * 98) ** 0.5  # chi squared
    assert found.features_BLF is None, "cached features are of the original text"
    again = swapped(text, 0.3, 100, RowNoise(0, range(rows), 5))
    assert again.tokens_BL.equal(found.tokens_BL), "the same in a repeated step"


def test_the_decode_branch_alone_sees_them():
    plain, with_swaps = build(), build(objective__swap=0.5)
    with_swaps.load_state_dict(plain.state_dict())
    step = noise(step=FROZEN_STEP)
    expected, found = plain.losses(batch(), step), with_swaps.losses(batch(), step)
    assert found["flow"].item() == pytest.approx(expected["flow"].item(), rel=1e-6)
    other = plain.losses(swapped(batch(), 0.5, VOCAB, step), step)
    for name in ("jep", "feat", "ce", "sigreg", "var", "cov"):
        assert found[name].item() == pytest.approx(other[name].item(), rel=1e-6), name
        assert found[name].item() != pytest.approx(expected[name].item(), rel=1e-6), name
    assert moved(with_swaps, found["flow"]) == moved(plain, expected["flow"])


def test_held_out_losses_are_of_the_text_itself():
    plain, with_swaps = build().eval(), build(objective__swap=0.5).eval()
    with_swaps.load_state_dict(plain.state_dict())
    expected, found = plain.losses(batch(), noise()), with_swaps.losses(batch(), noise())
    assert all(found[name].equal(expected[name]) for name in expected)
