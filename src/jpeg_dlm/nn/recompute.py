"""Activation checkpointing: a layer keeps only its inputs and is recomputed in backward (Chen et al. 2016)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(layer: nn.Module) -> None:
    """Make `layer` recompute its activations in backward; parameter names, results and dropout stay the same."""
    forward = layer.forward

    def recomputed(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False)  # restores the random state, so dropout repeats its mask

    layer.forward = recomputed
