"""Decoding in evaluation and sampling: logits of a few positions at a time, never those of a whole batch."""

import pytest
import torch
from micro import micro_model
from torch.utils._python_dispatch import TorchDispatchMode

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.util.rng import RowNoise

LIMIT = 4000  # numbers of logits at once in this test; a whole batch has 16 x 12 x 300


class Largest(TorchDispatchMode):
    """Records the largest tensor whose last axis is the vocabulary."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == 300 and out.is_floating_point():
            if "linear" in str(func) or "mm" in str(func):
                self.numbers = max(self.numbers, out.numel())
        return out


@pytest.mark.parametrize("name", ["jpeg-dlm", "ldlm", "elf", "cosmos"])
def test_no_step_holds_the_logits_of_a_batch(name, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.config.LOGITS_AT_ONCE", LIMIT)
    method = micro_model(name)
    batch = Batch(torch.randint(0, 300, (16, 12), generator=torch.Generator().manual_seed(0)))
    with Largest() as largest:
        method.reconstruction(batch)
        method.sample(method.config.sampler, RowNoise(0, range(16)))
    assert 0 < largest.numbers <= LIMIT
