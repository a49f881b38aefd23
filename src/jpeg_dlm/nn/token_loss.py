"""Token cross-entropy that need not keep the logits of a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_nll(project: Callable[[Tensor], Tensor], h_BLF: Tensor, tokens_BL: Tensor, chunk: int = 0) -> Tensor:
    """-log p(token) at every position (B, L), with logits = project(h).

    With `chunk` > 0 only that many rows of logits (positions, not sequences) exist at once: they are computed again in
    backward, which trades one more projection for never holding B x L x V numbers.
    """
    rows, targets = h_BLF.flatten(0, 1), tokens_BL.flatten()

    def nll(part: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(project(part).float(), target, reduction="none")

    if chunk <= 0 or len(rows) <= chunk:
        out = nll(rows, targets)
    else:
        parts = zip(rows.split(chunk), targets.split(chunk), strict=True)
        out = torch.cat([checkpoint(nll, part, target, use_reentrant=False) for part, target in parts])
    return out.view(tokens_BL.shape)
