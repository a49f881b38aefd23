"""Parameters, operations and memory of any method, measured while it trains or samples on shapes alone.

Floating-point tensors with two or more axes are on the meta device, without values. Integers, masks and vectors stay real,
because a method chooses rows and positions by them. One multiply-accumulate is one operation, as in the paper's "sampling
compute".
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from jpeg_dlm.config import Config
from jpeg_dlm.methods.base import Batch, Method, Trainable
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.util.rng import Law, RowNoise, generator

PLACES = (0.25, 0.75)  # of a training, at which a step is measured: some methods change their steps on the way
aten = torch.ops.aten
# What autocast runs in bf16, of what the networks use.
CAST = {F.linear, torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm}
ATTENTION = {  # the fused kernels of a CPU, which torch does not count
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[aten._scaled_dot_product_flash_attention_backward],
}


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


def planned_precision(config: Config) -> str:
    """Return the type of training on the GPUs that a plan is made for."""
    return "fp32" if config.train.precision == "fp32" else "bf16"


@dataclass(frozen=True)
class TrainingCost:
    """Operations of one row, forward and backward, and the bytes of a micro-batch beside weights and gradients."""

    forward: float  # networks without gradient included
    backward: float  # layers and logits that are computed again included
    activations: int  # at the peak, with weights in bf16


def training_cost(config: Config, rows: int) -> TrainingCost:
    """Measure a micro-batch whose features are given."""
    from jpeg_dlm.nn.layers import recompute_in_backward
    from jpeg_dlm.training.sharding import repeated_layers  # loads FSDP, which counting parameters does not need

    costs = []
    with shapes_only() as kernels:
        method = build_method(config).train()
        for module in method.modules():  # vectors too, since their gradients are shapes
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
        for layer in repeated_layers(method) if config.train.checkpoint_layers else ():
            recompute_in_backward(layer)
        for parameter in method.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        for place in PLACES:
            noise = ShapeNoise(0, range(rows), round(place * config.train.steps), place=place)
            costs.append(training_pass(method, config, noise))
            kernels.cast.clear()
    forward, backward = (sum(getattr(cost, name) for cost in costs) / len(costs) for name in ("forward", "backward"))
    return TrainingCost(forward, backward, max(cost.activations for cost in costs))


def training_pass(method: Trainable, config: Config, noise: RowNoise) -> TrainingCost:
    """Measure the step of a method on random tokens and features."""
    rows, data = len(noise.rows), config.data
    tokens_BL = torch.randint(data.vocab_size, (rows, data.token_len))
    features_BLF = torch.randn(*tokens_BL.shape, config.encoder.feature_dim) if method.uses_encoder else None
    own = [t for p in method.parameters() for t in (p, p.grad) if t is not None]
    bf16 = planned_precision(config) == "bf16"
    with CostMeter(own) as meter, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = method.total_loss(method(Batch(tokens_BL, features_BLF=features_BLF), noise))
        forward = meter.macs
        _backward(loss)
    return TrainingCost(forward / rows, (meter.macs - forward) / rows, meter.peak)


def _backward(loss: Tensor) -> None:
    """Run `loss.backward()` so that layers which are computed again pass `MetaKernels`, as `backward` itself would not."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def sampling_macs(config: Config) -> int:
    """Count the operations of one text; solver steps cost the same, so runs of one and two steps suffice."""
    steps = getattr(config.sampler, "steps", 0)
    if steps > 2:
        one, two = (sampling_macs(replace(config, sampler=replace(config.sampler, steps=n))) for n in (1, 2))
        return one + (steps - 1) * (two - one)
    with shapes_only(), CostMeter() as meter:
        cast(Method, build_method(config)).eval().sample(config.sampler, ShapeNoise(0, range(1)))
    return meter.macs


# ---------------------------------------------------------------- tensors without values


@contextmanager
def shapes_only() -> Iterator[MetaKernels]:
    """Within the block, large tensors are shapes."""
    with ShapesOnly(), MetaKernels() as kernels:
        yield kernels


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would load its compiler


class ShapesOnly(_Mode):
    """Keep real what is computed from real tensors alone; whatever a shape takes part in is a shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [
            t for x in (*args, *kwargs.values()) for t in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(t, Tensor)
        ]
        if not tensors:
            return _made(func, args, kwargs)
        if not any(t.is_meta for t in tensors):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return kwargs["out"] if "out" in kwargs else args[0]  # values change, which there are none of
        if func is aten._local_scalar_dense.default and tensors[0].dtype == torch.bool:
            return True  # a check of values that are not there, such as whether they are finite, passes
        if func is aten.index.Tensor:
            args = (args[0], [part for index in args[1] for part in _positions(index)])
        elif func is aten.masked_select.default and not args[1].is_meta:
            chosen = int(args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
            return args[0].new_empty(chosen)
        elif func is aten.masked_scatter_backward.default:
            return args[0].new_empty(args[2])
        kwargs = kwargs | {name: value for name, value in (("generator", None), ("device", "meta")) if kwargs.get(name)}
        if not all(t.is_meta for t in tensors):
            args, kwargs = (tree_map_only(Tensor, _shape, x) for x in (args, kwargs))
        return func(*args, **kwargs)


def _shape(t: Tensor) -> Tensor:
    return t if t.is_meta else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a new tensor: a shape if it is a matrix of floats."""
    if "device" not in kwargs:
        return func(*args, **kwargs)
    made = func(*args, **(kwargs | {"device": "meta"} | ({"generator": None} if "generator" in kwargs else {})))
    return made if made.ndim > 1 and made.is_floating_point() else func(*args, **kwargs)


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """A mask whose values are known, as the positions that it chooses."""
    if index is None or index.is_meta or index.dtype != torch.bool:
        return [index]
    return list(index.nonzero().unbind(1))


class MetaKernels(TorchFunctionMode):
    """Autocast and attention of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: dict[int, Tensor] = {}  # weights in bf16, which autocast keeps until a pass ends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attention = func is F.scaled_dot_product_attention
        if (attention or func in CAST) and any(isinstance(x, Tensor) and x.is_meta for x in args):
            if torch.is_autocast_enabled("cpu"):
                args, kwargs = (tree_map_only(Tensor, self.lower, x) for x in (args, kwargs))
            if attention:
                return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def lower(self, t: Tensor) -> Tensor:
        if t.dtype != torch.float32:
            return t
        if not (t.requires_grad and t.is_leaf):
            return t.to(torch.bfloat16)
        lowered = self.cast.get(id(t))
        if lowered is None or (torch.is_grad_enabled() and not lowered.requires_grad):
            lowered = self.cast[id(t)] = t.to(torch.bfloat16)
        return lowered


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """The fused kernel of a CPU, which keeps no scores; those of GPUs keep the same tensors."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(q.dtype)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask=attn_mask)[0]


@dataclass(frozen=True)
class ShapeNoise(RowNoise):
    """Numbers of rows are spread evenly over [0, 1), one of a whole batch lies at `place`, and larger noise is a shape."""

    place: float = 0.5

    def _draw(self, law: Law, purpose: str, shape: tuple[int, ...]) -> Tensor:
        rows = len(self.rows) * self.copies
        if len(shape) > 1:
            return torch.empty(rows, *shape)
        if not shape and law == "uniform":
            order = torch.randperm(rows, generator=generator(self.seed, purpose, self.step))
            return (order + self.place) / rows
        return super()._draw(law, purpose, shape)


class CostMeter(_Mode):
    """Counts multiply-accumulates and bytes within its block; bytes of `weights` do not count."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.macs = 0
        self.held = self.peak = 0  # bytes alive now, and the most so far
        self._weights = {t.untyped_storage()._cdata for t in weights}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func._overloadpacket
        if count := ATTENTION.get(kind) or flop_registry.get(kind):
            self.macs += count(*args, **kwargs, out_val=out) // 2
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self._hold(t.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._weights:
            return

        def released(_: Any) -> None:
            del self._alive[key]
            self.held -= size

        self._alive[key] = weakref.ref(storage, released)
        self.held += size
        self.peak = max(self.peak, self.held)
