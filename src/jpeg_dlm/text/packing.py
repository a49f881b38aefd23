"""Pack documents of token ids into rows of exactly L tokens, as pure functions with an explicit remainder.

A document is a list of pieces: the whole text, its lines (when framed), or its sentences. `continuous` and `sentences` lose
the last unfilled row of the stream, `padded` loses nothing, and with `whole` documents longer than a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from jpeg_dlm.text.rows import Layout

Document = Sequence[Sequence[int]]
Carry = list[list[int]]

# A sentence ends with . ! or ? (and closing quotes or brackets) before white space and a character that can start a
# sentence. Single letters ("J. Smith", "p. 3") and common titles do not end one; other abbreviations may, at little cost.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9])")
_NOT_AN_END = re.compile(r"(?:\b[A-Za-z]|\b(?:Mr|Mrs|Ms|Dr|St|Gen|Sen|Rep|Prof|Jr|No|vs|e\.g|i\.e|U\.S))\.$")


def sentences(text: str) -> list[str]:
    """Split `text` into sentences; joining them with spaces restores it."""
    found, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        candidate = text[start : match.end()].strip()
        if candidate and not _NOT_AN_END.search(candidate):
            found.append(candidate)
            start = match.end()
    rest = text[start:].strip()
    return [*found, rest] if rest else found


def step(layout: Layout, carry: Carry, document: Document) -> tuple[list[list[int]], Carry]:
    """Return the rows that `document` completes after the remainder `carry`, and the new remainder."""
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
    return [layout.row(p) for p in payloads], carry


def _flat(pieces: Iterable[Sequence[int]]) -> list[int]:
    return [i for piece in pieces for i in piece]


def _terminated(layout: Layout, document: Document) -> Carry:
    """Append the boundary id to each piece (framed) or eos to the document (otherwise); drop empty pieces."""
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
