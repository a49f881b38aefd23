"""GGUF model files read with numpy: metadata, and tensors dequantized to fp32.

Only the tensor types that small language models ship in are known: F32, F16, Q8_0, Q4_0 and Q4_1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm.errors import AssetError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4  # of the format
MAX_ALIGNMENT = 1 << 16  # files use 32
QUANT_BLOCK = 32  # values that share a scale in every Q*_0 and Q*_1 type
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """fp16 scale, 32 int8: q * d."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """fp16 scale, 16 bytes of nibbles: (q - 8) * d."""
    return (_nibbles(blocks[:, 2:]) - np.float32(8)) * _half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """fp16 scale, fp16 minimum, 16 bytes of nibbles: q * d + m."""
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Low nibbles are values 0 to 15 of a block, high nibbles 16 to 31."""
    return np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)


@dataclass(frozen=True)
class _Kind:
    """How one tensor type is stored: bytes and values of a block, and how to unpack an array (blocks, bytes)."""

    size: int
    values: int
    unpack: Callable[[np.ndarray], np.ndarray]


_KINDS: Mapping[int, _Kind] = {
    0: _Kind(4, 1, lambda b: b.view("<f4")),
    1: _Kind(2, 1, lambda b: b.view("<f2").astype(np.float32)),
    2: _Kind(18, QUANT_BLOCK, _q4_0),
    3: _Kind(20, QUANT_BLOCK, _q4_1),
    8: _Kind(34, QUANT_BLOCK, _q8_0),
}


@dataclass(frozen=True)
class GgufFile:
    """Metadata by key, and every tensor as fp32 with torch's axis order."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


class _Cursor:
    """Reads little-endian values from a buffer, front to back; running off the end raises struct.error."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.data
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        raw = bytes(self.data[self.at : self.at + size])
        if len(raw) != size:
            raise ValueError("the file is cut short")
        self.at += size
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            if item in (_STRING, _ARRAY):
                return [self.value(item) for _ in range(count)]
            form = f"<{count}{_SCALARS[item][1]}"
            values = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return values
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> GgufFile:
    """The whole file; damage and unknown tensor types are an AssetError."""
    try:
        return _parse(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError, TypeError, KeyError, struct.error, OverflowError, MemoryError, RecursionError) as error:
        raise AssetError(f"'{path}' is not a GGUF file this reader understands ({error}): fetch it again.") from error


def _parse(data: np.ndarray) -> GgufFile:
    cursor = _Cursor(data)
    if bytes(data[:4]) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise ValueError(f"version {version}")
    n_tensors, n_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    infos = []
    for _ in range(n_tensors):
        name = cursor.string()
        # Axes are stored fastest first, the reverse of torch and numpy.
        shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))[::-1]
        infos.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"alignment {alignment!r:.40}")
    start = -(-cursor.at // alignment) * alignment
    # Tensors that shared bytes would let a small file ask for any amount of memory.
    if len({name for name, *_ in infos}) != n_tensors or sum(_stored_bytes(*info[:3]) for info in infos) > data.size - start:
        raise ValueError("its tensors are named twice or larger than the file")
    return GgufFile(metadata, {name: _tensor(data, start + at, name, shape, kind) for name, shape, kind, at in infos})


def _stored_bytes(name: str, shape: tuple[int, ...], code: int) -> int:
    if code not in _KINDS or len(shape) > MAX_DIMS:
        raise ValueError(f"tensor '{name:.80}' has the unsupported type {code} or {len(shape)} axes")
    blocks, rest = divmod(math.prod(shape), _KINDS[code].values)
    if rest:
        raise ValueError(f"tensor '{name:.80}' is cut inside a block")
    return blocks * _KINDS[code].size


def _tensor(data: np.ndarray, at: int, name: str, shape: tuple[int, ...], code: int) -> np.ndarray:
    size, kind = _stored_bytes(name, shape, code), _KINDS[code]
    if at + size > data.size:
        raise ValueError(f"tensor '{name:.80}' does not fit the file")
    raw = np.array(data[at : at + size]).reshape(-1, kind.size)
    return np.ascontiguousarray(kind.unpack(raw), np.float32).reshape(shape)
