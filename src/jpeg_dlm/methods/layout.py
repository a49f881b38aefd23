"""Tensors of checkpoints: recognizing the authors' own files, reading sizes from them, and filling a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jpeg_dlm.util.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointSignature:
    """Facts about the authors' own checkpoints of a system: how to recognize and read them."""

    algo: tuple[str, ...] = ()  # its names in config.algo.name of Lightning's hyperparameters (Duo, FLM)
    parameterization: str = ""  # its name in config.parameterization there (MDLM)
    hub: str = ""  # its name in model_type, architectures or auto_map of a config on the Hugging Face hub
    keys: frozenset[str] = frozenset()  # keys that its config alone has
    tensors: tuple[str, ...] = ()  # names, or their ends, of tensors that it has
    fixed: Mapping[tuple[str, ...], str | bool] = field(default_factory=dict)  # must hold where it is said: no variant of it
    not_in_tensors: tuple[str, ...] = ("data.token_len", "model.heads")  # options that leave no trace in the tensors
    preset: str = "owt1024"  # where options start from, unless the vocabulary is BERT's


def shapes_of(tensors: Mapping[str, Tensor], layout: str) -> Callable[..., tuple[int, ...]]:
    """Return a function that looks up the shape of a tensor by name, and refuses one that is missing, empty or misshapen."""

    def shape(name: str, dims: int = 2) -> tuple[int, ...]:
        if name not in tensors:
            raise CheckpointError(f"The file is not in {layout}: it lacks the tensor '{name}'.")
        sizes = tuple(tensors[name].shape)
        if len(sizes) != dims or 0 in sizes:
            raise CheckpointError(f"The file is not in {layout}: '{name}' has the shape {sizes}.")
        return sizes

    return shape


def repeated(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of layers whose tensors are named PREFIX.NUMBER.REST."""
    return len({name[len(prefix) + 1 :].partition(".")[0] for name in tensors if name.startswith(f"{prefix}.")})


@torch.no_grad()
def copy_tensors(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], origin: str) -> None:
    """Fill `own` in place; missing, extra and misshapen tensors are refused before anything changes."""
    for problem, wrong in (("lacks", own.keys() - tensors.keys()), ("has the unknown", tensors.keys() - own.keys())):
        if wrong:
            raise CheckpointError(
                f"'{origin}' {problem} tensor '{min(wrong)}' (one of {len(wrong)}): it is of another model or method."
            )
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape or own[name].is_floating_point() != tensor.is_floating_point():
            has, needs = (f"{tuple(t.shape)} of {t.dtype}" for t in (tensor, own[name]))
            raise CheckpointError(f"'{origin}' has {has} for '{name}' where its config needs {needs}: restore the two.")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
