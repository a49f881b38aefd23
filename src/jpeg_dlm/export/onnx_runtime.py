"""ONNX files in onnxruntime; that package is met here alone."""

from __future__ import annotations

from pathlib import Path

import torch

from jpeg_dlm.errors import MissingPackageError
from jpeg_dlm.export.interface import Opened, not_runnable


def open_onnx(path: Path) -> Opened:
    """A network on the CPU with as many threads as torch has."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError("onnxruntime", "export", "An ONNX model") from error

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    # Between two calls torch computes: threads that wait for work by spinning would take its cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its error types have nothing but Exception in common
        raise not_runnable(path, "onnxruntime", error) from error
    shapes = {i.name: tuple(n if isinstance(n, int) else None for n in i.shape) for i in session.get_inputs()}
    return Opened(lambda arrays: session.run(None, arrays)[0], shapes)  # type: ignore[arg-type] - dense outputs are arrays
