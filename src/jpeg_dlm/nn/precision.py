"""Keep input projections, prefix tokens and heads in fp32 under bf16 autocast (released)."""

import torch
from torch import Tensor


def fp32_island(like: Tensor) -> torch.autocast:
    """Return a context that disables autocast on the device of `like`."""
    return torch.autocast(like.device.type, enabled=False)
