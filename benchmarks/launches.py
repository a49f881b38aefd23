"""Kernel launches, host syncs and compiled graphs of one training step, for every method and several numbers of rows.

python benchmarks/run.py launches

The step runs on the CPU as it would on an accelerator, with noise drawn on the device, and its operations are counted: every
operation that computes is a launch, every operation whose result the host must see is a sync. The counts are exact, so they
do not depend on the machine. The networks have the structure of the paper's preset and tiny widths.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from straightforward import Straightforward, StraightforwardStep
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.encoders.build import build_encoder
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.registry import build_method, for_method, method_class, names
from jpeg_dlm.presets import preset
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.rng import RowNoise, generator
from jpeg_dlm.training.loop import Trainer

ROWS = (8, 64, 384)
SIZES = {
    "data.vocab_size": 300, "encoder.kind": "random", "encoder.scale": "none", "encoder.feature_dim": 16, "encoder.depth": 6,
    "encoder.heads": 2, "model.latent_dim": 16, "model.bottleneck_dim": 8, "model.codec_heads": 2, "model.proj_dim": 16,
    "model.hidden": 24, "model.heads": 2, "model.freq_dim": 8, "train.accumulation": 1, "train.devices": 1, "train.steps": 1000,
    "train.precision": "bf16", "objective.ce_chunk": 65_536,  # as many logits at once as there are
}  # fmt: skip
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


def micro(method: str, rows: int, **changes: object) -> Config:
    """Return the LM1B preset of a method with tiny widths and `rows` per step."""
    config = for_method(preset("lm1b"), method)
    options = {**SIZES, "train.batch": rows} | {name.replace("__", "."): value for name, value in changes.items()}
    known = {group: vars(getattr(config, group)) for group in ("data", "encoder", "model", "objective", "train")}
    return override(config, {k: v for k, v in options.items() if k.split(".")[1] in known[k.split(".")[0]]})


def trainer(method: str, rows: int, plain: bool = False, **changes: object) -> Trainer | StraightforwardStep:
    """Return the trainer of a method on random tokens, or the straightforward step of JPEG-DLM."""
    config = micro(method, rows, **changes)
    encoder = build_encoder(config.encoder, config.data.vocab_size) if method_class(method).needs_encoder(config) else None
    tokens_BL = torch.randint(4, 100, (rows, config.data.token_len), generator=generator(0, "tokens"))  # 103 is BERT's mask
    stream = OneBatch(Batch(tokens_BL))
    torch.manual_seed(0)
    if plain:
        return StraightforwardStep(Straightforward(config, encoder), config.train, stream)
    built = build_method(config, encoder)
    return Trainer(config, built, stream, Path("."), Ranks())  # pyright: ignore[reportArgumentType]


def counted(run: Trainer | StraightforwardStep) -> Count:
    """Count the second step; the first one makes the state of the optimizer."""
    run.train_step()
    with Count() as count, Reads(count.syncs):
        run.train_step()
    return count


@contextlib.contextmanager
def traced_only() -> Iterator[None]:
    """Let compiled layers run their graphs without generating code, since only the graphs are counted."""
    compile_ = nn.Module.compile
    with patch.object(nn.Module, "compile", lambda layer, **options: compile_(layer, backend="eager", **options)):
        yield


def compiled(method: str, rows: int = 16, **changes: object) -> tuple[int, int]:
    """Return (graph breaks of four compiled steps, graphs that the last three add)."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with traced_only():
        run = trainer(method, rows, train__compile=True, **changes)
        run.train_step()
        graphs = counters["stats"]["unique_graphs"]
        for _ in range(3):
            run.train_step()
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"] - graphs


def measure(short: bool) -> dict[str, Any]:
    sizes = ROWS[:2] if short else ROWS
    rows, systems = [], [(name, False) for name in names("system")]
    for method, plain in [*systems, ("jpeg-dlm", True)]:
        counts = [counted(trainer(method, n, plain)) for n in sizes]
        title = "JPEG-DLM, straightforward" if plain else method_class(method).title
        graphs = ("-", "-") if plain else compiled(method)
        rows.append([title, *(c.launches for c in counts), max(c.syncs.total() for c in counts), *graphs])
        print(f"{title}: {rows[-1][1:]}", file=sys.stderr, flush=True)
    ours, plain = (next(row for row in rows if row[0] == title) for title in ("JPEG-DLM", "JPEG-DLM, straightforward"))
    head = ["system", *(f"launches, {n} rows" for n in sizes), "syncs", "graph breaks", "later graphs"]
    note = "One bf16 step; `later graphs` are those that `--train.compile` adds in the second to fourth step."
    return {
        "title": "Launches of a training step",
        "markdown": markdown_table(head, [list(map(str, row)) for row in rows]) + f"\n\n{note}",
        "rows": rows,
        "ratios": {f"JPEG-DLM, {n} rows": plain[i] / ours[i] for i, n in enumerate(sizes, 1)},
    }


if __name__ == "__main__":
    print(measure(False)["markdown"])
