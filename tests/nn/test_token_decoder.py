"""Contextual token decoders: causality, the cache, rows on their own, given ids and corruption."""

from __future__ import annotations

import pytest
import torch
from conftest import perturb
from torch import nn

from jpeg_dlm.nn.token_decoder import AutoregressiveDecoder, TokenDecoder, TokenProjection, TwoPassDecoder, corrupted_ids
from jpeg_dlm.rng import RowNoise

B, L, FEATURES, INNER, VOCAB = 5, 7, 6, 10, 40
KINDS = [AutoregressiveDecoder, TwoPassDecoder]


def parts(kind: type[TokenDecoder], trained: bool = True) -> tuple[TokenDecoder, TokenProjection, torch.Tensor]:
    torch.manual_seed(0)
    decoder = kind(FEATURES, INNER, 16, 2, 2, 0.0, 0.3).eval()
    W = TokenProjection(nn.Linear(FEATURES, INNER), nn.Linear(INNER, VOCAB))
    return perturb(decoder) if trained else decoder, W, torch.randn(B, L, FEATURES)


def text(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, L), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_decoder_is_the_projection(kind):
    decoder, W, hhat = parts(kind, trained=False)
    assert decoder(hhat, text(), W).equal(hhat)
    assert decoder.logits(hhat, W).equal(W(hhat)) and decoder.written(hhat, W).equal(W(hhat).argmax(-1))


@torch.no_grad()
def test_the_cache_changes_nothing():
    """Greedy decoding, in which the whole prefix is read again for each token."""
    decoder, W, hhat = parts(AutoregressiveDecoder)
    tokens = torch.zeros(B, L, dtype=torch.long)
    for i in range(L):
        logits = W(decoder.corrected(hhat, tokens, W))
        tokens[:, i] = logits[:, i].argmax(-1)
    assert decoder.written(hhat, W).equal(tokens)
    assert torch.allclose(decoder.logits(hhat, W), logits, atol=1e-5)
    assert not tokens.equal(W(hhat).argmax(-1))  # and the decoder had something to say


@torch.no_grad()
def test_a_token_changes_only_what_follows_it():
    decoder, W, hhat = parts(AutoregressiveDecoder)
    before = decoder.corrected(hhat, text(), W)
    for j in range(L):
        other = text()
        other[:, j] = (other[:, j] + 1) % VOCAB
        after = decoder.corrected(hhat, other, W)
        assert after[:, : j + 1].equal(before[:, : j + 1])
        assert (after[:, j + 1 :] != before[:, j + 1 :]).any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_sees_every_feature(kind):
    decoder, W, hhat = parts(kind)
    hhat.requires_grad_()
    for i in range(L):
        (gradient,) = torch.autograd.grad(decoder.corrected(hhat, text(), W)[:, i].square().sum(), hhat)
        assert gradient.abs().sum(-1).gt(0).all()


@torch.no_grad()
def test_the_second_pass_reads_tokens_on_both_sides():
    decoder, W, hhat = parts(TwoPassDecoder)
    first = W(hhat).argmax(-1)
    assert decoder.written(hhat, W).equal(W(decoder.corrected(hhat, first, W)).argmax(-1))
    other = first.clone()
    other[:, 3] = (other[:, 3] + 1) % VOCAB
    assert (decoder.corrected(hhat, other, W) != decoder.corrected(hhat, first, W)).any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_row_does_not_depend_on_its_batch(kind):
    decoder, W, hhat = parts(kind)
    together = decoder.written(hhat, W)
    assert torch.cat([decoder.written(row, W) for row in hhat.split(1)]).equal(together)
    assert decoder.written(hhat.flip(0), W).equal(together.flip(0))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_given_ids_are_read_and_the_own_ones_returned(kind):
    decoder, W, hhat = parts(kind)
    free = torch.full((B, L), -1)
    assert decoder.written(hhat, W, free).equal(decoder.written(hhat, W))
    assert decoder.logits(hhat, W, text()).equal(W(decoder.corrected(hhat, text(), W)))  # teacher forcing
    assert decoder.written(hhat, W, text()).equal(decoder.logits(hhat, W, text()).argmax(-1))
    free[:, 0] = (decoder.written(hhat, W)[:, 0] + 1) % VOCAB
    changed = decoder.logits(hhat, W, free) != decoder.logits(hhat, W)
    assert changed[:, 1:].any() and changed[:, 0].any() == (kind is TwoPassDecoder)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_a_gradient_in_the_features(kind):
    """Against finite differences, with the tokens that are read fixed."""
    decoder, W, hhat = parts(kind)
    hhat.requires_grad_()

    def loss(h: torch.Tensor) -> torch.Tensor:
        return decoder.logits(h, W, text()).log_softmax(-1)[..., 5].sum()

    (gradient,) = torch.autograd.grad(loss(hhat), hhat)
    with torch.no_grad():
        direction = gradient / gradient.norm()
        slope = (loss(hhat + 1e-2 * direction) - loss(hhat - 1e-2 * direction)) / 2e-2
    assert gradient.norm().item() == pytest.approx(slope.item(), rel=1e-2)


# ---------------------------------------------------------------- corruption


def test_the_share_of_random_tokens():
    rows, length, vocab, share = 200, 100, 50, 0.3
    tokens = torch.full((rows, length), 7)
    found = corrupted_ids(tokens, share, vocab, RowNoise(0, range(rows)))
    counts = torch.bincount(found.flatten(), minlength=vocab) / found.numel()
    assert counts[7].item() == pytest.approx(1 - share + share / vocab, abs=0.01)
    others = torch.cat([counts[:7], counts[8:]])
    assert len(counts) == vocab and torch.allclose(others, torch.full_like(others, share / vocab), atol=0.003)
    assert found[3:5].equal(corrupted_ids(tokens[:2], share, vocab, RowNoise(0, [3, 4])))  # rows have noise of their own
    assert not found.equal(corrupted_ids(tokens, share, vocab, RowNoise(0, range(rows), step=1)))
    assert corrupted_ids(tokens, 1.0, vocab, RowNoise(0, range(rows))).max() == vocab - 1


@pytest.mark.parametrize("kind", KINDS)
def test_corruption_is_for_training(kind):
    decoder, W, hhat = parts(kind)
    noise = RowNoise(0, range(B))
    clean = decoder(hhat, text(), W)
    assert decoder(hhat, text(), W, noise).equal(clean)
    read = decoder.trained_on(hhat, text(), W)
    assert decoder.train()(hhat, text(), W, noise).equal(decoder.corrected(hhat, corrupted_ids(read, 0.3, VOCAB, noise), W))
    decoder.corrupt = 0.0
    assert decoder(hhat, text(), W, noise).equal(clean)
