"""Training of the 'small' encoder: predict masked tokens and reconstruct the others.

The first term makes features contextual; the second keeps them invertible, as a decoder needs.
Shapes: B batch, L tokens, F feature width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jpeg_dlm.config import Config
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.base import Batch, Trainable, masked_mean
from jpeg_dlm.nn.token_loss import token_nll
from jpeg_dlm.rng import RowNoise

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens; the remaining tenth is unchanged (BERT)


class EncoderPretraining(Trainable):
    """Masked language modeling of a trainable `SmallEncoder`, as a method."""

    title = "text encoder"

    def __init__(self, model: SmallEncoder, mask_prob: float = 0.3, keep_weight: float = 0.2) -> None:
        super().__init__()
        if not 0 < mask_prob <= 1:
            raise UsageError(f"encoder.mask_prob must lie above 0 and not above 1, not {mask_prob}.")
        self.model = model
        self.mask_prob = mask_prob
        self.loss_weights = {"masked": 1.0, "kept": keep_weight}

    @classmethod
    def from_config(cls, config: Config, encoder: nn.Module | None = None) -> EncoderPretraining:
        e = config.encoder
        model = SmallEncoder(config.data.vocab_size, e.feature_dim, e.depth, e.heads, e.causal).initialize(config.train.seed)
        return cls(model, e.mask_prob, e.keep_weight)

    def corrupt(self, tokens_BL: Tensor, mask_BL: Tensor | None, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Return the corrupted tokens, and a mask (B, L, bool) of the tokens that were chosen for prediction."""
        B, L = tokens_BL.shape
        valid_BL = torch.ones_like(tokens_BL, dtype=torch.bool) if mask_BL is None else mask_BL
        order, kind, replacement = noise.uniform("encoder-mask", 3, L).to(tokens_BL.device).unbind(1)
        # A fixed share of each row's real tokens, not a coin per token, so that every row has the same weight.
        counts_B1 = (valid_BL.sum(1, keepdim=True) * self.mask_prob).round().clamp(min=1)
        ranks_BL = order.masked_fill(~valid_BL, 2.0).argsort(1).argsort(1)
        chosen_BL = (ranks_BL < counts_B1) & valid_BL
        random_BL = (replacement * self.model.vocab_size).long().clamp(max=self.model.vocab_size - 1)
        seen_BL = torch.where(chosen_BL & (kind < MASK_SHARE), self.model.mask_id, tokens_BL)
        swap_BL = chosen_BL & (kind >= MASK_SHARE) & (kind < MASK_SHARE + RANDOM_SHARE)
        return torch.where(swap_BL, random_BL, seen_BL), chosen_BL

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        """Return the mean cross-entropy of chosen tokens ('masked') and of the other real tokens ('kept')."""
        seen_BL, chosen_BL = self.corrupt(batch.tokens_BL, batch.mask_BL, noise)
        nll_BL = token_nll(self.model.logits, self.model.hidden(seen_BL, batch.mask_BL), batch.tokens_BL)
        return {"masked": masked_mean(nll_BL, chosen_BL), "kept": masked_mean(nll_BL, batch.real_BL & ~chosen_BL)}

    @torch.no_grad()
    def reconstruction(self, batch: Batch, sampler: Any = None) -> Tensor:
        """Return the share of tokens that are predicted from their own features: an upper bound for a codec on top."""
        return batch.accuracy(self.model.logits(self.model.hidden(batch.tokens_BL, batch.mask_BL)).argmax(-1))
