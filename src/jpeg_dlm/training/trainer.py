"""One optimizer step, and the state of training in checkpoints. It knows `methods.base.Trainable` only, not any method."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from jpeg_dlm.checkpoints.checkpoint import Checkpoint, save_checkpoint
from jpeg_dlm.config import Config
from jpeg_dlm.methods.base import FROZEN, Trainable, copy_tensors
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.nn.layers import recompute_in_backward
from jpeg_dlm.options import to_dict
from jpeg_dlm.training import optim, sharding
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.metrics import MetricsLog
from jpeg_dlm.util.background import Background
from jpeg_dlm.util.distributed import Ranks, all_mean, barrier, with_precision
from jpeg_dlm.util.errors import CheckpointError, NonFiniteError
from jpeg_dlm.util.rng import derive_seed


def method_state(method: Trainable) -> dict[str, Tensor]:
    """Return all tensors of a method that training changes, by name."""
    return {name: t for name, t in method.state_dict().items() if not name.startswith(FROZEN)}


@contextlib.contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Compute fp32 products on CUDA, such as those over a vocabulary, in TF32 within the block; scoring stays exact."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Launched:
    """A step that the device may still work on: its number, learning rates, and its numbers on their way to the host."""

    def __init__(self, step: int, names: list[str], rates: dict[str, float], values: Tensor) -> None:
        self.step, self.names, self.rates = step, names, rates
        self.values = values.to("cpu", non_blocking=True)  # into pinned memory
        self.event = torch.cuda.Event() if values.is_cuda else None
        if self.event:
            self.event.record()  # later work is not waited for

    def read(self) -> dict[str, float]:
        """Wait for the numbers and return them by name."""
        if self.event:
            self.event.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))


@dataclass
class Trainer:
    """Trains one method. `step` counts finished optimizer steps."""

    config: Config
    method: Trainable
    stream: BatchStream
    run: Path
    ranks: Ranks
    provenance: dict[str, str] = field(default_factory=dict)  # fingerprints of what must be unchanged on resuming
    step: int = 0
    stop_seen: bool = False  # a process was asked to stop during a step that is finished

    def __post_init__(self) -> None:
        self.config = with_precision(self.config, self.ranks.device.type)
        train = self.config.train
        # Layer by layer: equal layers share compiled code, however a method calls its networks.
        for layer in sharding.repeated_layers(self.method):
            if train.checkpoint_layers:
                recompute_in_backward(layer)
            if train.compile:
                layer.compile(dynamic=True)  # the rows of self-conditioning differ from step to step
        if self.ranks.world > 1 and train.sharding == "fsdp":
            sharding.shard(self.method, self.ranks)
        groups = self.method.parameter_groups()
        self.parameters: dict[str, nn.Parameter] = {n: p for g in groups for n, p in g.parameters.items()}
        self.optimizers = optim.build_optimizers(groups, self.method.hidden_matrices(), train)
        self.ema = optim.WeightEma(self.parameters, train.ema, train.ema_warmup)
        self.background = Background()
        self.written: Event | None = None  # set at the end of the last write
        self.wrapped: nn.Module = self.method
        if self.ranks.world > 1 and not isinstance(self.method, FSDPModule):
            # Buffers are computed from global statistics and stay equal, so they need no broadcast at each step.
            # A loss term of weight 0 may leave parameters without gradient; finding them costs a pass over the graph.
            unused = not all(self.method.loss_weights.values())
            self.wrapped = DistributedDataParallel(self.method, broadcast_buffers=False, find_unused_parameters=unused)

    # ------------------------------------------------------------ one step

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step, wait for it, and return its losses, gradient norm and learning rates."""
        return self.finish_step(self.launch_step())

    def launch_step(self, stop: bool = False) -> Launched:
        """Take one optimizer step without waiting for the device; `stop` tells the other processes of a signal.

        A loss or gradient that is not finite leaves weights and optimizer as they are.
        """
        train = self.config.train
        rates = optim.set_learning_rates(self.optimizers, optim.schedule_factor(self.step, train))
        self.method.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with sharding.unsharded(self.method), tf32_products(self.ranks.device):
            totals = self.accumulate()
        totals["stop"] = torch.full((), float(stop), device=self.ranks.device)
        names = sorted(totals)
        means = all_mean(torch.stack([totals[name].float() for name in names]))
        grad_norm = sharding.clip_grad_norm(self.parameters.values(), train.clip)
        values = torch.cat([means, grad_norm.float().view(1)])
        optim.apply_gradients(self.optimizers, values.isfinite().all())
        self.method.after_step(self.step, train.steps)
        self.ema.update(self.step + 1)
        self.step += 1
        return Launched(self.step - 1, [*names, "grad_norm"], rates, values)

    def finish_step(self, launched: Launched) -> dict[str, float]:
        """Wait for a step and return its numbers; record it if it was not finite, then go on or raise an error."""
        stats = launched.read()
        self.stop_seen = stats.pop("stop") > 0
        if not all(map(math.isfinite, stats.values())):
            self._refuse_update(launched.step, stats)
        return stats | launched.rates

    def accumulate(self) -> dict[str, Tensor]:
        """Accumulate the gradients of all micro-batches of a step; return the means of their loss terms."""
        train, totals = self.config.train, {}
        ddp = self.wrapped if isinstance(self.wrapped, DistributedDataParallel) else None
        for micro, (batch, noise) in enumerate(self.stream.micro_batches(self.step)):
            # Dropout draws from the global generator: seeding it per micro-batch makes resumed runs exact.
            torch.manual_seed(derive_seed(train.seed, "dropout", self.step, micro, self.ranks.rank))
            # Gradients are reduced across processes with the last micro-batch only; sharded ones must be every time.
            with ddp.no_sync() if ddp and micro < train.accumulation - 1 else contextlib.nullcontext():
                with self.autocast():
                    losses = self.wrapped(batch, noise)
                    losses["loss"] = self.method.total_loss(losses)
                (losses["loss"] / train.accumulation).backward()
            for name, value in losses.items():
                totals[name] = totals.get(name, 0.0) + value.detach() / train.accumulation
        return totals

    def autocast(self) -> torch.autocast:
        """Return an autocast context, enabled for bf16; networks mark operations that must stay fp32.

        It keeps no casts of weights: before 2.11, torch would reuse those of a pass without gradients, such as
        self-conditioning, in the real pass, which then trains none of these weights.
        """
        enabled = self.config.train.precision == "bf16"
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _refuse_update(self, step: int, stats: dict[str, float]) -> None:
        """Record the batch of a step that was not finite, and go on or stop. All ranks decide alike."""
        rows = [r for micro in range(self.config.train.accumulation) for r in self.stream.row_numbers(step, micro)[1]]
        bad = sorted(name for name, value in stats.items() if not math.isfinite(value))
        path = self.run / f"nonfinite-rank{self.ranks.rank}.jsonl"
        with MetricsLog(path, step - 1) as log:  # drops earlier records of a step that runs again after a kill
            log.log(step, {"bad": bad, "rows": rows})
        if self.config.train.nonfinite == "stop":
            raise NonFiniteError(
                f"{', '.join(bad)} became NaN or infinite at step {step}, which was not applied (rows in '{path}'): "
                "lower the learning rate or continue with --train.nonfinite skip."
            )

    # ------------------------------------------------------------ checkpoints

    def save(self, log: MetricsLog | None = None) -> None:
        """Copy the state of this step to the host; the main process writes it as a checkpoint while training goes on."""
        if self.written:  # first, so that there is one copy at most
            self.background.wait(self.written)
        tensors = {
            "model": method_state(self.method),
            "ema": self.ema.shadow,
            "optimizer": optim.optimizer_state(self.optimizers, self.parameters),
        }
        copies = {name: sharding.host_copies(group, keep=self.ranks.is_main) for name, group in tensors.items()}
        if self.ranks.is_main:
            state: dict[str, Any] = {
                "step": self.step,
                "config": to_dict(self.config),
                "provenance": self.provenance,
                "rows_per_step": self.stream.rows_per_step,
            }

            def write() -> None:
                if log:
                    log.sync()  # resuming from this checkpoint relies on the lines up to its step
                save_checkpoint(self.run, state["step"], copies, state)

            self.written = self.background.start(write)

    def finish_saving(self) -> None:
        """Wait on every process until the last checkpoint is on the disk."""
        self.background.wait()
        barrier()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state of a checkpoint exactly."""
        for name, value in checkpoint.state.get("provenance", {}).items():
            if name in self.provenance and self.provenance[name] != value:
                raise CheckpointError(
                    f"The {name} of this run has changed since '{checkpoint.path}': restore it or start a new run."
                )
        # Batches are addressed by step, so a step must have as many rows as before, on any number of processes.
        before, now = checkpoint.state.get("rows_per_step"), self.stream.rows_per_step
        if before != now:
            raise CheckpointError(
                f"A step of this run has {before} rows but would now have {now}, which would change the order of the data: "
                f"choose --train.batch and --train.accumulation that, times {self.ranks.world} processes, make {before}."
            )
        for own, group in ((method_state(self.method), "model"), (self.ema.shadow, "ema")):
            full = checkpoint.tensors(group)
            copy_tensors(own, {n: sharding.shard_like(t, own.get(n, t)) for n, t in full.items()}, str(checkpoint.path))
        optim.load_optimizer_state(self.optimizers, self.parameters, checkpoint.tensors("optimizer"))
        self.step = checkpoint.step

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights, unsharded on every process, within the block."""
        self.ema.swap()
        try:
            with sharding.unsharded(self.method):
                yield
        finally:
            self.ema.swap()

    def finished_method(self) -> Trainable:
        """Return the method with its averaged weights, unsharded; the trainer must not be used afterwards."""
        self.ema.swap()
        if not isinstance(self.method, FSDPModule):
            return self.method
        method = build_method(self.config, getattr(self.method, "encoder", None)).to(self.ranks.device)
        copy_tensors(method_state(method), sharding.host_copies(method_state(self.method)), "the trained method")
        return method
