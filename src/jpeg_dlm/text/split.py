"""Which text is held out: a function of a document's place and of lengths, so that any point of a stream can be taken up again.

Documents are held out whole, by a hash of their number. One that is longer than all the text that is to be held out
cannot be: stretches inside it are, evenly spaced over all such documents. Lengths are characters, which tokens follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jpeg_dlm.rng import derive_seed
from jpeg_dlm.text.corpora import Document
from jpeg_dlm.text.packing import sentences

STRETCHES = 8  # held-out places inside long documents (assumed: several parts of a book, each long enough to read)
CHUNK = 1 << 20  # characters of a long document in one piece at most: what is tokenized at once, and between two saves
TOLERANCE = 0.25  # of the share: how far the documents that were drawn may be off (assumed)

Name = Literal["train", "heldout"]


class Place(NamedTuple):
    """A point between two pieces."""

    document: int = 0  # documents before the one it is in
    piece: int = 0  # pieces of that one before it
    long: int = 0  # characters of long documents before that one


START = Place()


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    content: Document
    split: Name
    end: Place
    whole: bool


@dataclass(frozen=True)
class Split:
    """The share of the text that is held out, and what was decided on the documents that were looked at first."""

    share: float
    held: frozenset[int]  # of the first `known` documents
    known: int
    longest: float  # of a document that stays whole
    stretch: int = 1  # characters that are held out at a time in longer ones
    period: int = 2  # and from the beginning of one stretch to the next

    def of(self, number: int) -> Name:
        """The split of a document that stays whole."""
        held = number in self.held if number < self.known else draw(number) < self.share
        return "heldout" if held else "train"

    def pieces(self, documents: Iterable[Document], start: Place = START) -> Iterator[Piece]:
        """The pieces after `start`, where `documents` begins with the document that `start` is in."""
        _, skip, long = start
        for number, document in enumerate(documents, start.document):
            whole, parts = True, self._whole(document, number)
            if isinstance(document, str) and len(document) > self.longest:  # a row of ids has the length it must have
                whole, parts = False, self._stretches(document, long)
            for i, (part, name) in enumerate(parts):
                if i >= skip:
                    yield Piece(part, name, Place(number, i + 1, long), whole)
            skip = 0
            long += 0 if whole else len(document)

    def _whole(self, document: Document, number: int) -> Iterator[tuple[Document, Name]]:
        yield document, self.of(number)

    def _stretches(self, text: str, before: int) -> Iterator[tuple[Document, Name]]:
        """The parts of a long document, in which `before` characters of other long ones have been passed."""
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
    """A number in [0, 1) that belongs to a document's place alone."""
    return derive_seed(0, "holdout", number) / 2**63


def choose_split(
    head: Sequence[Document], share: float, token_len: int, rest: int = 0, by: Literal["tokens", "documents"] = "tokens"
) -> Split:
    """The split for a stream that begins with `head` and has about `rest` more characters.

    There is a row's worth of text in the held-out part, and something to train on, wherever `head` has as much.
    """
    row = 8 * token_len  # more characters than a row of tokens has
    lengths = {i: len(document) for i, document in enumerate(head)}
    total = sum(lengths.values()) + rest
    longest = max(share * total, row) if by == "tokens" or len(head) == 1 else float("inf")
    whole = {i: n for i, n in lengths.items() if n <= longest}
    long = sum(n for n in lengths.values() if n > longest)
    held = _drawn(whole, share, 0 if long else row, by == "tokens")
    pool = total if rest else long
    count = min(max(int(share * pool) // row, 1), STRETCHES)
    stretch = max(1, min(max(row, int(share * pool) // count), pool // 2))
    return Split(share, held, len(head), longest, stretch, max(pool // count, stretch + 1))


def _drawn(lengths: dict[int, int], share: float, least: int, balance: bool) -> frozenset[int]:
    """The documents to hold out among those that stay whole, with at least `least` characters; one is left for training.

    They are those whose draw lies below the share. Where documents are so few or so uneven that these hold far more or
    less than the share of the text, the first in the order of the draw are taken until they hold it.
    """
    order = sorted(lengths, key=draw)
    held = [i for i in order if draw(i) < share]
    target, size = share * sum(lengths.values()), sum(lengths[i] for i in held)
    if balance and abs(size - target) > TOLERANCE * target:
        held, size = [], 0
        for i in order:
            if size < target and size + lengths[i] <= (1 + TOLERANCE) * target:
                held.append(i)
                size += lengths[i]
    for i in order:
        if size >= least or len(held) >= len(order) - 1:
            break
        if i not in held:
            held.append(i)
            size += lengths[i]
    return frozenset(held)


def _boundary(text: str, low: int, at: int) -> int:
    """Where to cut `text` between `low` and `at`: after the last line there, else sentence, else word, else at `at`."""
    if at >= len(text):
        return len(text)
    window = text[low:at]
    if "\n" in window:
        return low + window.rindex("\n") + 1
    found = sentences(window)
    if len(found) > 1:
        return low + window.rindex(found[-1])
    return low + window.rindex(" ") + 1 if " " in window else at
