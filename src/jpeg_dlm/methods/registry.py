"""The systems by name: adding one is its file and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from jpeg_dlm.config import Config
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.base import Method
from jpeg_dlm.rng import derive_seed

METHODS = {
    "jpeg-dlm": ("jpeg_dlm.methods.jpeg_dlm", "JpegDlm"),
    "encoder": ("jpeg_dlm.methods.encoder_pretraining", "EncoderPretraining"),
}


def build_method(config: Config, encoder: nn.Module | None = None) -> Method:
    """The method a config names, with weights drawn from its seed; the global random state is left as it was."""
    if config.method not in METHODS:
        raise UsageError(f"Unknown method '{config.method}'; choose one of {', '.join(METHODS)}.")
    module, name = METHODS[config.method]
    cls: Any = getattr(import_module(module), name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.train.seed, "init"))
        return cls.from_config(config, encoder)
