"""Guides: losses of token logits that a sampler of latents lowers while it writes.

A guide is any differentiable function `fn(logits_BLV) -> loss_B`. A row's loss must depend on the row alone; 0 or less
means that the row is as wanted. Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Guide = Callable[[Tensor], Tensor]  # logits (B, L, V) to one loss per row (B)


def given_tokens(given_BL: Tensor, end_id: int | None = None) -> Guide:
    """Return the guide to rows with these ids; the loss is the mean of -log p over given positions (-1 is free).

    With `end_id`, positions before the last given one also count, with -log of the probability of another id than that.
    """
    given_BL = given_BL.clone()
    kept_BL = given_BL >= 0
    before_BL = ~kept_BL & (kept_BL.flip(1).cumsum(1).flip(1) > 0)
    count_B = kept_BL.sum(1).clamp_min(1)

    def loss(logits_BLV: Tensor) -> Tensor:
        nll_BL = F.cross_entropy(logits_BLV.transpose(1, 2), given_BL.clamp_min(0), reduction="none") * kept_BL
        if end_id is not None:
            nll_BL = nll_BL - log_other(logits_BLV.log_softmax(-1)[..., end_id]) * before_BL
        return nll_BL.sum(1) / count_B

    return loss


def contains(words: Sequence[Sequence[Sequence[int]]], end_id: int | None = None) -> Guide:
    """Return the guide to rows that contain all words, each at any position and in any of its spellings as token ids.

    The loss is the mean over words of -log of the expected number of places of a word, if tokens were independent. With
    `end_id`, places after an end token do not count.
    """

    def loss(logits_BLV: Tensor) -> Tensor:
        log_p_BLV = logits_BLV.float().log_softmax(-1)
        before_BL = None
        if end_id is not None:  # log of the probability that no end token stands before a position
            open_BL = log_other(log_p_BLV[..., end_id])
            before_BL = F.pad(open_BL.cumsum(1)[:, :-1], (1, 0))
        losses = []
        for spellings in words:
            places = [_log_places(log_p_BLV, before_BL, ids) for ids in spellings]
            losses.append(-torch.cat(places, dim=1).logsumexp(1).clamp_max(0.0))
        return torch.stack(losses).mean(0)

    return loss


def log_other(log_p: Tensor) -> Tensor:
    """Return log(1 - p), bounded where p is nearly 1."""
    return torch.log1p(-log_p.exp().clamp_max(1 - 1e-6))


def _log_places(log_p_BLV: Tensor, before_BL: Tensor | None, ids: Sequence[int]) -> Tensor:
    """Return the log-probability of `ids` at each position where they fit."""
    length = log_p_BLV.shape[1] - len(ids) + 1
    at = sum((log_p_BLV[:, i : i + length, token] for i, token in enumerate(ids)), start=log_p_BLV.new_zeros(()))
    return at if before_BL is None else at + before_BL[:, :length]


def all_of(guides: Sequence[Guide]) -> Guide:
    """Return the guide whose loss is the sum of these."""
    return guides[0] if len(guides) == 1 else lambda logits_BLV: sum((g(logits_BLV) for g in guides[1:]), guides[0](logits_BLV))
