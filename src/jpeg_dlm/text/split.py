"""Choose the held-out text as a function of document numbers and lengths in characters, so that reading can resume anywhere.

Whole documents are held out by a hash of their number; of a document longer than all the text to hold out, stretches are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jpeg_dlm.text.packing import sentences
from jpeg_dlm.text.sources import Document
from jpeg_dlm.util.rng import derive_seed

STRETCHES = 8  # held-out stretches inside long documents (assumed: several parts of a book, each long enough to read)
CHUNK = 1 << 20  # most characters in one piece of a long document: tokenized at once, and between two saves
TOLERANCE = 0.25  # largest relative deviation of the held-out text from the share (assumed)

Name = Literal["train", "heldout"]


class Place(NamedTuple):
    """A position between two pieces of the stream."""

    document: int = 0  # number of the current document
    piece: int = 0  # pieces of that document before this position
    long: int = 0  # characters of long documents before that document


START = Place()


class DocumentPiece(NamedTuple):
    """A document, or a part of a long one."""

    content: Document
    split: Name
    end: Place
    whole: bool


@dataclass(frozen=True)
class Split:
    """The share of text to hold out, and the choices made from the first documents of the stream."""

    share: float
    held: frozenset[int]  # held-out documents among the first `known`
    known: int
    longest: float  # most characters of a document that stays whole
    stretch: int = 1  # length of a held-out stretch in longer documents
    period: int = 2  # distance from the start of one stretch to the start of the next

    def of(self, number: int) -> Name:
        """Return the split of a document that stays whole."""
        held = number in self.held if number < self.known else draw(number) < self.share
        return "heldout" if held else "train"

    def pieces(self, documents: Iterable[Document], start: Place = START) -> Iterator[DocumentPiece]:
        """Yield the pieces after `start`; `documents` begins with the document that `start` is in."""
        _, skip, long = start
        for number, document in enumerate(documents, start.document):
            whole = not isinstance(document, str) or len(document) <= self.longest  # rows of ids are never cut
            parts: Iterable[tuple[Document, Name]] = (
                [(document, self.of(number))] if whole else self._stretches(str(document), long)
            )
            for i, (part, name) in itertools.islice(enumerate(parts, 1), skip, None):
                yield DocumentPiece(part, name, Place(number, i, long), whole)
            skip = 0
            long += 0 if whole else len(document)

    def _stretches(self, text: str, before: int) -> Iterator[tuple[Document, Name]]:
        """Yield the parts of a long document; earlier long documents have `before` characters in total."""
        lead, start, ideal = (self.period - self.stretch) // 2, 0, 0
        while ideal < len(text):
            phase = (before + ideal - lead) % self.period
            held = phase < self.stretch
            ideal += min((self.stretch if held else self.period) - phase, CHUNK)
            end = _boundary(text, max(start, ideal - self.stretch // 4), ideal)
            if end > start:
                yield text[start:end], "heldout" if held else "train"
            start = end


def draw(number: int) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on the document number."""
    return derive_seed(0, "holdout", number) / 2**63


def choose_split(head: Sequence[Document], share: float, token_len: int, rest: int = 0) -> Split:
    """Choose the split of a stream that begins with `head` and has about `rest` more characters; both parts get text."""
    row = 8 * token_len  # upper bound on the characters of a row
    lengths = {i: len(document) for i, document in enumerate(head)}
    total = sum(lengths.values()) + rest
    longest = max(share * total, row)
    whole = {i: n for i, n in lengths.items() if n <= longest}
    long = sum(n for n in lengths.values() if n > longest)
    held = _drawn(whole, share, 0 if long else row)
    pool = total if rest else long
    count = min(max(int(share * pool) // row, 1), STRETCHES)
    stretch = max(1, min(max(row, int(share * pool) // count), pool // 2))
    return Split(share, held, len(head), longest, stretch, max(pool // count, stretch + 1))


def _drawn(lengths: dict[int, int], share: float, least: int) -> frozenset[int]:
    """Choose whole documents to hold out, with at least `least` characters in total; leave at least one for training.

    These are the documents whose draw is below the share, or if they miss the share by far, those with the lowest draws.
    """
    order = sorted(lengths, key=draw)
    held = [i for i in order if draw(i) < share]
    target, size = share * sum(lengths.values()), sum(lengths[i] for i in held)
    if abs(size - target) > TOLERANCE * target:
        held, size = [], 0
        for i in order:
            if size < target and size + lengths[i] <= (1 + TOLERANCE) * target:
                held.append(i)
                size += lengths[i]
    for i in [i for i in order if i not in held]:
        if size < least and len(held) < len(order) - 1:
            held.append(i)
            size += lengths[i]
    return frozenset(held)


def _boundary(text: str, low: int, at: int) -> int:
    """Return where to cut `text` between `low` and `at`: after the last line, else sentence, else word, else at `at`."""
    if at >= len(text):
        return len(text)
    window = text[low:at]
    if "\n" in window:
        return low + window.rindex("\n") + 1
    if len(ends := sentences(window)) > 1:
        return low + window.rindex(ends[-1])
    return low + window.rindex(" ") + 1 if " " in window else at
