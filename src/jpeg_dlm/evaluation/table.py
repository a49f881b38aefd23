"""Tables of numbers, formatted only when they are drawn: as Markdown here, by rich in a terminal, as HTML in the report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm.util.files import write_atomic

# Characters that hide, reorder or break what stands around them: controls, half surrogates, marks of writing direction.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")
INLINED = {"inlined": True}  # metadata of a field whose own fields `to_json` puts in its place; None has no fields

OMITTED = {"omitted": True}  # metadata of a field that `to_json` leaves out


@dataclass(frozen=True)
class Span:
    """A text or number in a style."""

    value: str | int | float
    style: Literal["emphasis"] = "emphasis"

    def __str__(self) -> str:
        return str(self.value)


# A text, a number, an interval (low, high), or a mapping with `mean` and `sd`; None is an empty cell.
Cell = str | int | float | None | tuple[float, float] | Mapping[str, Any] | Span


@dataclass(frozen=True)
class Column:
    """A heading, and how the numbers below it are drawn."""

    name: str
    digits: int | None = None  # after the point; None: four that count, or all of an integer
    percent: bool = False

    def text(self, cell: Cell) -> str:
        """Return a cell as it is drawn, without its style."""
        match cell:
            case None:
                return ""
            case str():
                return cell
            case Span(value=value):
                return self.text(value)
            case (low, high):
                return f"{self.text(low)} to {self.text(high)}"
            case Mapping():
                return self.text(cell["mean"]) + (f" ± {self.text(cell['sd'])}" if cell.get("sd") is not None else "")
            case float() if math.isnan(cell):
                return ""
            case _ if self.percent:
                return f"{100 * cell:.{self.digits or 0}f}%"
            case int() if self.digits is None:
                return f"{cell:,}"
            case _:
                return f"{cell:.4g}" if self.digits is None else f"{cell:.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    """Rows as long as the heading, a title above and sentences below; without columns there are only sentences."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError("a row of the table is not as long as its heading")

    @classmethod
    def of(
        cls, title: str, columns: Iterable[str | Column], rows: Iterable[Iterable[Cell]], notes: Iterable[str] = ()
    ) -> Table:
        """Return a table without the columns that hold nothing, such as that of a measure that was not taken."""
        named = [column if isinstance(column, Column) else Column(column) for column in columns]
        cells = [tuple(map(_without_values, row)) for row in rows]
        full = cls(title, tuple(named), tuple(cells), tuple(notes))
        kept = [i for i in range(len(named)) if not cells or any(named[i].text(row[i]) for row in cells)]
        return cls(title, tuple(named[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in cells), full.notes)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Table:
        """Read what `to_json` makes of a table."""
        columns = (Column(str(c["name"]), c.get("digits"), bool(c.get("percent"))) for c in value["columns"])
        rows = (tuple(map(_read_cell, row)) for row in value["rows"])
        return cls(str(value["title"]), tuple(columns), tuple(rows), tuple(map(str, value["notes"])))

    def is_numeric(self, i: int) -> bool:
        """Return True if a column holds numbers; a word such as 'failed' may be among them."""
        values = (cell.value if isinstance(cell, Span) else cell for cell in (row[i] for row in self.rows))
        return any(value is not None and not isinstance(value, str) for value in values)

    def markdown(self) -> str:
        """Return the rows as a Markdown table, with numbers aligned to the right."""
        sides = ["---:" if self.is_numeric(i) else "---" for i in range(len(self.columns))]
        body = [[_markdown(cell, column) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows]
        lines = [[_markdown(column.name, column) for column in self.columns], sides, *body]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _without_values(cell: Cell) -> Cell:
    return {"mean": cell["mean"], "sd": cell.get("sd")} if isinstance(cell, Mapping) else cell


def _read_cell(value: Any) -> Cell:
    if isinstance(value, dict):
        return Span(value["value"]) if "style" in value else {"mean": value["mean"], "sd": value["sd"]}
    if isinstance(value, list):
        low, high = value
        return low, high
    return value


def _markdown(cell: Cell, column: Column) -> str:
    mark = "*" if isinstance(cell, Span) else ""
    return f"{mark}{column.text(cell)}{mark}".replace("|", "\\|").replace("\n", " ")


def visible(text: str) -> str:
    """`text` with every character that could disturb its surroundings replaced by its code."""
    return _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text.replace("\r\n", "\n"))


def markdown(tables: Iterable[Table]) -> str:
    """Return tables with their titles and notes as Markdown."""
    return "\n\n".join(
        part for table in tables for part in (table.title, table.markdown() if table.columns else "", *table.notes) if part
    )


def to_json(value: Any) -> Any:
    """Return a result as JSON values: dicts for dataclasses and mappings, lists for sequences, null for what is not finite."""
    if is_dataclass(value):
        content: dict[str, Any] = {}
        for member in fields(value):
            if member.metadata.get("omitted"):
                continue
            part = to_json(getattr(value, member.name))
            content |= (part or {}) if member.metadata.get("inlined") else {member.name: part}
        return content
    if isinstance(value, Mapping):
        return {key: to_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_result(stem: Path, result: Any, tables: Sequence[Table], new: bool = False) -> list[Path]:
    """Write `STEM.json`, a result with its tables, and `STEM.md`, the tables alone; `new` refuses to replace the first."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    data, text = stem.with_suffix(".json"), stem.with_suffix(".md")
    content = to_json(result) | {"tables": to_json(tables)}
    write_atomic(data, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", new=new)
    write_atomic(text, markdown(tables) + "\n")
    return [data, text]
