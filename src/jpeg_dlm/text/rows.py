"""Rows of exactly L tokens: the frame and padding around text, a text as a row of its own, and the end of a row's text.

Framed rows are [begin] + payload + [eos], with a boundary id after each piece (released, LM1B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from jpeg_dlm.config import DataConfig
from jpeg_dlm.errors import DataError
from jpeg_dlm.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Layout:
    """Layout of a row: its length, its special ids and the packing of documents."""

    packing: Literal["continuous", "sentences", "padded"]
    token_len: int
    eos_id: int
    pad_id: int = 0
    frame: bool = False
    bos_id: int = -1
    boundary_id: int = -1
    whole: bool = False

    @property
    def payload(self) -> int:
        """Number of positions in a row that hold document tokens."""
        return self.token_len - 2 if self.frame else self.token_len

    @property
    def start(self) -> int:
        """Position of the first document token."""
        return 1 if self.frame else 0

    @property
    def separator(self) -> int:
        """Id between two texts of a row."""
        return self.boundary_id if self.frame else self.eos_id

    def row(self, payload: Sequence[int]) -> list[int]:
        """Return a row of these document tokens, framed and padded."""
        row = [self.bos_id, *payload, self.eos_id] if self.frame else list(payload)
        return row + [self.pad_id] * (self.token_len - len(row))

    def text_row(self, ids: Sequence[int]) -> list[int]:
        """Return a row with one text: ended and padded, or repeated for models trained on full blocks."""
        unit = [*ids, self.separator]
        times = 1 if self.packing == "padded" else -(-self.payload // len(unit))
        return self.row((unit * times)[: self.payload])

    def beginning(self, ids: Sequence[int], rest: int) -> list[int]:
        """Return a row that begins with `ids`, with `rest` at all positions after them."""
        row = [self.bos_id, *ids] if self.frame else list(ids)
        return row + [rest] * (self.token_len - len(row))


def layout_of(data: DataConfig, tokenizer: TextTokenizer) -> Layout:
    """Return the layout of a model's rows."""
    if data.frame and tokenizer.bos_id is None:
        raise DataError("This model needs a tokenizer with a begin token: use the one it was trained with.")
    bos = -1 if tokenizer.bos_id is None else tokenizer.bos_id
    # Without a line token, documents are whole and their end token separates them (MDLM, Duo: GPT-2).
    boundary = tokenizer.eos_id if tokenizer.boundary_id is None else tokenizer.boundary_id
    # BERT's [CLS] begins a framed row and separates its lines; in MDLM and Duo it ends the row as well.
    eos = bos if data.frame and tokenizer.boundary_id == bos else tokenizer.eos_id
    return Layout(data.packing, data.token_len, eos, tokenizer.pad_id, data.frame, bos, boundary, data.whole)


def first_copy(row: list[int], separator: int) -> list[int]:
    """Return the text that fills a row by repetition, once; any other row as it is.

    A row repeats itself where more than half of what follows a separator is what the row began with (assumed).
    """
    for i in [i for i, token in enumerate(row) if token == separator and i > 0]:
        again = row[i + 1 :]
        if 2 * sum(a == b for a, b in zip(row, again, strict=False)) > len(again) > 0:
            return row[:i]
    return row


def end_rows(tokens_BL: Tensor, eos_id: int, pad_id: int, given: Tensor | None = None) -> Tensor:
    """Replace all tokens after the first end token with padding, for models whose rows end (`DataConfig.rows_end`).

    Given text (`given`, (L) or (B, L), -1 elsewhere) is kept: only end tokens after it count.
    """
    ends_BL = (tokens_BL == eos_id).long()
    if given is not None:
        kept = (given >= 0).long().to(tokens_BL.device)
        ends_BL = ends_BL * (kept.flip(-1).cumsum(-1).flip(-1) == 0)  # no given token here or later
    return tokens_BL.masked_fill(ends_BL.cumsum(1) > ends_BL, pad_id)
