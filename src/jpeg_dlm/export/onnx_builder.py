"""A small writer of ONNX graphs, node by node: a trace takes most of a minute at the paper's sizes and fixes the batch size."""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.util.errors import MissingPackageError, UsageError

OPSET, IR_VERSION = 20, 9  # the first opset with Gelu
LARGEST = (1 << 31) - (1 << 20)  # bytes of weights: a protobuf holds less than 2 GiB, nodes included
BATCH = "batch"  # the name of the free size


def onnx_package(name: str) -> Any:
    """Import a package of the extra `onnx`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(name.split(".")[0], "onnx", "The ONNX backend") from error


class Graph:
    """Nodes and constants; values are known by their names, which `op` and `constant` return."""

    def __init__(self, int8: bool) -> None:
        self.onnx, self.int8 = onnx_package("onnx"), int8
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.quantized: list[str] = []  # names of the products that int8 computes

    def input(self, name: str, *sizes: int) -> str:
        """Add a float input of shape (batch, *sizes)."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, [BATCH, *sizes]))
        return name

    def constant(self, value: Tensor | Sequence[int] | float) -> str:
        """Add floats as fp32, sequences of integers as int64."""
        if isinstance(value, Tensor):
            array = value.detach().cpu().float().contiguous().numpy()
        else:
            array = np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
        name = f"c{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, whose name is that of the node."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        names = [f"n{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, names[0], **attributes))
        return names

    def serialized(self, output: str, name: str, sizes: Sequence[int], integers: bool) -> bytes:
        """Return the graph whose only output is the value `output`, called `name`, of shape (batch, *sizes)."""
        if sum(len(constant.raw_data) for constant in self.constants) >= LARGEST:
            raise UsageError("The network is larger than an ONNX file can be, which is 2 GB: use the torch backend.")
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        self.nodes.append(helper.make_node("Identity", [output], [name]))
        result = helper.make_tensor_value_info(name, kinds.INT64 if integers else kinds.FLOAT, [BATCH, *sizes])
        graph = helper.make_graph(self.nodes, name, self.inputs, [result], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        return quantize(model, self.quantized) if self.int8 else model.SerializeToString()

    def linear(self, x: str, weight_OI: Tensor, bias_O: Tensor | None = None) -> str:
        y = self.op("MatMul", x, self.constant(weight_OI.T))
        return y if bias_O is None else self.op("Add", y, self.constant(bias_O))

    def block_linear(self, x: str, weight_OI: Tensor, bias_O: Tensor, level: bool = True) -> str:
        """A linear that int8 computes; `level`: the rows of x are about equally large.

        ONNX Runtime has one scale for all rows of x, so that others are first divided by their largest value (measured: this
        keeps 98% instead of 94% of the bundled model's tokens).
        """
        scale = ""
        if self.int8 and not level:
            largest = self.op("ReduceMax", self.op("Abs", x), self.constant([-1]), keepdims=1)
            scale = self.op("Max", largest, self.constant(1e-30))
        y = self.linear(self.op("Div", x, scale) if scale else x, weight_OI)
        self.quantized.append(y)
        return self.op("Add", self.op("Mul", y, scale) if scale else y, self.constant(bias_O))

    def rms_norm(self, x: str, gain: Tensor, eps: float) -> str:
        """The last axis scaled to RMS 1 and by a gain, in the form that ONNX Runtime recognizes and fuses."""
        square = self.op("Pow", x, self.constant(2.0))
        mean = self.op("ReduceMean", square, self.constant([-1]), keepdims=1)
        unit = self.op("Div", x, self.op("Sqrt", self.op("Add", mean, self.constant(eps))))
        return self.op("Mul", unit, self.constant(gain))

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def heads(self, x: str, heads: int) -> str:
        """(B, S, heads * C) to (B, heads, S, C)."""
        return self.op("Transpose", self.op("Reshape", x, self.constant([0, 0, heads, -1])), perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str) -> str:
        """softmax(q k^T) v of (B, heads, S, C), heads side by side again; the caller scales."""
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
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


def quantize(model: Any, products: list[str]) -> bytes:
    """Return a graph whose products with these names multiply in int8, with a scale for each output channel of a weight.

    A CPU without VNNI adds two products in 16 bits, which 7-bit weights cannot overflow.
    """
    quantization = onnx_package("onnxruntime.quantization")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        logging.disable(logging.WARNING)  # one line for each product
        try:
            quantization.quantize_dynamic(
                model,
                path,
                op_types_to_quantize=["MatMul"],
                per_channel=True,
                reduce_range=not torch.cpu._is_vnni_supported(),
                weight_type=quantization.QuantType.QInt8,
                nodes_to_quantize=products,
            )
        finally:
            logging.disable(logging.NOTSET)
        return path.read_bytes()
