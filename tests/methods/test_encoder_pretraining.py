"""Masked training of the small encoder: what is hidden, and what is counted."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from micro import micro_model

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.util.rng import RowNoise


def build():
    return micro_model("encoder", 0.0, data__vocab_size=40, encoder__depth=2).train()


def tokens(rows, length):
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(1))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 6), length=st.integers(1, 20), step=st.integers(0, 9))
def test_the_share_of_real_tokens_is_masked_and_padding_never(rows, length, step):
    method = build()
    x = tokens(rows, length)
    valid = torch.arange(length)[None] < torch.randint(1, length + 1, (rows, 1), generator=torch.Generator().manual_seed(step))
    seen, chosen = method.corrupt(x, valid, RowNoise(0, range(rows), step))
    assert not (chosen & ~valid).any()
    want = (valid.sum(1) * 0.3).round().clamp(min=1)
    assert torch.equal(chosen.sum(1).float(), want.float())
    assert torch.equal(seen[~chosen], x[~chosen])
    assert seen.min() >= 0 and seen.max() <= method.model.mask_id


def test_chosen_tokens_are_masked_replaced_or_left_in_the_shares_of_bert():
    method = build()
    x = tokens(400, 30)
    seen, chosen = method.corrupt(x, None, RowNoise(0, range(400)))
    masked = (seen[chosen] == method.model.mask_id).float().mean()
    same = (seen[chosen] == x[chosen]).float().mean()
    assert abs(masked - 0.8) < 0.02
    assert abs(same - (0.1 + 0.1 / 40)) < 0.02  # a random token hits the true one once in V


def test_losses_equal_cross_entropy_by_hand():
    method = build()
    x = tokens(5, 8)
    valid = torch.arange(8)[None] < torch.tensor([8, 3, 5, 1, 8])[:, None]
    noise = RowNoise(3, range(5), 2)
    seen, chosen = method.corrupt(x, valid, noise)
    losses = method.losses(Batch(x, valid), noise)
    sums = {"masked": [], "kept": []}
    for b in range(5):
        n = int(valid[b].sum())
        logits = method.model.logits(method.model.hidden(seen[b : b + 1, :n]))[0]  # without padding at all
        for i in range(n):
            sums["masked" if chosen[b, i] else "kept"].append(F.cross_entropy(logits[i], x[b, i]))
    for name, values in sums.items():
        torch.testing.assert_close(losses[name], torch.stack(values).mean(), atol=1e-5, rtol=1e-5)


def test_everything_masked_gives_a_kept_loss_of_zero_not_nan():
    losses = build().losses(Batch(tokens(2, 1)), RowNoise(0, range(2)))  # of one token, that one is masked
    assert losses["kept"] == 0 and torch.isfinite(losses["masked"])
