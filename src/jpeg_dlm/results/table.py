"""Tables of results: kept as JSON, written as Markdown; the terminal and the report draw them in their own way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm.files import write_atomic
from jpeg_dlm.results.plain import plain

_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(e[-+]?\d+)?( ?(±|to|of) ?[-+−]?\d[\d.,]*)?( ?(%|[A-Za-zµ]{1,3}))?")
# Characters that hide, reorder or break what stands around them: controls, half surrogates, marks of writing direction.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")


@dataclass(frozen=True)
class Span:
    """Text in a style."""

    text: str
    style: Literal["emphasis", "code"]

    def __str__(self) -> str:
        return self.text


Cell = str | Span


def emphasis(text: str) -> Span:
    return Span(text, "emphasis")


@dataclass(frozen=True)
class Table:
    """Rows as long as the heading, a title above and sentences below; without columns there are only sentences."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError("a row of the table is not as long as its heading")

    @classmethod
    def of(cls, title: str, columns: Iterable[str], rows: Iterable[Iterable[Cell]], notes: Iterable[str] = ()) -> Table:
        """Return a table without the columns that hold nothing, such as that of a measure that was not taken."""
        full = cls(title, tuple(columns), tuple(map(tuple, rows)), tuple(notes))
        kept = [i for i in range(len(full.columns)) if not full.rows or any(str(row[i]) for row in full.rows)]
        cut = tuple(tuple(row[i] for i in kept) for row in full.rows)
        return cls(title, tuple(full.columns[i] for i in kept), cut, full.notes)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Table:
        """Read what `plain` makes of a table; whatever is no text becomes text."""
        rows = (tuple(map(_read_cell, row)) for row in value["rows"])
        return cls(str(value["title"]), tuple(map(str, value["columns"])), tuple(rows), tuple(map(str, value["notes"])))

    def column(self, i: int) -> list[str]:
        """Return the cells below a heading, without styles."""
        return [str(row[i]) for row in self.rows]

    def grid(self, cell: Callable[[Cell], str] | None = None) -> str:
        """Return the rows as a Markdown table; `cell` says how a cell is written."""
        cell = cell or _markdown_cell
        lines = (map(cell, self.columns), ["---"] * len(self.columns), *(map(cell, row) for row in self.rows))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _read_cell(value: Any) -> Cell:
    if isinstance(value, dict):
        return Span(str(value["text"]), "code" if value["style"] == "code" else "emphasis")
    return str(value)


def _markdown_cell(cell: Cell) -> str:
    mark = "" if isinstance(cell, str) else {"emphasis": "*", "code": "`"}[cell.style]
    return f"{mark}{cell}{mark}".replace("|", "\\|").replace("\n", " ")


def visible(text: str) -> str:
    """`text` with every character that could disturb its surroundings replaced by its code."""
    return _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text.replace("\r\n", "\n"))


def is_numeric(cells: Sequence[str]) -> bool:
    """Return whether most filled cells of a column hold a number; a word such as 'failed' may be among them."""
    filled = [cell for cell in cells if cell]
    return 2 * sum(_NUMBER.fullmatch(cell) is not None for cell in filled) > len(filled)


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[Cell]]) -> str:
    """Return cells as a Markdown table, without the columns that hold nothing."""
    return Table.of("", columns, rows).grid()


def markdown(tables: Iterable[Table]) -> str:
    """Return tables with their titles and notes as Markdown."""
    return "\n\n".join(
        part for table in tables for part in (table.title, table.grid() if table.columns else "", *table.notes) if part
    )


def write_result(stem: Path, result: Any, tables: Sequence[Table], new: bool = False) -> list[Path]:
    """Write `STEM.json`, a result with its tables, and `STEM.md`, the tables alone; `new` refuses to replace the first."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    data, text = stem.with_suffix(".json"), stem.with_suffix(".md")
    content = plain(result) | {"tables": plain(tables)}
    write_atomic(data, json.dumps(content, indent=1, ensure_ascii=False) + "\n", new=new)
    write_atomic(text, markdown(tables) + "\n")
    return [data, text]
