"""Training of the 'small' encoder: predict masked tokens and reconstruct the others.

The first term makes features contextual; the second keeps them invertible, as a decoder needs.
Shapes: B batch, L tokens, F feature width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.methods.base import Batch, Trainable, masked_mean
from jpeg_dlm.methods.jpeg_dlm_config import GROUPS
from jpeg_dlm.nn.token_loss import most_probable, token_nll
from jpeg_dlm.util.rng import RowNoise

MASK_PROB = 0.3  # share of a row's tokens that are chosen for prediction (assumed)
KEEP_WEIGHT = 0.2  # weight of predicting the others, which preserves token identity (measured)
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens; the remaining tenth is unchanged (BERT)


def paired(batch: Batch, source: Batch, alone: bool) -> Batch:
    """Return rows of sources and targets: both in one, so that a word is guessed from its translation, or half of them each."""
    if not alone:
        return Batch(batch.joined().tokens_BL, torch.cat([source.real_BL, batch.real_BL], 1))
    half, size = len(batch.tokens_BL) // 2, max(source.tokens_BL.shape[1], batch.tokens_BL.shape[1])
    sides = (source.tokens_BL[:half], batch.tokens_BL[half:]), (source.real_BL[:half], batch.real_BL[half:])
    tokens_BL, mask_BL = (torch.cat([F.pad(x, (0, size - x.shape[1])) for x in side]) for side in sides)
    return Batch(tokens_BL, mask_BL)


class EncoderPretraining(Trainable):
    """Masked language modeling of a trainable `SmallEncoder`, as a method."""

    title = "text encoder"
    groups = GROUPS  # those of the methods that its runs are part of
    sources = "beside"

    def __init__(self, config: Config) -> None:
        super().__init__()
        e = config.encoder
        self.model = SmallEncoder(config.data.vocab_size, e.feature_dim, e.depth, e.heads).initialize(config.train.seed)
        self.loss_weights = {"masked": 1.0, "kept": KEEP_WEIGHT}

    def corrupt(self, tokens_BL: Tensor, mask_BL: Tensor | None, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Return the corrupted tokens, and a mask (B, L, bool) of the tokens that were chosen for prediction."""
        valid_BL = Batch(tokens_BL, mask_BL).real_BL
        order, kind, replacement = noise.uniform("encoder-mask", 3, tokens_BL.shape[1]).to(tokens_BL.device).unbind(1)
        # A fixed share of each row's real tokens, not a coin per token, so that every row has the same weight.
        counts_B1 = (valid_BL.sum(1, keepdim=True) * MASK_PROB).round().clamp(min=1)
        ranks_BL = order.masked_fill(~valid_BL, 2.0).argsort(1).argsort(1)
        chosen_BL = (ranks_BL < counts_B1) & valid_BL
        random_BL = (replacement * self.model.vocab_size).long().clamp(max=self.model.vocab_size - 1)
        seen_BL = torch.where(chosen_BL & (kind < MASK_SHARE), self.model.mask_id, tokens_BL)
        swap_BL = chosen_BL & (kind >= MASK_SHARE) & (kind < MASK_SHARE + RANDOM_SHARE)
        return torch.where(swap_BL, random_BL, seen_BL), chosen_BL

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Return the mean cross-entropy of chosen tokens ('masked') and of the other real tokens ('kept')."""
        if batch.source is not None:
            batch = paired(batch, batch.source, alone=noise.step % 2 == 0)
        seen_BL, chosen_BL = self.corrupt(batch.tokens_BL, batch.mask_BL, noise)
        nll_BL = token_nll(self.model.logits, self.model.hidden(seen_BL, batch.mask_BL), batch.tokens_BL)
        chosen = {"masked": chosen_BL, "kept": batch.real_BL & ~chosen_BL}
        return {name: masked_mean(nll_BL, chosen_BL) * batch.token_weight() for name, chosen_BL in chosen.items()}

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: Any = None) -> Tensor:
        """Return the share of tokens that are predicted from their own features: an upper bound for a codec on top."""
        h_BLF = self.model.hidden(batch.tokens_BL, batch.mask_BL)
        return batch.accuracy(most_probable(self.model.logits, h_BLF, self.model.vocab_size))
