"""Text that samples must contain, as a row of ids: a prompt at the beginning, or a template with holes.

A hole is written [MASK] for one token, [MASK:n] for n. All positions after a prompt or a template are free.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from jpeg_dlm.config import DataConfig
from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.text.tokenizer import TextTokenizer

_HOLE = re.compile(r"\[MASK(?::(\d+))?\]")
# Characters that a tokenizer rarely merges with the text after them: a letter before punctuation, brackets before words.
_BEFORE = ("a", ")", "(", "0")


def prompt_row(tokenizer: TextTokenizer, data: DataConfig, text: str) -> Tensor:
    """Return a row (L) that begins with `text`."""
    ids = tokenizer.encode(text)
    if not ids:
        raise DataError("The prompt is empty: give at least one word.")
    if len(ids) >= payload(data):
        raise UsageError(
            f"The prompt has {len(ids)} tokens, and a text of this model has {payload(data)}: shorten it, so that "
            "something is left to write."
        )
    return _row(tokenizer, data, ids)


def template_row(tokenizer: TextTokenizer, data: DataConfig, template: str) -> Tensor:
    """Return a row (L) that begins with the template's text and is free in its holes."""
    if not _HOLE.search(template):
        raise UsageError("The template has no hole: write [MASK] or [MASK:n] where tokens are to be filled in.")
    ids = template_ids(tokenizer, template)
    if len(ids) > payload(data):
        raise UsageError(f"The template has {len(ids)} tokens, and a text of this model has {payload(data)}: shorten it.")
    return _row(tokenizer, data, ids)


def template_ids(tokenizer: TextTokenizer, template: str) -> list[int]:
    """Return the ids of the text around the holes, with FREE in the holes."""
    ids: list[int] = []
    end = 0
    for hole in _HOLE.finditer(template):
        ids += _piece(tokenizer, template[end : hole.start()], first=end == 0)
        size = int(hole[1] or 1)
        if size < 1:
            raise UsageError(f"The hole '{hole[0]}' holds no token: write a number of at least 1.")
        ids += [FREE] * size
        end = hole.end()
    return ids + _piece(tokenizer, template[end:], first=False)


def _piece(tokenizer: TextTokenizer, text: str, first: bool) -> list[int]:
    """Encode a piece of text: at the beginning, after a hole and a space, or right after a hole."""
    if not text.strip():
        return []
    if first:
        return tokenizer.encode(text)
    if text[0].isspace():
        return tokenizer.encode_batch([text], following=True)[0]
    # Alone, "." would be encoded like a period after a space, so encode it after a character and drop that character's ids.
    for before in _BEFORE:
        lead, whole = tokenizer.encode(before), tokenizer.encode(before + text)
        if whole[: len(lead)] == lead:
            return whole[len(lead) :]
    return tokenizer.encode(text)


def payload(data: DataConfig) -> int:
    """Return the number of text tokens in a row."""
    return data.token_len - (2 if data.frame else 0)


def _row(tokenizer: TextTokenizer, data: DataConfig, ids: list[int]) -> Tensor:
    row = torch.full((data.token_len,), FREE)
    start = 0
    if data.frame:
        if tokenizer.bos_id is None:
            raise DataError("This model needs a tokenizer with a begin token: use the one it was trained with.")
        row[0], start = tokenizer.bos_id, 1
    row[start : start + len(ids)] = torch.tensor(ids)
    return row
