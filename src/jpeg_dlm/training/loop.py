"""The training loop: it depends on `methods.base.Trainable` only, not on any particular method."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.errors import CheckpointError, NonFiniteError
from jpeg_dlm.folders.checkpoint import Checkpoint, host_copies, save_checkpoint
from jpeg_dlm.machine.background import Background
from jpeg_dlm.machine.collectives import all_mean, barrier
from jpeg_dlm.machine.cpu import instruction_limit
from jpeg_dlm.machine.dist import Ranks, step_timeout
from jpeg_dlm.methods.base import FROZEN, Trainable, copy_tensors
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.nn.recompute import recompute_in_backward
from jpeg_dlm.rng import derive_seed
from jpeg_dlm.sampling.speeds import with_precision
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.lifeline import Lifeline
from jpeg_dlm.training.metrics import MetricsLog
from jpeg_dlm.training.optim import WeightEma, build_optimizer, schedule_factor, set_learning_rates
from jpeg_dlm.training.optimizer_state import load_optimizer_tensors, optimizer_tensors
from jpeg_dlm.training.sharding import (
    average_unsharded,
    clip_grad_norm,
    divided,
    gathered,
    is_sharded,
    repeated_layers,
    shard,
    unsharded,
)
from jpeg_dlm.training.signals import StopSignal


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


class HostCopy:
    """Numbers of a device on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.to("cpu", non_blocking=True)  # into pinned memory
        self.event = torch.cuda.Event() if values.is_cuda else None
        if self.event:
            self.event.record()  # later work is not waited for

    def read(self) -> list[float]:
        if self.event:
            self.event.synchronize()
        return self.values.tolist()


@dataclass(frozen=True)
class Launched:
    """A step that the device may still work on: its number, and its numbers by name."""

    step: int
    names: tuple[str, ...]
    rates: dict[str, float]
    values: HostCopy


@dataclass
class Trainer:
    """Trains one method. `step` counts finished optimizer steps."""

    config: Config
    method: Trainable
    stream: BatchStream
    run: Path
    ranks: Ranks
    provenance: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    stop_at: int | None = None  # the step after which to save and stop, as on a signal
    stop_seen: bool = False  # a process was asked to stop during a step that is finished

    def __post_init__(self) -> None:
        self.config = with_precision(self.config, self.ranks.device.type)
        train = self.config.train
        self._prepare_layers()
        if self.ranks.world > 1 and train.sharding == "fsdp":
            shard(self.method, self.ranks)
        groups = self.method.parameter_groups()
        self.parameters: dict[str, nn.Parameter] = {n: p for g in groups for n, p in g.parameters.items()}
        self.optimizer = build_optimizer(groups, train)
        self.ema = WeightEma(self.parameters, train.ema, train.ema_warmup)
        self.background = Background()
        self.written: Event | None = None  # set at the end of the last write
        self.wrapped: nn.Module = self.method
        if self.ranks.world > 1 and not is_sharded(self.method):
            # Buffers are computed from global statistics and stay equal, so they need no broadcast at each step.
            # A loss term of weight 0 may leave parameters without gradient; finding them costs a pass over the graph.
            unused = not all(self.method.loss_weights.values())
            self.wrapped = DistributedDataParallel(self.method, broadcast_buffers=False, find_unused_parameters=unused)

    def _prepare_layers(self) -> None:
        """Checkpoint and compile layer by layer: equal layers share compiled code, however a method calls its networks."""
        for layer in repeated_layers(self.method):
            if self.config.train.checkpoint_layers:
                recompute_in_backward(layer)
            if self.config.train.compile:
                layer.compile(dynamic=True)  # the rows of self-conditioning differ from step to step

    # ------------------------------------------------------------ one step

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step, wait for it, and return its losses, gradient norm and learning rates."""
        return self.finish_step(self.launch_step())

    def launch_step(self, stop: bool = False) -> Launched:
        """Take one optimizer step without waiting for the device; `stop` tells the other processes of a signal.

        A loss or gradient that is not finite leaves weights and optimizer as they are; the device decides that.
        """
        train = self.config.train
        rates = set_learning_rates(self.optimizer, schedule_factor(self.step, train))
        self.method.train()
        self.optimizer.zero_grad(set_to_none=True)
        with unsharded(self.method), tf32_products(self.ranks.device):
            totals = self._accumulate()
        if is_sharded(self.method):
            average_unsharded(self.parameters.values())
        totals["stop"] = torch.full((), float(stop), device=self.ranks.device)
        names = sorted(totals)
        means = all_mean(torch.stack([totals[name].float() for name in names]))
        grad_norm = clip_grad_norm(self.parameters.values(), train.clip)
        values = torch.cat([means, grad_norm.float().view(1)])
        self.optimizer.found_inf = values.isfinite().all().logical_not().float()  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        self.method.after_step(self.step, train.steps)
        self.ema.update(self.step + 1)
        self.step += 1
        return Launched(self.step - 1, (*names, "grad_norm"), rates, HostCopy(values))

    def finish_step(self, launched: Launched) -> dict[str, float]:
        """Wait for a step and return its numbers; record it if it was not finite, then go on or raise an error."""
        stats = dict(zip(launched.names, launched.values.read(), strict=True))
        self.stop_seen = stats.pop("stop") > 0
        if not all(map(math.isfinite, stats.values())):
            self._refuse_update(launched.step, stats)
        return stats | launched.rates

    def _accumulate(self) -> dict[str, Tensor]:
        """Accumulate the gradients of all micro-batches of a step; return the means of their loss terms."""
        train, totals = self.config.train, {}
        for micro, (batch, noise) in enumerate(self.stream.micro_batches(self.step)):
            last = micro == train.accumulation - 1
            # Dropout draws from the global generator: seeding it per micro-batch makes resumed runs exact.
            torch.manual_seed(derive_seed(train.seed, "dropout", self.step, micro, self.ranks.rank))
            with self._sync_only_on(last):
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

    def _sync_only_on(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Reduce gradients across processes with the last micro-batch only; sharded gradients must be reduced every time."""
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.wrapped.no_sync()

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
            "optimizer": optimizer_tensors(self.optimizer, self.parameters),
        }
        if is_sharded(self.method):  # checkpoints do not depend on the number of processes
            tensors = {name: gathered(group, keep=self.ranks.is_main) for name, group in tensors.items()}
        elif self.ranks.is_main:
            tensors = host_copies(tensors)
        if self.ranks.is_main:
            state = {
                "step": self.step,
                "config": to_dict(self.config),
                "provenance": self.provenance,
                "rows_per_step": self.stream.rows_per_step,
                "instruction_limit": instruction_limit(),
            }
            self.written = self.background.start(partial(self._write, tensors, state, log))

    def _write(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], log: MetricsLog | None) -> None:
        if log:
            log.sync()  # resuming from this checkpoint relies on the lines up to its step
        save_checkpoint(self.run, state["step"], tensors, state, self.config.train.keep)

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
        self._check_rows(checkpoint)
        state, origin = method_state(self.method), str(checkpoint.path)
        copy_tensors(state, divided(checkpoint.tensors("model"), state), origin)
        copy_tensors(self.ema.shadow, divided(checkpoint.tensors("ema"), self.ema.shadow), origin)
        slots = checkpoint.tensors("optimizer")
        owners = {key: self.parameters.get(key.partition("/")[2]) for key in slots}
        same = {key: p for key, p in owners.items() if p is not None and p.shape == slots[key].shape}
        load_optimizer_tensors(self.optimizer, self.parameters, divided(slots, same))
        self.step = checkpoint.step

    def _check_rows(self, checkpoint: Checkpoint) -> None:
        """Check that a step has as many rows as before, on any number of processes: batches are addressed by step."""
        before, now, train = checkpoint.state.get("rows_per_step"), self.stream.rows_per_step, self.config.train
        if before in (None, now):
            return
        each, left = divmod(before, self.ranks.world * train.accumulation)
        remedy = (
            f"continue with --train.batch {each}" if not left
            else f"choose --train.batch and --train.accumulation that, times {self.ranks.world} processes, make {before}"
        )  # fmt: skip
        raise CheckpointError(
            f"A step of this run has {before} rows but would now have {now} ({train.batch} x {train.accumulation} on "
            f"{self.ranks.world} processes), which would change the order of the data: {remedy}."
        )

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights, unsharded on every process, within the block."""
        self.ema.swap()
        try:
            with unsharded(self.method):
                yield
        finally:
            self.ema.swap()

    def finished_method(self) -> Trainable:
        """Return the method with its averaged weights, unsharded; the trainer must not be used afterwards."""
        self.ema.swap()
        if not is_sharded(self.method):
            return self.method
        method = build_method(self.config, getattr(self.method, "encoder", None)).to(self.ranks.device)
        copy_tensors(method_state(method), gathered(method_state(self.method), keep=True), "the trained method")
        return method

    # ------------------------------------------------------------ the run

    def fit(self, log: MetricsLog | None, stop: StopSignal, tell: Callable[[int, dict[str, float]], None],
            evaluate: Callable[[int], dict[str, float]] | None = None) -> str | None:  # fmt: skip
        """Train to the end or until asked to stop; return the name of the signal that stopped it."""
        train = self.config.train

        def due(every: int) -> bool:
            return self.step % every == 0 or self.step == train.steps

        def report(values: dict[str, float]) -> None:
            if log:
                log.log(self.step, values)
            tell(self.step, values)

        with self.background, step_timeout(train.timeout_s), Lifeline(self.ranks):
            since, rows = time.monotonic(), 0
            earlier: Launched | None = None  # read while the device works on the next step
            while self.step < train.steps and not self._stop_requested(stop):
                launched = self.launch_step(stop.requested is not None)
                rows += self.stream.rows_per_step
                if earlier:
                    self.finish_step(earlier)
                earlier = None if self._is_due() else launched
                stats = {} if earlier else self.finish_step(launched)
                if due(train.log_every):
                    report(stats | {"rows_per_s": rows / (time.monotonic() - since)})
                    since, rows = time.monotonic(), 0
                if evaluate and train.eval_every and due(train.eval_every):
                    # On every process, because the losses of some methods use global statistics.
                    report(evaluate(self.step))
                    since, rows = time.monotonic(), 0
                if due(train.save_every):
                    self.save(log)
                    since, rows = time.monotonic(), 0  # rows_per_s is the speed of the steps alone
            if earlier:
                self.finish_step(earlier)
            if not due(train.save_every):
                self.save(log)
            self.finish_saving()
        self.wrapped = self.method  # DistributedDataParallel would keep the process group's threads alive
        # The signal may have reached another process.
        return stop.requested or ("SIGTERM" if self.step < train.steps else None)

    def _is_due(self) -> bool:
        """Return True after a step whose numbers are needed before the next one."""
        train = self.config.train
        every = [train.log_every, train.save_every, *([train.eval_every] if train.eval_every else [])]
        return self.step in (train.steps, self.stop_at) or any(self.step % n == 0 for n in every)

    def _stop_requested(self, stop: StopSignal) -> bool:
        """Return True if any process was asked to stop; all learn it from the same step and stop alike."""
        if self.stop_at is not None and self.step >= self.stop_at:
            return True
        return self.stop_seen if self.ranks.world > 1 else stop.requested is not None
