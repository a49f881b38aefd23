"""A small writer of ONNX graphs, node by node, because a trace takes most of a minute at the paper's sizes; imports onnx."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.errors import MissingPackageError, UsageError

OPSET = 20  # the first with Gelu
IR_VERSION = 9  # that of the opset
LARGEST = (1 << 31) - (1 << 20)  # bytes of weights: a protobuf holds less than 2 GiB, nodes included
BATCH = "batch"  # the name of the free size
UNSEEN = -1e9  # added to a score: its exponential is 0, and unlike infinity it makes no NaN


def onnx_package() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise MissingPackageError("onnx", "export", "Exporting to ONNX or OpenVINO") from error
    return onnx


class Graph:
    """Nodes and constants; values are known by their names, which `op` and `constant` give."""

    def __init__(self) -> None:
        self.onnx = onnx_package()
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []

    def input(self, name: str, *sizes: int) -> str:
        """A float input of shape (batch, *sizes)."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, [BATCH, *sizes]))
        return name

    def constant(self, value: Tensor | Sequence[int] | float) -> str:
        """Floats as fp32, sequences of integers as int64."""
        if isinstance(value, Tensor):
            array = value.detach().cpu().float().contiguous().numpy()
        else:
            array = np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
        name = f"c{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output, whose name is returned."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        names = [f"n{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, **attributes))
        return names

    def save(self, path: Path, output: str, name: str, sizes: Sequence[int], integers: bool) -> None:
        """As one file whose only output is the value `output`, called `name`, of shape (batch, *sizes)."""
        if sum(len(constant.raw_data) for constant in self.constants) >= LARGEST:
            raise UsageError("The network is larger than an ONNX file can be, which is 2 GB: use --format safetensors.")
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        self.nodes.append(helper.make_node("Identity", [output], [name]))
        result = helper.make_tensor_value_info(name, kinds.INT64 if integers else kinds.FLOAT, [BATCH, *sizes])
        graph = helper.make_graph(self.nodes, path.stem, self.inputs, [result], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        self.onnx.save(model, path)

    def linear(self, x: str, weight_OI: Tensor, bias_O: Tensor | None = None) -> str:
        y = self.op("MatMul", x, self.constant(weight_OI.T))
        return y if bias_O is None else self.op("Add", y, self.constant(bias_O))

    def rms_norm(self, x: str, gain: Tensor, eps: float) -> str:
        """The last axis scaled to RMS 1 and by a gain, in the form that both runtimes recognize and fuse."""
        square = self.op("Pow", x, self.constant(2.0))
        mean = self.op("ReduceMean", square, self.constant([-1]), keepdims=1)
        unit = self.op("Div", x, self.op("Sqrt", self.op("Add", mean, self.constant(eps))))
        return self.op("Mul", unit, self.constant(gain))

    def unit_rms(self, x: str, width: int, eps: float) -> str:
        """The last axis, of this width, scaled to RMS 1; a norm without a gain would not be fused."""
        return self.rms_norm(x, torch.ones(width), eps)

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def heads(self, x: str, heads: int) -> str:
        """(B, S, heads * C) to (B, heads, S, C)."""
        return self.op("Transpose", self.op("Reshape", x, self.constant([0, 0, heads, -1])), perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str, seen: Tensor | None = None) -> str:
        """softmax(q k^T) v of (B, heads, S, C) over keys that are seen, heads side by side again; the caller scales."""
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        if seen is not None:
            scores = self.op("Add", scores, self.constant(torch.where(seen, 0.0, UNSEEN)))
        y = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.op("Reshape", y, self.constant([0, 0, -1]))

    def split(self, x: str, sizes: Sequence[int]) -> list[str]:
        """Along the last axis."""
        return self.ops("Split", x, self.constant(list(sizes)), outputs=len(sizes), axis=-1)

    def for_each_row(self, value: Tensor, like: str) -> str:
        """A constant (1, S, C) once for each row of `like`."""
        rows = self.op("Shape", like, start=0, end=1)
        shape = self.op("Concat", rows, self.constant(list(value.shape[1:])), axis=0)
        return self.op("Expand", self.constant(value), shape)
