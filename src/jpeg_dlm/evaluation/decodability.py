"""How much noise latents bear before their tokens are lost: shares of right tokens, and where they fall below half."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jpeg_dlm.methods.base import Batch


def right_tokens(tokens_BL: Tensor, batch: Batch) -> Tensor:
    """How many real tokens of each row are right."""
    same_BL = tokens_BL == batch.tokens_BL
    return (same_BL if batch.mask_BL is None else same_BL & batch.mask_BL).sum(1)


def real_tokens(batch: Batch) -> Tensor:
    """How many tokens of each row are not padding."""
    mask_BL = torch.ones_like(batch.tokens_BL) if batch.mask_BL is None else batch.mask_BL
    return mask_BL.sum(1)


def break_point(times: Sequence[float], shares: Sequence[float], part: float = 0.5) -> float | None:
    """The t at which the share of right tokens first falls below `part` of its clean value, linear between levels.

    `times` fall from the cleanest on; None if the share never falls that far.
    """
    threshold = part * shares[0]
    for k in range(1, len(times)):
        if shares[k] < threshold:
            above = (shares[k - 1] - threshold) / (shares[k - 1] - shares[k])
            return times[k - 1] + above * (times[k] - times[k - 1])
    return None
