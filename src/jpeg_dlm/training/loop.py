"""The training loop: it knows the contract of `methods.base` and nothing of the system it trains."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jpeg_dlm.collectives import all_mean
from jpeg_dlm.config import Config, to_dict
from jpeg_dlm.errors import CheckpointError, NonFiniteError
from jpeg_dlm.methods.base import FROZEN, Method, copy_tensors
from jpeg_dlm.rng import derive_seed
from jpeg_dlm.training.checkpoint import (
    Checkpoint,
    load_optimizer_tensors,
    optimizer_tensors,
    save_checkpoint,
)
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.dist import Ranks
from jpeg_dlm.training.metrics import MetricsLog
from jpeg_dlm.training.optim import WeightEma, build_optimizer, schedule_factor, set_learning_rates
from jpeg_dlm.training.signals import StopSignal


def method_state(method: Method) -> dict[str, Tensor]:
    """Everything of a method that training changes, by name."""
    return {name: t for name, t in method.state_dict().items() if not name.startswith(FROZEN)}


@dataclass
class Trainer:
    """One run of one method. `step` counts finished optimizer steps."""

    config: Config
    method: Method
    stream: BatchStream
    run: Path
    ranks: Ranks
    provenance: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        train = self.config.train
        groups = self.method.parameter_groups()
        self.parameters: dict[str, nn.Parameter] = {n: p for g in groups for n, p in g.parameters.items()}
        self.optimizer = build_optimizer(groups, train)
        self.ema = WeightEma(self.parameters, train.ema, train.ema_warmup)
        if train.compile:
            # Layer by layer: equal layers share their code, and it does not matter how a method calls its networks.
            for layers in [m for m in self.method.modules() if isinstance(m, nn.ModuleList)]:
                for layer in layers:
                    layer.compile()
        self.wrapped: nn.Module = self.method
        if self.ranks.world > 1:
            # Buffers are kept equal by global statistics, so broadcasting them each step would be waste.
            # A term without weight may leave parameters without gradient; looking for them costs a pass over the graph.
            unused = not all(self.method.loss_weights.values())
            self.wrapped = DistributedDataParallel(self.method, broadcast_buffers=False, find_unused_parameters=unused)

    # ------------------------------------------------------------ one step

    def train_step(self) -> dict[str, float]:
        """One optimizer step, top to bottom."""
        train = self.config.train
        rates = set_learning_rates(self.optimizer, schedule_factor(self.step, train))
        self.method.train()
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        for micro, (batch, noise) in enumerate(self.stream.micro_batches(self.step)):
            last = micro == train.accumulation - 1
            # Dropout draws from the global generator: seeded by its address, a resumed run drops the same.
            torch.manual_seed(derive_seed(train.seed, "dropout", self.step, micro, self.ranks.rank))
            with self._sync_only_on(last), self.autocast():
                losses = self.wrapped(batch, noise)
                losses["loss"] = self.method.total_loss(losses)
                (losses["loss"] / train.accumulation).backward()
            for name, value in losses.items():
                totals[name] = totals.get(name, 0.0) + value.detach() / train.accumulation
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), train.clip)
        stats = self._global_means(totals) | {"grad_norm": float(grad_norm)}
        if all(map(math.isfinite, stats.values())):
            self.optimizer.step()
            self.method.after_step(self.step, train.steps)
            self.ema.update(self.step + 1)
        else:
            self._refuse_update(stats)
        self.step += 1
        return stats | rates

    def autocast(self) -> torch.autocast:
        """bf16 where the config asks for it; networks mark what must stay fp32."""
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")

    def _sync_only_on(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients travel between processes once per step, with the last micro-batch."""
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.wrapped.no_sync()

    def _global_means(self, totals: dict[str, Tensor]) -> dict[str, float]:
        names = sorted(totals)
        return dict(zip(names, all_mean(torch.stack([totals[n].float() for n in names])).tolist(), strict=True))

    def _refuse_update(self, stats: dict[str, float]) -> None:
        """A loss or gradient is not a number: name the batch, and skip or stop. Every rank decides the same."""
        rows = [r for micro in range(self.config.train.accumulation) for r in self.stream.row_numbers(self.step, micro)[1]]
        bad = sorted(name for name, value in stats.items() if not math.isfinite(value))
        path = self.run / f"nonfinite-rank{self.ranks.rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps({"step": self.step, "bad": bad, "rows": rows}) + "\n")
        if self.config.train.nonfinite == "stop":
            raise NonFiniteError(
                f"{', '.join(bad)} stopped being a number at step {self.step}; nothing was updated and the rows are named in "
                f"'{path}': lower the learning rate or continue with --train.nonfinite skip."
            )

    # ------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """A checkpoint of the current step, by the main process; the others wait for it."""
        if self.ranks.is_main:
            tensors = {
                "model": method_state(self.method),
                "ema": self.ema.shadow,
                "optimizer": optimizer_tensors(self.optimizer, self.parameters),
            }
            state = {"step": self.step, "config": to_dict(self.config), "provenance": self.provenance}
            save_checkpoint(self.run, self.step, tensors, state, self.config.train.keep)
        if self.ranks.world > 1:
            torch_dist.barrier()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on exactly where the checkpoint was made."""
        for name, value in checkpoint.state.get("provenance", {}).items():
            if name in self.provenance and self.provenance[name] != value:
                raise CheckpointError(
                    f"The {name} of this run has changed since '{checkpoint.path}': restore it or start a new run."
                )
        copy_tensors(method_state(self.method), checkpoint.tensors("model"), str(checkpoint.path))
        copy_tensors(self.ema.shadow, checkpoint.tensors("ema"), str(checkpoint.path))
        load_optimizer_tensors(self.optimizer, self.parameters, checkpoint.tensors("optimizer"))
        self.step = checkpoint.step

    # ------------------------------------------------------------ the run

    def fit(self, log: MetricsLog | None, stop: StopSignal, tell: Callable[[int, dict[str, float]], None],
            evaluate: Callable[[int], dict[str, float]] | None = None) -> str | None:  # fmt: skip
        """Train to the end or until asked to stop; returns the name of the signal that stopped it."""
        train = self.config.train
        since, rows = time.monotonic(), 0
        while self.step < train.steps and not self._stop_requested(stop):
            stats = self.train_step()
            rows += self.stream.rows_per_step
            if self.step % train.log_every == 0 or self.step == train.steps:
                stats["rows_per_s"] = rows / (time.monotonic() - since)
                since, rows = time.monotonic(), 0
                if log:
                    log.log(self.step, stats)
                tell(self.step, stats)
            due = train.eval_every and (self.step % train.eval_every == 0 or self.step == train.steps)
            if evaluate and due:  # on every process, because the losses of some methods use global statistics
                found = evaluate(self.step)
                if log:
                    log.log(self.step, found)
                tell(self.step, found)
                since, rows = time.monotonic(), 0
            if self.step % train.save_every == 0 or self.step == train.steps:
                self._save_logged(log)
        if self.step < train.steps and self.step % train.save_every:
            self._save_logged(log)
        self.wrapped = self.method  # the distributed model would keep the process group's threads alive
        # Another process may be the one that was asked, and then this one stops with it.
        return stop.requested or ("SIGTERM" if self.step < train.steps else None)

    def _save_logged(self, log: MetricsLog | None) -> None:
        if log:
            log.sync()  # resuming from this checkpoint relies on the lines up to its step
        self.save()

    def _stop_requested(self, stop: StopSignal) -> bool:
        """Whether any process was asked to stop; all leave after the same step."""
        if self.ranks.world == 1:
            return stop.requested is not None
        flag = torch.tensor([float(stop.requested is not None)], device=self.ranks.device)
        torch_dist.all_reduce(flag, op=torch_dist.ReduceOp.MAX)
        return bool(flag.item())
