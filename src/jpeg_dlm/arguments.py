"""Arguments that people give in Python, where nothing has looked at their types: as expected, or one sentence."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.methods.base import FREE


def as_texts(texts: Any) -> list[str]:
    """One text or several as a list."""
    several = isinstance(texts, Iterable) and not isinstance(texts, (str, bytes))
    found: list[Any] = list(texts) if several else [texts]
    if not found:
        raise DataError("There is no text: give at least one.")
    for text in found:
        if not isinstance(text, str):
            raise UsageError(f"A text must be a string, not {shown(text)}.")
    return found


def whole_number(value: Any, name: str) -> int:
    """A number that counts, of whatever integer type."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"`{name}` must be a whole number, not {shown(value)}.") from error


def check_tokens(tokens: Any) -> None:
    """Refuse what is no tensor of rows of token ids."""
    if not _is_integers(tokens) or tokens.dim() != 2:
        raise UsageError(f"Tokens must be a tensor with rows of token ids, not {shown(tokens)}.")


def check_given(given: Any, token_len: int, vocab_size: int) -> None:
    """Refuse what is no row of ids to keep, with FREE elsewhere."""
    fits = _is_integers(given) and given.shape == (token_len,)
    if not fits or not (given.min() >= FREE and given.max() < vocab_size):
        raise UsageError(
            f"`given` must be a tensor of shape ({token_len},) of ids below {vocab_size}, and {FREE} where it is free, "
            f"not {shown(given)}."
        )


def check_latents(latents: Any, latent_len: int, latent_dim: int) -> None:
    """Refuse what no text can have as its latents."""
    if not isinstance(latents, Tensor) or not latents.is_floating_point():
        raise UsageError(f"Latents must be a tensor of real numbers, such as encode gives, not {shown(latents)}.")
    if latents.dim() != 3 or latents.shape[1:] != (latent_len, latent_dim) or not len(latents):
        raise UsageError(f"Latents must have shape (B, {latent_len}, {latent_dim}), not {tuple(latents.shape)}.")
    if not latents.isfinite().all():
        raise DataError("The latents hold numbers that are not finite, which no text has: look at where they come from.")


def _is_integers(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def shown(value: Any) -> str:
    """A value within a sentence, by its type and shortly."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"
