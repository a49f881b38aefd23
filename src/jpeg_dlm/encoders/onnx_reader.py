"""Read the weights and nodes of an ONNX file from the protobuf wire format, with numpy only.

The `onnx` package would be a heavy dependency for that, and the int8 graph of the pinned encoder also rounds activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm.errors import AssetError

# TensorProto.DataType -> numpy, for the types of weights.
_DTYPES: dict[int, str] = {1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8"}
# Typed storage when raw_data is absent: field number -> (varint or fixed-width format).
_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _RAW_DATA, _DOUBLE_DATA = 4, 5, 7, 9, 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class OnnxNode:
    """One operation of the graph."""

    name: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxGraph:
    """Weights and nodes of the main graph."""

    initializers: dict[str, np.ndarray]
    nodes: tuple[OnnxNode, ...]


def read_onnx(path: Path) -> OnnxGraph:
    """Read the initializers and nodes of the main graph; raise `AssetError` for a damaged or unsupported file."""
    try:
        return _parse_model(path.read_bytes())
    except (OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
        raise AssetError(f"'{path}' is not an ONNX file this reader understands ({error}): fetch it again.") from error


def _parse_model(data: bytes) -> OnnxGraph:
    graphs = [_bytes(value) for field, _, value in _fields(memoryview(data)) if field == 7]
    if len(graphs) != 1:
        raise ValueError(f"{len(graphs)} graphs")
    initializers: dict[str, np.ndarray] = {}
    nodes: list[OnnxNode] = []
    for field, _, value in _fields(graphs[0]):
        if field == 5:
            name, array = _parse_tensor(_bytes(value))
            initializers[name] = array
        elif field == 1:
            nodes.append(_parse_node(_bytes(value)))
    return OnnxGraph(initializers, tuple(nodes))


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the base-128 number at `at` and the position after it."""
    result = shift = 0
    while True:
        byte = data[at]
        result |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return result, at
        if shift > 63:
            raise ValueError("a number longer than 64 bits")


def _signed(value: int) -> int:
    """Convert from 64-bit two's complement, in which protobuf stores int32 and int64."""
    return value - (1 << 64) if value >> 63 else value


def _fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield (field number, wire type, value) of a message; nested messages and strings are memoryviews."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire in (_BYTES, _FIXED32, _FIXED64):
            size = {_FIXED32: 4, _FIXED64: 8}.get(wire, -1)
            if size < 0:
                size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("the file is cut short")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        yield key >> 3, wire, value


def _varints(wire: int, value: Any) -> Iterator[int]:
    """Yield the numbers of a repeated integer field, packed or not."""
    if wire == _VARINT:
        yield _signed(value)
        return
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        yield _signed(number)


def _bytes(value: Any) -> memoryview:
    """Return the content of a message or string; reject a number, which `bytes` would turn into that many zeros."""
    if not isinstance(value, memoryview):
        raise ValueError("found a number instead of a message")
    return value


def _text(value: Any) -> str:
    return bytes(_bytes(value)).decode("utf-8")


def _parse_node(data: memoryview) -> OnnxNode:
    texts = [(field, _text(value)) for field, _, value in _fields(data) if field in (1, 3)]
    names = [text for field, text in texts if field == 3]
    return OnnxNode(names[-1] if names else "", tuple(text for field, text in texts if field == 1))


def _parse_tensor(data: memoryview) -> tuple[str, np.ndarray]:
    shape: list[int] = []
    integers: list[int] = []
    chunks: list[bytes] = []  # fixed-width typed storage, concatenated
    code, name, stored, raw = 0, "", "", None
    for field, wire, value in _fields(data):
        if field == 1:
            shape.extend(_varints(wire, value))
        elif field == 2:
            code = value
        elif field == 8:
            name = _text(value)
        elif field == _RAW_DATA:
            raw = bytes(_bytes(value))
        elif field in (_INT32_DATA, _INT64_DATA):
            integers.extend(_varints(wire, value))
        elif field in (_FLOAT_DATA, _DOUBLE_DATA):
            stored = "<f4" if field == _FLOAT_DATA else "<f8"
            chunks.append(bytes(_bytes(value)))
        elif field == 14 and value:
            raise ValueError(f"tensor '{name}' is stored in another file")
    if code not in _DTYPES:
        raise ValueError(f"tensor '{name:.80}' has the unsupported type {code!r:.40}")
    if any(size < 0 for size in shape):  # numpy would infer it
        raise ValueError(f"tensor '{name:.80}' has a negative size")
    dtype = np.dtype(_DTYPES[code])
    if raw is not None:
        flat = np.frombuffer(raw, dtype)
    elif chunks:
        flat = np.frombuffer(b"".join(chunks), stored).astype(dtype)
    elif code == 10:  # float16 without raw_data stores its bits in int32_data
        flat = np.array(integers, np.uint16).view(np.float16)
    else:
        flat = np.array(integers, np.int64).astype(dtype)
    return name, flat.reshape(shape)
