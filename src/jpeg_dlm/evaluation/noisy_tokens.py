"""Decodability of noisy latents: the share of correct tokens, and the time at which it falls below half."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jpeg_dlm.methods.base import Batch


def right_tokens(tokens_BL: Tensor, batch: Batch) -> Tensor:
    """Count the correct real tokens of each row."""
    same_BL = tokens_BL == batch.tokens_BL
    return (same_BL if batch.mask_BL is None else same_BL & batch.mask_BL).sum(1)


def real_tokens(batch: Batch) -> Tensor:
    """Count the tokens of each row that are not padding."""
    mask_BL = torch.ones_like(batch.tokens_BL) if batch.mask_BL is None else batch.mask_BL
    return mask_BL.sum(1)


def break_point(times: Sequence[float], shares: Sequence[float], part: float = 0.5) -> float | None:
    """Return the t at which the share of correct tokens first falls below `part` of its clean value; None if it never does."""
    threshold = part * shares[0]
    for k in range(1, len(times)):
        if shares[k] < threshold:
            above = (shares[k - 1] - threshold) / (shares[k - 1] - shares[k])
            return times[k - 1] + above * (times[k] - times[k - 1])
    return None
