"""The systems by name: adding one is its file and a line here."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from jpeg_dlm.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from jpeg_dlm.config import Config
    from jpeg_dlm.methods.base import Method

METHODS = {
    "jpeg-dlm": ("jpeg_dlm.methods.jpeg_dlm", "JpegDlm"),
    "ar": ("jpeg_dlm.methods.ar", "Ar"),
    "mdlm": ("jpeg_dlm.methods.mdlm", "Mdlm"),
    "sedd": ("jpeg_dlm.methods.sedd", "Sedd"),
    "duo": ("jpeg_dlm.methods.duo", "Duo"),
    "elf": ("jpeg_dlm.methods.elf", "Elf"),
    "langflow": ("jpeg_dlm.methods.langflow", "LangFlow"),
    "flm": ("jpeg_dlm.methods.flm", "Flm"),
    "cosmos": ("jpeg_dlm.methods.cosmos", "Cosmos"),
    "cosmos-codec": ("jpeg_dlm.methods.cosmos_codec", "CosmosCodec"),
    "encoder": ("jpeg_dlm.methods.encoder_pretraining", "EncoderPretraining"),
}

# Made from a trained model, so that they are no systems of their own to compare.
STUDENTS = {"distill": ("jpeg_dlm.methods.distill", "Distill"), "finish": ("jpeg_dlm.methods.finish", "Finish")}

STAGES = ("cosmos-codec", "encoder")  # trained for the sake of other systems: they write no text


def method_class(name: str) -> type[Method]:
    """The class of a method, loaded only when it is asked for."""
    known = METHODS | STUDENTS
    if name not in known:
        raise UsageError(f"Unknown method '{name}'; choose one of {', '.join(known)}.")
    module, attribute = known[name]
    return getattr(import_module(module), attribute)


def for_method(base: Config, name: str) -> Config:
    """A preset of JPEG-DLM as the preset of another method: same data and budget, the method's own options."""
    if name == base.method:
        return base
    if name == "encoder":  # its options are in every config
        return replace(base, method=name)
    return method_class(name).adapt(base, name)


def build_method(config: Config, encoder: nn.Module | None = None) -> Method:
    """The method a config names, with weights drawn from its seed; the global random state is left as it was."""
    import torch

    from jpeg_dlm.rng import derive_seed

    cls = method_class(config.method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.train.seed, "init"))
        return cls.from_config(config, encoder)
