"""Keep input projections, prefix tokens and heads in fp32 under bf16 autocast (released)."""

import torch
from torch import Tensor


def autocast_device(like: Tensor) -> str:
    """Return the kind of device whose autocast applies to `like`: the meta device has none, so there it is the CPU's."""
    return "cpu" if like.is_meta else like.device.type


def fp32_island(like: Tensor) -> torch.autocast:
    """Return a context that disables autocast on the device of `like`."""
    return torch.autocast(autocast_device(like), enabled=False)
