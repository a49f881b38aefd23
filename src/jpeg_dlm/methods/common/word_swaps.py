"""Text of the decode branch in which random tokens replace some, so that the codec learns rare words in any place."""

from __future__ import annotations

from dataclasses import replace

import torch

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.rng import RowNoise


def swapped(batch: Batch, share: float, vocab_size: int, noise: RowNoise) -> Batch:
    """Return the batch with this share of its real tokens drawn uniformly from the vocabulary, without cached features."""
    chance_BL, word_BL = noise.uniform("swap", 2, batch.tokens_BL.shape[1]).unbind(1)
    random_BL = (word_BL * vocab_size).long().clamp_max(vocab_size - 1)
    tokens_BL = torch.where((chance_BL < share) & batch.real_BL, random_BL, batch.tokens_BL)
    return replace(batch, tokens_BL=tokens_BL, features_BLF=None)
