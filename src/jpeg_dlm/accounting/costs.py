"""Parameters, operations and memory of any method, measured while it trains or samples on shapes alone.

One multiply-accumulate is one operation, as in the paper's "sampling compute". A method that needs values runs on a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from jpeg_dlm.accounting.meter import Meter
from jpeg_dlm.accounting.shapes import ShapeNoise, shapes_only
from jpeg_dlm.config import Config
from jpeg_dlm.evaluation.trial import random_batch
from jpeg_dlm.methods.base import Method, Trainable
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.nn.recompute import recompute_in_backward
from jpeg_dlm.rng import RowNoise

PLACES = (0.25, 0.75)  # of a training, at which a step is measured: some methods change their steps on the way
FEW = (2, 4)  # real rows
SHORT = (1, 2)  # solver steps
NO_VALUES = (NotImplementedError, RuntimeError)  # what torch raises where the value of a shape is asked for

# ---------------------------------------------------------------- parameters


def build_weightless(config: Config) -> Trainable:
    """Return the method with shapes in place of its matrices."""
    with shapes_only():
        return build_method(config)


def parameter_parts(method: Trainable) -> dict[str, int]:
    """Return trainable parameters by top-level part, `total`, and `frozen` ones, such as copies, where there are any."""
    parts: dict[str, int] = {}
    for name, parameter in method.named_parameters():
        part = name.split(".")[0] if parameter.requires_grad else "frozen"
        parts[part] = parts.get(part, 0) + parameter.numel()
    frozen = parts.pop("frozen", 0)
    return parts | {"total": sum(parts.values())} | ({"frozen": frozen} if frozen else {})


# ---------------------------------------------------------------- training


def planned_precision(config: Config) -> str:
    """Return the type of training on the GPUs that a plan is made for."""
    return "fp32" if config.train.precision == "fp32" else "bf16"


@dataclass(frozen=True)
class TrainingCost:
    """Forward and backward of `rows` rows: operations of one of them, and bytes of all beside weights and gradients."""

    rows: int
    forward: float  # networks without gradient included
    backward: float  # layers and logits that are computed again included
    activations: int  # alive after the forward pass
    casts: int  # weights in bf16
    working: int  # what comes and goes beyond these

    @property
    def macs(self) -> float:
        return self.forward + self.backward


def training_cost(
    config: Config, rows: int, recompute: bool = False, places: Sequence[float] = PLACES
) -> TrainingCost:  # fmt: skip
    """Measure a micro-batch whose features are given; `recompute` is gradient checkpointing of every layer."""
    try:
        return _training_cost(config, rows, recompute, places, shapes=True)
    except NO_VALUES:
        few, more = (_training_cost(config, n, recompute, places, shapes=False) for n in FEW)
        share = (rows - few.rows) / (more.rows - few.rows)  # bytes are a constant and a part for each row

        def at(name: str) -> int:
            return round(getattr(few, name) + share * (getattr(more, name) - getattr(few, name)))

        return replace(more, rows=rows, activations=at("activations"), working=max(0, at("working")))


def _training_cost(config: Config, rows: int, recompute: bool, places: Sequence[float], shapes: bool) -> TrainingCost:
    from jpeg_dlm.training.sharding import repeated_layers  # loads FSDP, which counting parameters does not need

    found = []
    with shapes_only() if shapes else nullcontext() as kernels:
        method = build_method(config).train()
        if shapes:
            _without_values(method)
        for layer in repeated_layers(method) if recompute else ():
            recompute_in_backward(layer)
        for parameter in method.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        for place in places:
            found.append(_training_pass(method, config, _noise(rows, shapes, round(place * config.train.steps), place)))
            if kernels is not None:
                kernels.cast.clear()
    means = {name: sum(getattr(cost, name) for cost in found) / len(found) for name in ("forward", "backward")}
    largest = max(found, key=lambda cost: cost.activations + cost.casts + cost.working)
    return replace(largest, **means)


def _training_pass(method: Trainable, config: Config, noise: RowNoise) -> TrainingCost:
    rows, bf16 = len(noise.rows), planned_precision(config) == "bf16"
    batch = random_batch(config, rows, "cpu", method.needs_encoder(config))
    own = [t for p in method.parameters() for t in (p, p.grad) if t is not None]
    with Meter(own) as meter, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = method.total_loss(method(batch, noise))
        forward, casts, activations = meter.macs, meter.casts, meter.held - meter.casts
        _backward(loss)
    working = meter.peak - activations - casts
    return TrainingCost(rows, forward / rows, (meter.macs - forward) / rows, activations, casts, working)


def _backward(loss: Tensor) -> None:
    """Run `loss.backward()` where layers that are computed again pass `Kernels`, which torch leaves out of calls it sees."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _noise(rows: int, shapes: bool, step: int = 0, place: float = 0.5) -> RowNoise:
    return ShapeNoise(0, range(rows), step, place=place) if shapes else RowNoise(0, range(rows), step)


def _without_values(method: nn.Module) -> None:
    """Make shapes of the vectors among the parameters too, since their gradients are shapes."""
    for module in method.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))


# ---------------------------------------------------------------- sampling


@dataclass(frozen=True)
class SamplingCost:
    """One batch of texts: operations of a text, by top-level part too, and bytes in fp32."""

    macs: int
    attention: int  # of these
    parts: dict[str, int]
    weights: int  # that sampling reads
    peak: int  # beside them


def sampling_cost(
    config: Config, rows: int = 1, prepare: Callable[[Method], object] | None = None, given_BL: Tensor | None = None
) -> SamplingCost:
    """Measure a run of the sampler on shapes; `prepare` changes the method before it.

    Solver steps cost the same, so two short runs suffice. Samplers that choose positions by values cannot be measured.
    """
    steps = getattr(config.sampler, "steps", 0)
    if steps <= max(SHORT):
        return _sampling_cost(config, rows, prepare, given_BL)
    few, more = (_sampling_cost(_with_steps(config, n), rows, prepare, given_BL) for n in SHORT)
    longer = (steps - SHORT[0]) // (SHORT[1] - SHORT[0])

    def extended(a: int, b: int) -> int:
        return a + longer * (b - a)

    parts = {name: extended(few.parts[name], more.parts[name]) for name in more.parts}
    return replace(
        more, macs=extended(few.macs, more.macs), attention=extended(few.attention, more.attention), parts=parts
    )  # fmt: skip


def _with_steps(config: Config, steps: int) -> Config:
    stored = getattr(config.sampler, "grid", "") == "stored"  # such a grid has a number of steps of its own
    return replace(config, sampler=replace(config.sampler, steps=steps, **({"grid": "uniform"} if stored else {})))


def _sampling_cost(
    config: Config, rows: int, prepare: Callable[[Method], object] | None, given_BL: Tensor | None
) -> SamplingCost:  # fmt: skip
    parts: dict[str, int] = {}
    with shapes_only():
        method = cast(Method, build_method(config)).eval()
        if prepare is not None:
            prepare(method)
        with Meter([*method.parameters(), *method.buffers()]) as meter:
            for name, child in method.named_children():
                _count_part(child, name, meter, parts)
            method.sample(config.sampler, ShapeNoise(0, range(rows)), given_BL=given_BL)
        weights = sum(p.nbytes for p in method.parameters() if p.untyped_storage()._cdata in meter.read)
    counts = {name: macs // rows for name, macs in parts.items()}
    return SamplingCost(meter.macs // rows, meter.attention // rows, counts, weights, meter.peak)


def _count_part(module: nn.Module, name: str, meter: Meter, parts: dict[str, int]) -> None:
    """Add to `parts` what every call of `module` costs."""

    def begin(*_: Any) -> None:
        parts[name] = parts.get(name, 0) - meter.macs

    def end(*_: Any) -> None:
        parts[name] += meter.macs

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)
