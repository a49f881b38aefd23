"""The methods by name: adding one is its file and a line here, or a line in the metadata of another package.

Such a package names the class of its system as an entry point:

    [project.entry-points."jpeg_dlm.systems"]
    mine = "my_package.mine:Mine"

Names are known without torch; a class is loaded when it is asked for. Only what is installed is ever loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from jpeg_dlm.config import Config
from jpeg_dlm.util.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from jpeg_dlm.methods.base import Trainable

# A system can be compared with others; a stage is trained for the sake of a system and writes no text; a student is made
# from a trained model.
Kind = Literal["system", "stage", "student"]


@dataclass(frozen=True)
class Entry:
    """Kind of a method, the place of its class, `module:Class`, and that of its option groups if it needs no torch."""

    kind: Kind
    place: str
    options: str = ""


# Systems in the paper's order; COSMOS is in its Figure 4 instead of Table 1.
METHODS = {
    "ar": Entry("system", "jpeg_dlm.methods.ar:Ar"),
    "mdlm": Entry("system", "jpeg_dlm.methods.masked_diffusion:Mdlm"),
    "sedd": Entry("system", "jpeg_dlm.methods.masked_diffusion:Sedd"),
    "duo": Entry("system", "jpeg_dlm.methods.duo:Duo"),
    "flm": Entry("system", "jpeg_dlm.methods.flm:Flm"),
    "langflow": Entry("system", "jpeg_dlm.methods.langflow:LangFlow"),
    "elf": Entry("system", "jpeg_dlm.methods.elf:Elf"),
    "cosmos": Entry("system", "jpeg_dlm.methods.cosmos:Cosmos"),
    "ldlm": Entry("system", "jpeg_dlm.methods.ldlm:Ldlm"),
    "jpeg-dlm": Entry("system", "jpeg_dlm.methods.jpeg_dlm:JpegDlm", "jpeg_dlm.methods.jpeg_dlm_config:GROUPS"),
    "cosmos-codec": Entry("stage", "jpeg_dlm.methods.cosmos:CosmosCodec"),
    "encoder": Entry("stage", "jpeg_dlm.methods.encoder_pretraining:EncoderPretraining"),
    "distill": Entry("student", "jpeg_dlm.methods.distill:Distill"),
}


@cache
def methods() -> dict[str, Entry]:
    """Return every method by name: those above, then those of installed packages, which cannot replace them."""
    from importlib.metadata import entry_points

    installed = {point.name: Entry("system", point.value) for point in entry_points(group="jpeg_dlm.systems")}
    return METHODS | installed | METHODS


def names(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the methods of these kinds."""
    return tuple(name for name, entry in methods().items() if entry.kind in kinds)


def writes(name: str) -> bool:
    """Return True if a method writes text, as all but stages do."""
    return _entry(name).kind != "stage"


def _entry(name: str) -> Entry:
    known = METHODS if name in METHODS else methods()
    if name not in known:
        raise UsageError(f"Unknown method '{name}'; choose one of {', '.join(known)}, or install the package that has it.")
    return known[name]


def method_class(name: str) -> type[Trainable]:
    """Return the class of a method, loaded only when it is asked for."""
    return resolve_name(_entry(name).place)


def groups_of(name: str) -> dict[str, type]:
    """Return the classes of the option groups `model`, `objective` and `sampler` of a method."""
    options = _entry(name).options
    return dict(resolve_name(options) if options else method_class(name).groups)


def default_config(name: str = "jpeg-dlm", **groups: Any) -> Config:
    """Return the config of a method with the defaults of all options, except the groups given."""
    return Config(method=name, **{group: cls() for group, cls in groups_of(name).items()} | groups)


def for_method(base: Config, name: str) -> Config:
    """Return a preset of JPEG-DLM as the preset of another method: same data and budget, the method's own options."""
    return base if name == base.method else method_class(name).adapt(base, name)


def build_method(config: Config, encoder: nn.Module | None = None) -> Trainable:
    """Build the method a config names, with weights drawn from its seed; the global random state is left as it was."""
    import torch

    from jpeg_dlm.util.rng import derive_seed

    cls: Any = method_class(config.method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.train.seed, "init"))
        return cls(config, encoder) if cls.uses_encoder else cls(config)
