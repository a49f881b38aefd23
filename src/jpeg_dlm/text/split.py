"""Which documents are held out: decided by document, so that no text of one is in both splits."""

from __future__ import annotations

from dataclasses import dataclass

from jpeg_dlm.rng import derive_seed
from jpeg_dlm.text.packing import sentences


@dataclass(frozen=True)
class Split:
    """Which documents are held out: by a hash of their number, and some of the first few by force."""

    share: float
    forced: frozenset[int]

    def of(self, number: int) -> str:
        """The split of a document."""
        return "heldout" if number in self.forced or draw(number) < self.share else "train"


def draw(number: int) -> float:
    """A number in [0, 1) that belongs to a document's place alone."""
    return derive_seed(0, "holdout", number) / 2**63


def choose_split(head: list[str], share: float, token_len: int) -> Split:
    """The split for a stream that begins with `head`: at least one of its documents, and about a row's worth of
    text, is held out, and at least one is not."""
    held = [i for i in range(len(head)) if draw(i) < share]
    characters = sum(len(head[i]) for i in held)
    enough = 8 * token_len  # more characters than a row of tokens has
    for i in sorted(set(range(len(head))) - set(held), key=draw):
        if held and characters >= enough or len(held) >= len(head) - 1:
            break
        held.append(i)
        characters += len(head[i])
    return Split(share, frozenset(held))


def pieces(text: str, size: int) -> list[str]:
    """A single document in parts of about `size` characters, cut between sentences, else between words."""
    units = [s for line in text.split("\n") for s in sentences(line)]
    units = [u for s in units for u in ([s] if len(s) <= size else _words(s, size))]
    parts: list[str] = []
    for unit in units:
        if parts and len(parts[-1]) < size:
            parts[-1] += "\n" + unit
        else:
            parts.append(unit)
    return parts


def _words(text: str, size: int) -> list[str]:
    words, lines = text.split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) >= size and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
