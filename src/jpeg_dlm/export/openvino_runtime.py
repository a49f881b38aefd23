"""OpenVINO's own files and runtime; that package is met here alone."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jpeg_dlm.errors import MissingPackageError
from jpeg_dlm.export.interface import Opened, not_runnable

TELEMETRY = "openvino_telemetry"


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    """Importing openvino reports to its makers over the network and leaves files at home, unless this package is absent."""
    known = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment] - how Python spells a package that cannot be imported
    try:
        yield
    finally:
        del sys.modules[TELEMETRY]
        if known is not None:
            sys.modules[TELEMETRY] = known


class SignalStack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextlib.contextmanager
def same_signal_stack() -> Iterator[None]:
    """OpenVINO gives this thread a stack for signals and frees it later: the next Ctrl-C would crash the process (measured)."""
    if sys.platform != "linux":
        yield
        return
    sigaltstack, before = ctypes.CDLL(None).sigaltstack, SignalStack()
    sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        sigaltstack(ctypes.byref(before), None)


def _openvino() -> Any:
    try:
        with _without_telemetry():
            import openvino
    except ImportError as error:
        raise MissingPackageError("openvino", "export", "An OpenVINO model") from error
    return openvino


def convert_onnx(source: Path, path: Path) -> None:
    """An ONNX file as `path` (.xml) and the weights beside it (.bin), in full precision."""
    openvino = _openvino()
    openvino.save_model(openvino.Core().read_model(source), path, compress_to_fp16=False)


def open_openvino(path: Path) -> Opened:
    """A network on the CPU with as many threads as torch has, in fp32 also where the machine has a faster type."""
    openvino = _openvino()
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    try:
        with same_signal_stack():
            compiled = openvino.Core().compile_model(path, "CPU", options)
    except RuntimeError as error:
        raise not_runnable(path, "OpenVINO", error) from error
    shapes = {
        port.get_any_name(): tuple(None if n.is_dynamic else n.get_length() for n in port.get_partial_shape())
        for port in compiled.inputs
    }
    return Opened(lambda arrays: compiled(arrays)[0], shapes)
