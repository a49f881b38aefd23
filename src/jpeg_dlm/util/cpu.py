"""The name of the CPU, and the precision in which it trains."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jpeg_dlm.config import Config


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the CPU; elsewhere than on Linux, its architecture."""
    with contextlib.suppress(OSError):
        for line in path.read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def training_precision(requested: str, device: str) -> Literal["fp32", "bf16"]:
    """Resolve `train.precision`: 'auto' is bf16 on CUDA (paper), and on a CPU that has instructions for it."""
    import torch

    if requested != "auto":
        return "bf16" if requested == "bf16" else "fp32"
    # Without these instructions bf16 is emulated, many times slower than fp32 (measured).
    return "bf16" if device == "cuda" or (device == "cpu" and torch.cpu._is_avx512_bf16_supported()) else "fp32"


def with_precision(config: Config, device: str) -> Config:
    """Return the config with the training precision for a kind of device."""
    return replace(config, train=replace(config.train, precision=training_precision(config.train.precision, device)))
