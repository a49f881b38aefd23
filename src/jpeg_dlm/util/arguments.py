"""Checks of arguments of the Python API, which raise a `UsageError` or `DataError` that names the argument."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.util.errors import DataError, UsageError


def as_texts(texts: Any) -> list[str]:
    """Return one text or several as a list of strings."""
    values: list[Any] = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, (str, bytes)) else [texts]
    if not values:
        raise DataError("There is no text: give at least one.")
    for text in values:
        if not isinstance(text, str):
            raise UsageError(f"A text must be a string, not {describe(text)}.")
    return values


def whole_number(value: Any, name: str, least: int | None = None) -> int:
    """Return a value of any integer type as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise UsageError(f"`{name}` must be a whole number{bound}, not {describe(value)}.")
    return number


def real_number(value: Any, name: str, least: float, most: float = math.inf) -> float:
    """Return a finite number between two bounds as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (least <= value <= most and math.isfinite(value)):
        raise UsageError(f"`{name}` must be a number from {least:g} to {most:g}, not {describe(value)}.")
    return float(value)


def as_latents(latents: Any, *sizes: int) -> Tensor:
    """Return latents (B, N, D), or those of one text (N, D), of torch or NumPy, as a tensor (B, N, D)."""
    z = torch.tensor(latents.astype(np.float32)) if isinstance(latents, np.ndarray) and latents.dtype.kind == "f" else latents
    if not isinstance(z, Tensor) or not z.is_floating_point():
        raise UsageError(f"Latents must be an array of real numbers, as encode returns them, not {describe(latents)}.")
    z = z[None] if z.dim() == 2 else z
    if z.shape[1:] != sizes or not len(z):
        raise UsageError(f"Latents must have shape (B, {sizes[0]}, {sizes[1]}), not {tuple(latents.shape)}.")
    if not z.isfinite().all():
        raise DataError("The latents hold numbers that are not finite: check how they were computed.")
    return z.float()


def check_fixed(fixed: Any, rows: int, token_len: int, vocab_size: int) -> None:
    """Raise `UsageError` unless `fixed` is a row of ids, or one for each sample, with -1 where it is free."""
    is_ids = isinstance(fixed, Tensor) and fixed.dtype in (torch.int64, torch.int32)
    fits = is_ids and fixed.shape in ((token_len,), (rows, token_len))
    if not fits or not (fixed.min() >= -1 and fixed.max() < vocab_size):
        shapes = f"({token_len},) or ({rows}, {token_len})"
        raise UsageError(f"`fixed` must be a tensor of shape {shapes} of ids below {vocab_size}, or -1, not {describe(fixed)}.")


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise `DataError` if the tokenizer of a text has an id that the model does not have."""
    if max(ids) >= vocab_size:
        raise DataError(f"The text holds the token {max(ids)}, which the model does not know: leave that word out.")


def describe(value: Any) -> str:
    """Return a short description of a value by its type, for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"
