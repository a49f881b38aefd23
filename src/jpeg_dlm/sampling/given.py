"""Text that samples must contain, as a row of ids: a prompt at the beginning, or a template with holes.

A hole is written [MASK] for one token, [MASK:n] for n. All positions after a prompt or a template are free.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.sampling.sampler import rows_of
from jpeg_dlm.text.rows import Layout
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.wording import counted

_HOLE = re.compile(r"\[MASK(?::(\d+))?\]")
# Characters that a tokenizer rarely merges with the text after them: a letter before punctuation, brackets before words.
_BEFORE = ("a", ")", "(", "0")


def prompt_row(tokenizer: TextTokenizer, layout: Layout, text: str) -> Tensor:
    """Return a row (L) that begins with `text`."""
    ids = tokenizer.known_ids(text, "prompt")
    if len(ids) >= layout.payload:
        raise UsageError(
            f"The prompt has {len(ids)} tokens, and a text of this model has {layout.payload}: shorten it, so that "
            "something is left to write."
        )
    return torch.tensor(layout.beginning(ids, FREE))


def template_row(tokenizer: TextTokenizer, layout: Layout, template: str) -> Tensor:
    """Return a row (L) that begins with the template's text and is free in its holes."""
    if not template.strip():
        raise UsageError("The template is empty: write a text with [MASK] or [MASK:n] where tokens are to be filled in.")
    if not _HOLE.search(template):
        raise UsageError("The template has no hole: write [MASK] or [MASK:n] where tokens are to be filled in.")
    holes = sum(map(_size, _HOLE.finditer(template)))
    ids = template_ids(tokenizer, template) if holes <= layout.payload else []
    size = max(holes, len(ids))
    if size > layout.payload:
        raise UsageError(f"The template has {size} tokens or more, and a text of this model has {layout.payload}: shorten it.")
    return torch.tensor(layout.beginning(ids, FREE))


def template_ids(tokenizer: TextTokenizer, template: str) -> list[int]:
    """Return the ids of the text around the holes, with FREE in the holes."""
    ids: list[int] = []
    end = 0
    for hole in _HOLE.finditer(template):
        ids += _piece(tokenizer, template[end : hole.start()], first=end == 0)
        size = _size(hole)
        if size < 1:
            raise UsageError(f"The hole '{hole[0]}' holds no token: write a number of at least 1.")
        ids += [FREE] * size
        end = hole.end()
    return ids + _piece(tokenizer, template[end:], first=False)


def _size(hole: re.Match[str]) -> int:
    """Return the number of tokens in a hole; of a number with more than 9 digits, only these count."""
    return int((hole[1] or "1").lstrip("0")[:9] or 0)


def _piece(tokenizer: TextTokenizer, text: str, first: bool) -> list[int]:
    """Encode a piece of text: at the beginning, after a hole and a space, or right after a hole; refuse unknown words."""
    ids = _piece_ids(tokenizer, text, first) if text.strip() else []
    if tokenizer.unk_id in ids:
        tokenizer.refuse_unknown(text)
    return ids


def _piece_ids(tokenizer: TextTokenizer, text: str, first: bool) -> list[int]:
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


@dataclass
class Decoded:
    """Counts the given tokens that latents themselves decode to; a `watch` for samplers that put the others in place."""

    given: Tensor
    tokens: int = 0
    kept: int = 0
    rows: int = 0

    def __call__(self, step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        if step < steps:
            return
        found = tokens().cpu()
        given_BL = rows_of(self.given, range(self.rows, self.rows + len(found)))
        self.rows += len(found)
        self.tokens += int((given_BL >= 0).sum())
        self.kept += int(((found == given_BL) & (given_BL >= 0)).sum())

    @property
    def sentence(self) -> str:
        """The count in words."""
        rest = "" if self.kept == self.tokens else "; the others were put in their place"
        return f"{self.kept:,} of {counted(self.tokens, 'given token')} are what the latents decode to{rest}."
