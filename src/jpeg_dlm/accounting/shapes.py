"""Run a method on shapes alone: floating-point tensors with two or more axes are on the meta device, without values.

Integers, masks and vectors stay real, because a method chooses rows and positions by them. `Kernels` casts and attends as
torch does on a CPU, because autocast and fused attention do not exist on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from jpeg_dlm.rng import Law, RowNoise, generator

aten = torch.ops.aten
CAST = {  # what autocast runs in bf16, of what the networks use
    F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__,
    Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm,
}  # fmt: skip


@contextmanager
def shapes_only() -> Iterator[Kernels]:
    """Within the block, large tensors are shapes."""
    with Shapes(), Kernels() as kernels:
        yield kernels


class Shapes(TorchDispatchMode):
    """Keep real what is computed from real tensors alone; whatever a shape takes part in is a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, list[Any]] = {}  # outputs by operation and inputs: layers repeat, and torch takes its time

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would load its compiler

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
        return func(*args, **kwargs) if func.is_view else self.computed(func, args, kwargs)

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what `func` returns, in new tensors."""
        key = func, _key(args), _key(tuple(kwargs.items()))
        if key not in self.known:
            out = func(*args, **kwargs)
            many = isinstance(out, (tuple, list))
            if func is not aten._unsafe_view.default and all(isinstance(t, Tensor) for t in (out if many else [out])):
                self.known[key] = [many, *(_sizes(t) for t in (out if many else [out]))]
            return out
        many, *sizes = self.known[key]
        made = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in sizes]
        return tuple(made) if many else made[0]


def _sizes(t: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return t.shape, t.stride(), t.dtype


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _sizes(x)
    return tuple(_key(part) for part in x) if isinstance(x, (list, tuple)) else x


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


class Kernels(TorchFunctionMode):
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
        found = self.cast.get(id(t))
        if found is None or (torch.is_grad_enabled() and not found.requires_grad):
            found = self.cast[id(t)] = t.to(torch.bfloat16)
        return found


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:  # fmt: skip
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
