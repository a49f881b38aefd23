"""Check the types of arguments of the Python API, and raise a `UsageError` or `DataError` if they do not fit."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.methods.base import FREE


def as_texts(texts: Any) -> list[str]:
    """Return one text or several as a list of strings."""
    several = isinstance(texts, Iterable) and not isinstance(texts, (str, bytes))
    found: list[Any] = list(texts) if several else [texts]
    if not found:
        raise DataError("There is no text: give at least one.")
    for text in found:
        if not isinstance(text, str):
            raise UsageError(f"A text must be a string, not {shown(text)}.")
    return found


def whole_number(value: Any, name: str) -> int:
    """Return a value of any integer type as an int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"`{name}` must be a whole number, not {shown(value)}.") from error


def counts(n: Any, seed: Any, first: Any, batch: Any) -> tuple[int, ...]:
    """Return the numbers of a request for samples as ints."""
    found = tuple(whole_number(v, name) for v, name in ((n, "n"), (seed, "seed"), (first, "first"), (batch, "batch")))
    if found[0] < 1 or found[3] < 1 or found[2] < 0:
        raise UsageError("The number of samples and the batch must be at least 1, the first sample at least 0.")
    return found


def check_tokens(tokens: Any) -> None:
    """Raise `UsageError` unless `tokens` is a tensor with rows of token ids."""
    if not _is_integers(tokens) or tokens.dim() != 2:
        raise UsageError(f"Tokens must be a tensor with rows of token ids, not {shown(tokens)}.")


def check_given(given: Any, rows: int, token_len: int, vocab_size: int) -> None:
    """Raise `UsageError` unless `given` is a row of ids to keep, or one for each sample, with FREE elsewhere."""
    fits = _is_integers(given) and given.shape in ((token_len,), (rows, token_len))
    if not fits or not (given.min() >= FREE and given.max() < vocab_size):
        raise UsageError(
            f"`given` must be a tensor of shape ({token_len},) or ({rows}, {token_len}) of ids below {vocab_size}, and {FREE} "
            f"where it is free, not {shown(given)}."
        )


def real_number(value: Any, name: str, least: float, most: float = math.inf) -> float:
    """Return a finite number between two bounds as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (least <= value <= most and math.isfinite(value)):
        bounds = f"of at least {least:g}" if math.isinf(most) else f"between {least:g} and {most:g}"
        raise UsageError(f"`{name}` must be a number {bounds}, not {shown(value)}.")
    return float(value)


def check_latents(latents: Any, latent_len: int, latent_dim: int) -> None:
    """Raise an error unless `latents` have the right type and shape and are finite."""
    if not isinstance(latents, Tensor) or not latents.is_floating_point():
        raise UsageError(f"Latents must be a tensor of real numbers, as encode returns them, not {shown(latents)}.")
    if latents.dim() != 3 or latents.shape[1:] != (latent_len, latent_dim) or not len(latents):
        raise UsageError(f"Latents must have shape (B, {latent_len}, {latent_dim}), not {tuple(latents.shape)}.")
    if not latents.isfinite().all():
        raise DataError("The latents hold numbers that are not finite: check how they were computed.")


def _is_integers(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def shown(value: Any) -> str:
    """Return a short description of a value by its type, for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"
