"""The blocks of a report. Text is kept as it is: each way of writing the report escapes it for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jpeg_dlm.results.table import Cell, Span, Table

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"  # PNG specification, 5.2
PNG_END = b"IEND\xaeB`\x82"  # the type of the last chunk and its checksum, which is always the same


def code(text: object) -> Span:
    return Span(str(text), "code")


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Note:
    """Something to know before believing the rest: a part is missing, or an alarm was raised."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True)
class Samples:
    """Texts in the order in which they were written."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Course:
    """The same texts at several steps, oldest first: a player shows them, and where nothing can be played, the last ones."""

    steps: tuple[int, ...]
    texts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Verbatim:
    """Lines that are shown as they are, such as commands."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A picture; `alt` says what it shows to those who do not see it."""

    png: bytes
    alt: str
    caption: str

    def __post_init__(self) -> None:
        if not self.png.startswith(PNG_SIGNATURE) or self.png[12:16] != b"IHDR":
            raise ValueError("it is not a PNG")
        if not self.png.endswith(PNG_END):
            raise ValueError("the PNG is cut off")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, which a PNG states first."""
        return int.from_bytes(self.png[16:20]), int.from_bytes(self.png[20:24])


@dataclass(frozen=True)
class Details:
    """Blocks that a reader may unfold."""

    summary: str
    blocks: tuple[Block, ...]
    unfolded: bool = False


# The title of a `Table` says what it holds to those who do not see it; its notes are paragraphs of their own.
Block = Paragraph | Note | Table | Facts | Samples | Course | Verbatim | Figure | Details


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]
    parts: tuple[Section, ...] = ()


@dataclass(frozen=True)
class Report:
    title: str
    about: str  # one sentence: by what, when
    sections: tuple[Section, ...]


def figures(report: Report) -> list[Figure]:
    """Every picture once, in order."""
    return list(dict.fromkeys(block for block in every_block(report.sections) if isinstance(block, Figure)))


def every_block(sections: Iterable[Section]) -> Iterator[Block]:
    """Yield the blocks of sections and of their parts, with those that can be unfolded."""
    for section in sections:
        yield from _unfolded(section.blocks)
        yield from every_block(section.parts)


def _unfolded(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if isinstance(block, Details):
            yield from _unfolded(block.blocks)
