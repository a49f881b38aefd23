"""What a report is made of. Text is kept as it is: each way of writing the report escapes it for itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"  # PNG specification, 5.2
PNG_END = b"IEND\xaeB`\x82"  # the type of the last chunk and its checksum, which is always the same

# Characters that hide, reorder or break what stands around them: controls, half surrogates, marks of writing direction.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")


def visible(text: str) -> str:
    """`text` with every character that could disturb its surroundings replaced by its code."""
    return _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text.replace("\r\n", "\n"))


@dataclass(frozen=True)
class Span:
    """Text in one style."""

    text: str
    style: Literal["text", "emphasis", "strong", "code"] = "text"


Rich = tuple[Span, ...]
_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(e[-+]?\d+)?( ?(±|to|of) ?[-+−]?\d[\d.,]*)?( ?(%|[A-Za-zµ]{1,3}))?")


def is_numeric(cells: Sequence[str]) -> bool:
    """Whether most cells of a column that hold anything hold a number; a word such as 'failed' may be among them."""
    filled = [cell for cell in cells if cell]
    return 2 * sum(_NUMBER.fullmatch(cell) is not None for cell in filled) > len(filled)


def plain(text: object) -> Rich:
    return (Span(str(text)),)


def code(text: object) -> Rich:
    return (Span(str(text), "code"),)


def text_of(content: Rich) -> str:
    """Without styles."""
    return "".join(span.text for span in content)


@dataclass(frozen=True)
class Heading:
    """A heading inside a section, 1 for the highest."""

    level: int
    content: Rich


@dataclass(frozen=True)
class Paragraph:
    content: Rich


@dataclass(frozen=True)
class Note:
    """Something to know before believing the rest: a part is missing, or an alarm was raised."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows as long as the heading; `label` says what it holds to those who do not see it."""

    label: str
    heading: tuple[Rich, ...]
    rows: tuple[tuple[Rich, ...], ...]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: tuple[tuple[str, Rich], ...]


@dataclass(frozen=True)
class Samples:
    """Texts in the order in which they were written."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """A command line."""

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


Block = Heading | Paragraph | Note | Table | Facts | Samples | Command | Figure | Details


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
    found = (figure for section in report.sections for figure in _section_figures(section))
    return list(dict.fromkeys(found))


def _section_figures(section: Section) -> Iterator[Figure]:
    yield from _block_figures(section.blocks)
    for part in section.parts:
        yield from _section_figures(part)


def _block_figures(blocks: Iterable[Block]) -> Iterator[Figure]:
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Details):
            yield from _block_figures(block.blocks)
