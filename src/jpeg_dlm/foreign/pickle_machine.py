"""Interpret the pickle of a file of `torch.save` without importing or calling what it names.

A pickle is a program for a small stack machine. Here the few names that make tensors and containers are known, and every
other becomes an inert `Foreign`. A restricted `pickle.Unpickler` and `torch.load(weights_only=True)` do not suffice: six bytes
make the first take 64 GB (a high memo index), both hash a key of nested tuples forever, and the second refuses other classes.
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

WORK = 8_000_000  # steps of the machine: a pickled GPT-2 tokenizer takes about one million
MAX_DIMS = 16

STORAGES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip
DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}


@dataclass(eq=False, slots=True)
class Foreign:
    """A name that is not known here, `module.attribute`, or an object that calling it would have made."""

    name: str
    args: Any = field(default=(), repr=False)  # of the call
    state: Any = field(default=None, repr=False)  # what the object would have been given afterwards


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that is still in its file; its numbers were checked against the size of its storage."""

    member: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Storage:
    """A member of raw numbers and how many there are of which type."""

    member: str
    dtype: torch.dtype
    numel: int


class PickleMachine:
    """Interprets a pickle. Loops are impossible in one, so the work is bounded by its length and by `WORK`."""

    def __init__(self, folder: str, sizes: dict[str, int]) -> None:
        self.folder, self.sizes = folder, sizes
        self.stack: list[Any] = []  # since the last mark
        self.outer: list[list[Any]] = []  # the stacks before each mark
        self.memo: dict[int, Any] = {}
        self.work = WORK

    def run(self, program: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(program):
            self.spend(1)
            if opcode.name == "STOP":
                return self.stack.pop()
            if opcode.name in _LITERALS:
                self.stack.append(argument)
            elif opcode.name in _STEPS:
                _STEPS[opcode.name](self, argument)
            else:
                raise ValueError(f"its pickle has the instruction {opcode.name}")
        raise ValueError("its pickle has no end")

    def spend(self, amount: int) -> None:
        self.work -= amount
        if self.work < 0:
            raise ValueError("its pickle is too long")

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def group(self) -> list[Any]:
        """Pop the values since the last mark."""
        if not self.outer:
            raise ValueError("its pickle is inconsistent")
        values, self.stack = self.stack, self.outer.pop()
        return values

    def stack_group(self, make: Callable[[list[Any]], Any]) -> None:
        """Make one value of those since the last mark."""
        values = self.group()
        self.stack.append(make(values))

    def last(self, count: int) -> list[Any]:
        """Pop this many values, the uppermost last."""
        return [self.stack.pop() for _ in range(count)][::-1]

    # ------------------------------------------------------------ containers

    def extend(self, values: list[Any]) -> None:
        """Append to the list on the stack; ignore values of an unknown class."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Foreign):
            raise ValueError("its pickle appends to something that is no list")

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(_alternating(flat))
        elif not isinstance(target, Foreign):
            raise ValueError("its pickle sets items of something that is no dict")

    # ------------------------------------------------------------ names, objects, storages

    def name(self, module: Any, attribute: Any) -> None:
        if not (isinstance(module, str) and isinstance(attribute, str)):
            raise ValueError("its pickle is inconsistent")
        full = f"{module}.{attribute}"
        self.stack.append(DTYPES.get(full) or Foreign(full))

    def call(self, what: Any, args: Any) -> None:
        """Return the result of calling `what` where it is known, else a `Foreign`."""
        name = what.name if isinstance(what, Foreign) else "?"
        make = _CALLS.get(name)
        self.stack.append(make(self, args) if make and isinstance(args, tuple) else Foreign(name, args))

    def build(self, state: Any) -> None:
        """Set the state of an object; containers and tensors need none (a state_dict's is only its version numbers)."""
        target = self.stack[-1]
        if isinstance(target, Foreign):
            target.state = state

    def persistent(self, key: Any) -> None:
        """Push a storage, given as ("storage", type, member, device, length)."""
        kind, storage_type, member, _, numel = key
        dtype = STORAGES.get(storage_type.name) if isinstance(storage_type, Foreign) else None
        if kind != "storage" or not isinstance(member, str) or not re.fullmatch(r"[0-9]+", member):
            raise ValueError("its pickle names a storage wrongly")
        if dtype is None:  # complex, quantized, 8-bit floats: fatal only if such a tensor is wanted
            self.stack.append(storage_type)
            return
        full = self.folder + member
        if not _natural(numel) or self.sizes.get(full) != numel * dtype.itemsize:
            raise ValueError(f"its storage {member} is missing or has another size")
        self.stack.append(_Storage(full, dtype, numel))

    def tensor(self, args: tuple[Any, ...]) -> Any:
        """Return a tensor of (storage, offset, size, stride, ...), with every number within the storage."""
        storage, offset, size, stride = args[:4]
        if not isinstance(storage, _Storage):
            return Foreign("tensor", args)
        if not (isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride) <= MAX_DIMS):
            raise ValueError("a tensor has an impossible shape")
        if not all(_natural(n) for n in (offset, *size, *stride)):
            raise ValueError("a tensor has an impossible shape")
        numel = math.prod(size)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if numel > storage.numel or (numel and last >= storage.numel):
            raise ValueError("a tensor does not fit its storage")
        return StoredTensor(storage.member, storage.dtype, offset, size, stride)

    def mapping(self, args: tuple[Any, ...]) -> Any:
        if not args:
            return {}
        if len(args) != 1 or not isinstance(args[0], (list, tuple)):
            return Foreign("dict", args)
        self.spend(len(args[0]))
        return _pairs(args[0])

    def sequence(self, args: tuple[Any, ...]) -> Any:
        """Return the argument itself: a copy would let a short program fill the memory."""
        return args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else Foreign("sequence", args)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _pairs(items: Iterable[Any]) -> dict[Any, Any]:
    """Return a dict of the plain keys; hashing nested tuples can take forever, and no tensor has such a name."""
    return {key: value for key, value in items if _plain(key)}


def _alternating(flat: list[Any]) -> dict[Any, Any]:
    """Return a dict of keys and values that alternate."""
    return _pairs(zip(flat[::2], flat[1::2], strict=True))


def _plain(key: Any) -> bool:
    return key is None or isinstance(key, (str, bytes, float)) or (isinstance(key, int) and -(1 << 64) < key < 1 << 64)


_LITERALS = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "NONE", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8",
))  # fmt: skip

# Opcodes that pickle's protocols 0 to 5 have; extension codes and out-of-band buffers are refused.
_STEPS: dict[str, Callable[[PickleMachine, Any], Any]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, _: None),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, key: m.stack.append(m.memo[key])),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, key: m.memo.update({key: m.stack[-1]})),
    "MEMOIZE": lambda m, _: m.memo.update({len(m.memo): m.stack[-1]}),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.stack.pop() if m.stack else m.group(),
    "POP_MARK": lambda m, _: m.group(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    **{f"TUPLE{n}": lambda m, _, n=n: m.stack.append(tuple(m.last(n))) for n in (1, 2, 3)},
    "TUPLE": lambda m, _: m.stack_group(tuple),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), lambda m, _: m.stack.append([])),
    **dict.fromkeys(("LIST", "FROZENSET"), lambda m, _: m.stack_group(list)),
    "APPEND": lambda m, _: m.extend(m.last(1)),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda m, _: m.extend(m.group())),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "DICT": lambda m, _: m.stack_group(_alternating),
    "SETITEM": lambda m, _: m.set_items(m.last(2)),
    "SETITEMS": lambda m, _: m.set_items(m.group()),
    "GLOBAL": lambda m, name: m.name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*m.last(2)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m, _: m.call(*m.last(2))),
    "NEWOBJ_EX": lambda m, _: m.call(*m.last(3)[:2]),
    "INST": lambda m, name: m.call(Foreign(name.replace(" ", ".")), tuple(m.group())),
    "OBJ": lambda m, _: m.call(None, tuple(m.group())),
    "BUILD": lambda m, _: m.build(m.stack.pop()),
    "BINPERSID": lambda m, _: m.persistent(m.stack.pop()),
}

_CALLS: dict[str, Callable[[PickleMachine, tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor_v2": lambda m, args: m.tensor(args),
    "torch._utils._rebuild_parameter": lambda m, args: args[0],
    "collections.OrderedDict": lambda m, args: m.mapping(args),
    "builtins.dict": lambda m, args: m.mapping(args),
    "torch.Size": lambda m, args: m.sequence(args),
} | {f"builtins.{name}": lambda m, args: m.sequence(args) for name in ("list", "tuple", "set", "frozenset")}
_CALLS |= {name.replace("builtins", "__builtin__"): make for name, make in _CALLS.items()}  # as protocol 2 names it
