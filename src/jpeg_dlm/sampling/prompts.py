"""Text that samples must contain, as a row of ids: a prompt at the beginning, or a template with holes.

A hole is written [MASK] for one token, [MASK:n] for n. All positions after a prompt, and after a hole at the end of a template,
are free; a template that ends with text is the whole text of a row, if rows end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jpeg_dlm.methods.base import FREE
from jpeg_dlm.text.packing import RowLayout
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.util.errors import UsageError, counted

_HOLE = re.compile(r"\[MASK(?::(\d{1,99}))?\]")
# Characters that a tokenizer rarely merges with the text after them: a letter before punctuation, brackets before words.
_BEFORE = ("a", ")", "(", "0")


def prompt_row(tokenizer: TextTokenizer, layout: RowLayout, text: str) -> Tensor:
    """Return a row (L) that begins with `text`."""
    ids = tokenizer.known_ids(text, "prompt")
    if len(ids) >= layout.payload:
        raise UsageError(f"The prompt has {len(ids)} tokens, a text of this model {layout.payload}: shorten it.")
    return torch.tensor(layout.beginning(ids, FREE))


def template_row(tokenizer: TextTokenizer, layout: RowLayout, template: str) -> Tensor:
    """Return a row (L) that begins with the template's text and is free in its holes."""
    holes = [int(hole[1] or 1) for hole in _HOLE.finditer(template)]
    if not holes or not min(holes):
        raise UsageError("The template has no hole, or an empty one: write [MASK] or [MASK:n] where tokens are to be filled.")
    ids = template_ids(tokenizer, template) if sum(holes) <= layout.payload else []
    size = max(sum(holes), len(ids))
    if size > layout.payload:
        raise UsageError(f"The template has {size} tokens or more, a text of this model {layout.payload}: shorten it.")
    if layout.packing == "padded" and ids[-1] != FREE and size < layout.payload:
        ids.append(layout.eos_id)
    return torch.tensor(layout.beginning(ids, FREE))


def template_ids(tokenizer: TextTokenizer, template: str) -> list[int]:
    """Return the ids of the text around the holes, with FREE in the holes; refuse unknown words."""
    ids: list[int] = []
    end = 0
    for hole in _HOLE.finditer(template):
        ids += _piece(tokenizer, template[end : hole.start()], first=end == 0) + [FREE] * int(hole[1] or 1)
        end = hole.end()
    return ids + _piece(tokenizer, template[end:], first=False)


def _piece(tokenizer: TextTokenizer, text: str, first: bool) -> list[int]:
    """Encode a piece of text: at the beginning, after a hole and a space, or right after a hole."""
    if not text.strip():
        return []
    ids = tokenizer.encode(text) if first else tokenizer.encode_batch([text], following=True)[0]
    if not first and not text[0].isspace():
        # Alone, "." would be encoded like a period after a space, so encode it after a character and drop that one's ids.
        pairs = ((tokenizer.encode(before), tokenizer.encode(before + text)) for before in _BEFORE)
        ids = next((whole[len(lead) :] for lead, whole in pairs if whole[: len(lead)] == lead), tokenizer.encode(text))
    if tokenizer.unk_id in ids:
        tokenizer.refuse_unknown(text)
    return ids


def rows_of(fixed: Tensor, rows: slice) -> Tensor:
    """Return these rows of (n, L), or a copy of (L) for each."""
    return fixed.expand(rows.stop - rows.start, -1) if fixed.dim() == 1 else fixed[rows]


@dataclass
class FixedTokenCounter:
    """Counts the given tokens that latents themselves decode to; a `watch` for samplers that put the others in place."""

    fixed: Tensor
    tokens: int = 0
    kept: int = 0
    rows: int = 0

    def __call__(self, step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        if step < steps:
            return
        decoded = tokens().cpu()
        fixed_BL = rows_of(self.fixed, slice(self.rows, self.rows + len(decoded)))
        self.rows += len(decoded)
        self.tokens += int((fixed_BL >= 0).sum())
        self.kept += int(((decoded == fixed_BL) & (fixed_BL >= 0)).sum())

    @property
    def sentence(self) -> str:
        """The count in words."""
        rest = "" if self.kept == self.tokens else "; the others were put in their place"
        return f"{self.kept:,} of {counted(self.tokens, 'given token')} are what the latents decode to{rest}."
