"""Documents of token ids into rows of exactly L, as pure functions with the remainder in plain sight.

A document is a list of pieces: the whole text, its lines (when framed), or its sentences. `step` takes what was left
over, one document, and returns full rows and what is left now; `pack` folds it over a stream. Because the remainder is
a value, packing can stop after any document and go on elsewhere.

| packing | rows | what is lost |
|---|---|---|
| continuous | documents joined by eos, cut anywhere, the remainder opens the next row | the last unfilled row of the stream |
| sentences | the same, but a row opens with a sentence: one cut at the end of a row opens the next row again | the same |
| padded | each document cut into rows of its own, the last one with eos and then pad | nothing; `whole`: longer documents |

Framed rows are [begin] + payload + [eos], and in the payload a boundary id follows each piece instead of eos after each
document (released, LM1B; the place of the frame is inferred from the names in its config).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

Document = Sequence[Sequence[int]]
Carry = list[list[int]]

# A sentence ends with . ! or ? (and closing quotes or brackets) before white space and something that can open a
# sentence. Single letters ("J. Smith", "p. 3") and common titles do not end one; other abbreviations may, which costs little.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9])")
_NOT_AN_END = re.compile(r"(?:\b[A-Za-z]|\b(?:Mr|Mrs|Ms|Dr|St|Gen|Sen|Rep|Prof|Jr|No|vs|e\.g|i\.e|U\.S))\.$")


@dataclass(frozen=True)
class Layout:
    """How a row is built: its length, its special ids and how documents fill it."""

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
        """Positions of a row that carry the stream."""
        return self.token_len - 2 if self.frame else self.token_len


def sentences(text: str) -> list[str]:
    """The sentences of `text`; joined with spaces they give it back."""
    found, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        candidate = text[start : match.end()].strip()
        if candidate and not _NOT_AN_END.search(candidate):
            found.append(candidate)
            start = match.end()
    rest = text[start:].strip()
    return [*found, rest] if rest else found


def step(layout: Layout, carry: Carry, document: Document) -> tuple[list[list[int]], Carry]:
    """The rows that `document` completes after the remainder `carry`, and the new remainder."""
    pieces = _terminated(layout, document)
    if layout.packing == "padded":
        flat = _flat(pieces)
        fits = len(flat) <= layout.payload or not layout.whole
        payloads, carry = [flat[i : i + layout.payload] for i in range(0, len(flat), layout.payload) if fits], []
    elif layout.packing == "continuous":
        payloads, rest = _cut_anywhere(layout.payload, _flat([*carry, *pieces]))
        carry = [rest] if rest else []
    else:
        payloads, carry = _cut_at_sentences(layout.payload, [*carry, *pieces])
    return [_row(layout, p) for p in payloads], carry


def pack(layout: Layout, documents: Iterable[Document]) -> Iterator[list[int]]:
    """Rows of a stream of documents; an unfilled last row is dropped."""
    carry: Carry = []
    for document in documents:
        rows, carry = step(layout, carry, document)
        yield from rows


def end_rows(tokens_BL: Tensor, eos_id: int, pad_id: int, given_L: Tensor | None = None) -> Tensor:
    """Return rows with padding behind their first end token, for models of rows that end (`DataConfig.rows_end`).

    Padding is masked in training, so what such a model writes there means nothing. Text that was given (-1 elsewhere) is
    kept: the end is looked for behind it.
    """
    ends_BL = (tokens_BL == eos_id).long()
    if given_L is not None:
        kept = (given_L >= 0).nonzero().flatten().tolist()
        ends_BL[:, : max(kept, default=-1) + 1] = 0
    return tokens_BL.masked_fill(ends_BL.cumsum(1) > ends_BL, pad_id)


def lengths(rows: np.ndarray, pad_id: int) -> np.ndarray:
    """Tokens of each padded row that are text: everything before the padding at its end."""
    return (rows != pad_id).sum(axis=1)


def _flat(pieces: Iterable[Sequence[int]]) -> list[int]:
    return [i for piece in pieces for i in piece]


def _terminated(layout: Layout, document: Document) -> Carry:
    """The document's pieces with the mark that ends each piece (framed) or the document (else); empty ones vanish."""
    pieces = [list(p) for p in document if len(p)]
    if layout.frame:
        return [[*p, layout.boundary_id] for p in pieces]
    if pieces:
        pieces[-1].append(layout.eos_id)
    return pieces


def _cut_anywhere(width: int, stream: list[int]) -> tuple[list[list[int]], list[int]]:
    end = len(stream) - len(stream) % width
    return [stream[i : i + width] for i in range(0, end, width)], stream[end:]


def _cut_at_sentences(width: int, pieces: Carry) -> tuple[list[list[int]], Carry]:
    """Full payloads that open with a piece. Repeating the cut piece loses no text and costs half a sentence a row;
    only a piece that alone overfills a row is continued where it was cut, as nothing else would ever get past it."""
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


def _row(layout: Layout, payload: list[int]) -> list[int]:
    row = [layout.bos_id, *payload, layout.eos_id] if layout.frame else payload
    return row + [layout.pad_id] * (layout.token_len - len(row))
