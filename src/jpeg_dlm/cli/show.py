"""Results on standard output: tables are drawn on a terminal, and stay Markdown in files and pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich import box
from rich.console import Console
from rich.table import Table as Drawing
from rich.text import Text

from jpeg_dlm.results.table import Cell, Table, is_numeric, markdown, visible

STYLES = {"emphasis": "italic", "code": "bold"}
GAP = 2  # characters between columns, one of them a border that is not drawn


def show(tables: Sequence[Table]) -> None:
    """Print tables with their titles and notes, blank lines between them."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        print(markdown(tables))
        return
    sys.stdout.flush()
    parts = [part for table in tables for part in (table.title, *drawings(table, console.width), *table.notes) if part]
    for i, part in enumerate(parts):
        console.print(*[""][:i], _text(part) if isinstance(part, str) else part, sep="\n")


@dataclass(frozen=True)
class Column:
    """Cells below their heading, as wide as its words need or as the cells would like."""

    heading: str
    cells: Sequence[Cell]

    @cached_property
    def numeric(self) -> bool:
        return is_numeric(list(map(str, self.cells)))

    @cached_property
    def least(self) -> int:
        """Headings and sentences may continue on the next line between words, numbers with their units may not."""
        body = list(map(str, self.cells))
        return max(map(len, [*self.heading.split(), *(body if self.numeric else " ".join(body).split())]), default=1)

    @cached_property
    def most(self) -> int:
        return max(self.least, len(self.heading), *(len(str(cell)) for cell in self.cells))


def drawings(table: Table, width: int) -> Iterator[Drawing]:
    """The table, or if it is too wide even with cells of several lines, several that begin with the same column."""
    columns = [Column(name, [row[i] for row in table.rows]) for i, name in enumerate(table.columns)]
    for group in _groups(columns, width) if columns else ():
        drawing = Drawing(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
        for column, wide in zip(group, _widths(group, width), strict=True):
            side = "right" if column.numeric else "left"
            drawing.add_column(_text(column.heading), justify=side, width=wide, overflow="fold")
        for cells in zip(*(column.cells for column in group), strict=True):
            drawing.add_row(*map(_text, cells))
        yield drawing


def _groups(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Columns that can stand beside each other."""
    first, *others = columns
    groups = [[first]]
    for column in others:
        if len(groups[-1]) > 1 and sum(one.least + GAP for one in [*groups[-1], column]) > width:
            groups.append([first])
        groups[-1].append(column)
    return groups


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """The width of each column: what it needs, and of what is left over as much as it can use, in equal shares."""
    widths = [column.least for column in columns]
    spare = width - sum(widths) - GAP * len(columns)
    while spare > 0 and (narrow := [i for i, column in enumerate(columns) if widths[i] < column.most]):
        for i in narrow[:spare]:
            widths[i] += 1
        spare -= len(narrow)
    return widths


def _text(cell: Cell) -> Text:
    """Styled text; what would command the terminal is made visible."""
    return Text(visible(str(cell)), "" if isinstance(cell, str) else STYLES[cell.style])
