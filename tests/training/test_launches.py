"""A training step has as many launches for any number of rows, and one host sync at most.

The step runs on the CPU as it would on an accelerator, with noise drawn on the device, and its operations are counted: every
operation that computes is a launch, every operation whose result the host must see is a sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from micro import MICRO, RANDOM_ENCODER
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from jpeg_dlm.encoders import build_encoder
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.registry import build_method, for_method, method_class, names
from jpeg_dlm.options import option_names, override
from jpeg_dlm.presets import preset
from jpeg_dlm.training.trainer import Trainer
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.rng import RowNoise, generator

SIZES = {name: value for name, value in MICRO.items() if name.startswith(("encoder.", "model."))} | RANDOM_ENCODER
SIZES |= {"data.vocab_size": 300, "data.token_len": 16, "train.accumulation": 1, "train.devices": 1, "train.steps": 1000}
SIZES |= {"train.precision": "bf16", "objective.ce_chunk": 65_536}  # as many logits at once as there are
# Operations whose result the host waits for on an accelerator; indexing by a mask is one too.
SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero", "bincount"}
# Operations that only make a view or an empty tensor.
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "lift_fresh", "new_empty_strided"}


class Reads(TorchFunctionMode):
    """Counts the calls that copy a tensor to the host, which on a CPU are no operations."""

    def __init__(self, syncs: Counter[str]) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu):  # `numpy` takes tensors of the host only
            self.syncs[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Count(TorchDispatchMode):
    """Counts operations while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.syncs = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNCS or (name.startswith("index") and _by_mask(args)):
            self.syncs[name] += 1
        if not func.is_view and name not in FREE:
            self.launches += 1
        return func(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)


# ---------------------------------------------------------------- the step


class OneBatch:
    """A stream of the same tokens with new noise, drawn as on an accelerator."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.rows_per_step = batch, len(batch.tokens_BL)

    def micro_batches(self, step: int) -> Iterator[tuple[Batch, RowNoise]]:
        yield self.batch, RowNoise(0, range(self.rows_per_step), step, total=self.rows_per_step, host=False)


def trainer(method: str, rows: int) -> Trainer:
    """Return the trainer of a method, of the LM1B preset with tiny widths, on random tokens."""
    config = for_method(preset("lm1b"), method)
    known = option_names(config)
    config = override(config, {name: value for name, value in (SIZES | {"train.batch": rows}).items() if name in known})
    encoder = build_encoder(config.encoder, config.data.vocab_size) if method_class(method).uses_encoder else None
    tokens_BL = torch.randint(4, 100, (rows, config.data.token_len), generator=generator(0, "tokens"))  # 103 is BERT's mask
    torch.manual_seed(0)
    return Trainer(config, build_method(config, encoder), OneBatch(Batch(tokens_BL)), Path("."), Ranks())


def counted(run: Trainer) -> Count:
    """Count the second step; the first one makes the state of the optimizer."""
    run.train_step()
    with Count() as count, Reads(count.syncs):
        run.train_step()
    return count


@pytest.mark.parametrize("method", names("system"))
def test_launches_do_not_depend_on_rows_and_a_step_reads_once(method):
    few, many = (counted(trainer(method, rows)) for rows in (16, 48))
    assert few.launches == many.launches > 100
    reads = 2 if method == "elf" else 1  # torch's Muon, unlike AdamW, has to be told whether the step is finite
    assert few.syncs.total() <= reads and many.syncs.total() <= reads
