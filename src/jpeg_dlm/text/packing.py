"""Rows of exactly L tokens: their layout, documents packed into them, and the text of a row.

A document is a list of pieces: the whole text, its lines (when framed), or its sentences. `continuous` and `sentences` lose
the last unfilled row of the stream, `padded` loses nothing, and with `whole` documents longer than a row. Framed rows are
[begin] + payload + [eos], with a boundary id after each piece (released, LM1B).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from jpeg_dlm.config import DataConfig
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.util.errors import UsageError

Carry = list[list[int]]  # pieces that fill no row yet

# A sentence ends with . ! or ? (and closing quotes or brackets) before white space and a character that can start a
# sentence. Single letters ("J. Smith", "p. 3") and common titles do not end one; other abbreviations may, at little cost.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9])")
_NOT_AN_END = re.compile(r"(?:\b[A-Za-z]|\b(?:Mr|Mrs|Ms|Dr|St|Gen|Sen|Rep|Prof|Jr|No|vs|e\.g|i\.e|U\.S))\.$")


@dataclass(frozen=True)
class RowLayout:
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
        return self.beginning([*payload, self.eos_id] if self.frame else payload, self.pad_id)

    def text_row(self, ids: Sequence[int]) -> list[int]:
        """Return a row with one text: ended and padded, or repeated for models trained on full blocks."""
        unit = [*ids, self.separator]
        times = 1 if self.packing == "padded" else -(-self.payload // len(unit))
        return self.row((unit * times)[: self.payload])

    def beginning(self, ids: Sequence[int], rest: int) -> list[int]:
        """Return a row that begins with `ids`, with `rest` at all positions after them."""
        row = [self.bos_id, *ids] if self.frame else list(ids)
        return row + [rest] * (self.token_len - len(row))


def layout_of(data: DataConfig, tokenizer: TextTokenizer) -> RowLayout:
    """Return the layout of a model's rows."""
    if data.packing == "padded" and tokenizer.pad_id == tokenizer.eos_id:
        raise UsageError("data.packing 'padded' needs a tokenizer with a pad token: choose another tokenizer or packing.")
    if data.frame and tokenizer.bos_id is None:
        raise UsageError("data.frame needs a tokenizer with a begin token, such as 'bpe', 't5' or 'gpt2'.")
    bos = -1 if tokenizer.bos_id is None else tokenizer.bos_id
    # Without a line token, documents are whole and their end token separates them (MDLM, Duo: GPT-2).
    boundary = tokenizer.eos_id if tokenizer.boundary_id is None else tokenizer.boundary_id
    # BERT's [CLS] begins a framed row and separates its lines; in MDLM and Duo it ends the row as well.
    eos = bos if data.frame and tokenizer.boundary_id == bos else tokenizer.eos_id
    return RowLayout(data.packing, data.token_len, eos, tokenizer.pad_id, data.frame, bos, boundary, data.whole)


def first_copy(row: list[int], separator: int) -> list[int]:
    """Return the text that fills a row by repetition, once; any other row as it is.

    A row repeats itself where more than half of what follows a separator is what the row began with (assumed).
    """
    for i in [i for i, token in enumerate(row) if token == separator and i > 0]:
        again = row[i + 1 :]
        if 2 * sum(a == b for a, b in zip(row, again, strict=False)) > len(again) > 0:
            return row[:i]
    return row


def end_rows(tokens_BL: Tensor, eos_id: int, pad_id: int, fixed: Tensor | None = None) -> Tensor:
    """Replace all tokens after the first end token with padding, for models whose rows end (`DataConfig.rows_end`).

    Given text (`fixed`, (L) or (B, L), -1 elsewhere) is kept: only end tokens after it, or given at its end, count.
    """
    ends_BL = (tokens_BL == eos_id).long()
    if fixed is not None:
        kept = ((fixed >= 0) & (fixed != eos_id)).long().to(tokens_BL.device)
        ends_BL = ends_BL * (kept.flip(-1).cumsum(-1).flip(-1) == 0)  # no given token here or later
    return tokens_BL.masked_fill(ends_BL.cumsum(1) > ends_BL, pad_id)


# ---------------------------------------------------------------- documents


def sentences(text: str) -> list[str]:
    """Split `text` into sentences; joining them with spaces restores it."""
    pieces, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        candidate = text[start : match.end()].strip()
        if candidate and not _NOT_AN_END.search(candidate):
            pieces.append(candidate)
            start = match.end()
    rest = text[start:].strip()
    return [*pieces, rest] if rest else pieces


def pack_document(layout: RowLayout, carry: Carry, document: Sequence[Sequence[int]]) -> tuple[list[list[int]], Carry]:
    """Return the rows that `document` completes after the remainder `carry`, and the new remainder."""
    pieces = [list(p) for p in document if len(p)]
    if layout.frame:
        pieces = [[*p, layout.boundary_id] for p in pieces]
    elif pieces:
        pieces[-1].append(layout.eos_id)
    if layout.packing == "padded":
        flat = _flat(pieces)
        fits = len(flat) <= layout.payload or not layout.whole
        payloads, carry = [flat[i : i + layout.payload] for i in range(0, len(flat), layout.payload) if fits], []
    elif layout.packing == "continuous":
        stream = _flat([*carry, *pieces])
        end = len(stream) - len(stream) % layout.payload
        payloads = [stream[i : i + layout.payload] for i in range(0, end, layout.payload)]
        carry = [stream[end:]] if stream[end:] else []
    else:
        payloads, carry = _cut_at_sentences(layout.payload, [*carry, *pieces])
    return [layout.row(p) for p in payloads], carry


def _flat(pieces: Iterable[Sequence[int]]) -> list[int]:
    return [i for piece in pieces for i in piece]


def _cut_at_sentences(width: int, pieces: Carry) -> tuple[list[list[int]], Carry]:
    """Return full payloads that start with a piece, which if cut starts the next row again, and the remaining pieces."""
    payloads: list[list[int]] = []
    first, filled, i = 0, 0, 0  # the open row holds pieces[first:i], `filled` ids
    while i < len(pieces):
        filled += len(pieces[i])
        i += 1
        if filled < width:
            continue
        taken = _flat(pieces[first:i])
        payloads.append(taken[:width])
        if filled == width:
            first = i
        elif i - 1 > first:
            first = i - 1
        else:
            pieces[first] = taken[width:]
        filled, i = 0, first
    return payloads, pieces[first:]
