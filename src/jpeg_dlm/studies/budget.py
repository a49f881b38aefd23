"""An equal training budget for all methods: the same steps, the same tokens, or the same time on this machine."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from jpeg_dlm.accounting.plan import splits
from jpeg_dlm.config import Config
from jpeg_dlm.encoders import FrozenEncoder
from jpeg_dlm.errors import UsageError
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.registry import build_method, method_class
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.loop import Trainer

_UNITS: dict[str, tuple[Literal["steps", "tokens", "seconds"], float]] = {
    "steps": ("steps", 1), "tokens": ("tokens", 1), "s": ("seconds", 1), "min": ("seconds", 60), "h": ("seconds", 3600),
}  # fmt: skip
_FACTORS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}

WARMUP_STEPS, TIMED_STEPS = 3, 10  # of a speed measurement; the median of ten steps is accurate to a few percent (measured)


@dataclass(frozen=True)
class Budget:
    """Training budget of every method; `text` is the form in which it was given."""

    kind: Literal["steps", "tokens", "seconds"]
    amount: float
    text: str


def parse_budget(text: str) -> Budget:
    """Parse '2000steps', '5Mtokens' or '10min', with or without a space or dash before the unit."""
    match = re.fullmatch(r"([0-9.]+)\s*([kMB]?)[\s-]*(steps|tokens|s|min|h)", text.strip())
    try:
        if match is None:
            raise ValueError
        number = float(match[1]) * _FACTORS[match[2]]
    except ValueError as error:
        raise UsageError(f"A budget is a number and a unit such as 2000steps, 5Mtokens or 10min, not '{text}'.") from error
    kind, factor = _UNITS[match[3]]
    if number * factor <= 0:
        raise UsageError("A budget must be positive.")
    return Budget(kind, number * factor, text)


def parse_tokens(text: str) -> tuple[Budget, ...]:
    """Parse increasing numbers of tokens, such as '1M,2M,4M'."""
    try:
        budgets = tuple(parse_budget(f"{part.strip()}tokens") for part in text.split(","))
    except UsageError as error:
        raise UsageError(f"Give numbers of tokens with commas between them, as in 1M,2M,4M, not '{text}'.") from error
    if any(a.amount >= b.amount for a, b in pairwise(budgets)):
        raise UsageError(f"Numbers of tokens must increase, as in 1M,2M,4M, not '{text}'.")
    return budgets


def spend(config: Config, budget: Budget | None, seconds_per_step: Callable[[Config], float]) -> Config:
    """Set the steps that the budget allows; a method with two stages spends half of it on each. None changes nothing."""
    if budget is None:
        return config
    stage = method_class(config.method).first_stage(config)
    share = 1.0 if stage is None else 0.5

    def steps(of: Config) -> int:
        tokens = step_rows(of) * of.data.token_len
        cost = {"steps": lambda: 1.0, "tokens": lambda: tokens, "seconds": lambda: seconds_per_step(of)}
        return max(1, round(share * budget.amount / cost[budget.kind]()))

    if stage is not None:
        config = method_class(config.method).with_stage_steps(config, steps(stage))
    total = steps(config)
    half, quarter = -(-total // 2), -(-total // 4)  # rounded up: the last evaluation and save are at the end
    return replace(config, train=replace(config.train, steps=total, eval_every=half, save_every=quarter))


def step_rows(config: Config) -> int:
    """Rows of an optimizer step on the devices that a config is meant for."""
    return config.train.batch * config.train.accumulation * config.train.devices


def split_rows(config: Config, world: int) -> Config:
    """Return the config with as many rows of a step, split over `world` processes in micro-batches that are not larger."""
    each, left = divmod(step_rows(config), world)
    if left:
        raise UsageError(
            f"A step of {config.method} has {step_rows(config)} rows, which {world} processes cannot split evenly: "
            "start another number of them, or set --train.batch."
        )
    batch = splits(each, config.train.batch)[0]
    return replace(config, train=replace(config.train, batch=batch, accumulation=each // batch, devices=world))


def all_steps(config: Config) -> int:
    """Optimizer steps of a method and of its first stage."""
    stage = method_class(config.method).first_stage(config)
    return config.train.steps + (stage.train.steps if stage else 0)


def measure_step(config: Config, blocks: Blocks, encoder: FrozenEncoder | None, ranks: Ranks) -> float:
    """Return the median seconds of an optimizer step of a new model, which is discarded."""
    method = build_method(config, encoder).to(ranks.device)
    stream = BatchStream(blocks, config.train, ranks.device, ranks.rank, ranks.world)
    spent = []
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(config, method, stream, Path(scratch), ranks)
        for _ in range(WARMUP_STEPS + TIMED_STEPS):
            began = time.perf_counter()
            trainer.train_step()  # copies the losses to the CPU, so it waits for a GPU
            spent.append(time.perf_counter() - began)
    return statistics.median(spent[WARMUP_STEPS:])
