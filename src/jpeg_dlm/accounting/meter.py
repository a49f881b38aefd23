"""Count what is done with tensors, be they real or shapes: multiply-accumulates by torch's own formulas, and bytes alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """Counts within its block; bytes of `weights` do not count, but those that are read are remembered in `read`."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.macs = self.attention = 0  # multiply-accumulates, and those of them that are fused attention
        self.held = self.peak = 0  # bytes alive now, and the most so far
        self.casts = 0  # bytes of weights in another type
        self.read: set[int] = set()  # storages of the weights that took part
        self._weights = {t.untyped_storage()._cdata for t in weights}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would load its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._count(func._overloadpacket, args, kwargs, out)
        own = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)} & self._weights
        self.read |= own
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self._hold(t.untyped_storage(), cast=bool(own) and func is aten._to_copy.default)
        return out

    def _count(self, kind: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if kind is aten._scaled_dot_product_flash_attention_for_cpu:
            flops = sdpa_flop_count(*(t.shape for t in args[:3]))
            self.attention += flops // 2
        elif kind is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            flops = sdpa_backward_flop_count(*(t.shape for t in args[:4]))
            self.attention += flops // 2
        elif kind in flop_registry:
            flops = flop_registry[kind](*args, **kwargs, out_val=out)
        else:
            return
        self.macs += flops // 2

    def _hold(self, storage: torch.UntypedStorage, cast: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._weights:
            return

        def released(_: Any) -> None:
            del self._alive[key]
            self.held -= size
            self.casts -= size if cast else 0

        self._alive[key] = weakref.ref(storage, released)
        self.held += size
        self.casts += size if cast else 0
        self.peak = max(self.peak, self.held)
