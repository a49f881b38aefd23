"""Where full precision is kept: the input projections, prefix tokens and heads stay fp32 under bf16 autocast (released)."""

import torch
from torch import Tensor


def fp32_island(like: Tensor) -> torch.autocast:
    """A context in which autocast is off on the device of `like`."""
    return torch.autocast(like.device.type, enabled=False)
