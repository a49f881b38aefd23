"""Masked training of the small encoder: what is hidden, what is counted, and that it learns."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from micro import micro_model

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.util.rng import RowNoise


def build(vocab=40, width=16):
    return micro_model("encoder", 0.0, data__vocab_size=vocab, encoder__feature_dim=width, encoder__depth=2).train()


def tokens(rows, length, vocab=40):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


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


def test_a_rule_between_neighbors_is_learned():
    # Tokens count upward, so a masked one is known from its neighbors: chance is log 12 = 2.48.
    method = build(12, 32)
    optimizer = torch.optim.AdamW(method.parameters(), 3e-3)
    for step in range(200):
        start = (torch.arange(32) * 7 + step) % 12
        x = (start[:, None] + torch.arange(10)) % 12
        losses = method.losses(Batch(x), RowNoise(0, range(32), step))
        optimizer.zero_grad()
        (losses["masked"] + 0.2 * losses["kept"]).backward()
        optimizer.step()
    assert losses["masked"] < 0.3 and losses["kept"] < 0.3
    assert all(p.grad is not None for p in method.parameters())
