"""Results on standard output: tables are drawn on a terminal, and stay Markdown in files and pipes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich import box
from rich.console import Console
from rich.table import Table as Drawing
from rich.text import Text

from jpeg_dlm.report.blocks import Rich, Table, is_numeric, text_of, visible
from jpeg_dlm.report.markdown import inline, parse

STYLES = {"text": "", "emphasis": "italic", "strong": "bold", "code": "bold"}
GAP = 2  # characters between columns, one of them a border that is not drawn


def show(markdown: str) -> None:
    """Print a result that consists of pipe tables and sentences."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        print(markdown)
        return
    sys.stdout.flush()
    for is_table, lines in itertools.groupby(markdown.splitlines(), lambda line: line.startswith("|")):
        for block in parse("\n".join(lines), "") if is_table else ():
            assert isinstance(block, Table)
            for i, drawing in enumerate(drawings(block, console.width)):
                console.print(*[""][:i], drawing, sep="\n")
        for line in () if is_table else lines:
            console.print(_text(inline(line)))


@dataclass(frozen=True)
class Column:
    """Cells below their heading, as wide as its words need or as the cells would like."""

    cells: Sequence[Rich]

    @cached_property
    def numeric(self) -> bool:
        return is_numeric([text_of(cell) for cell in self.cells[1:]])

    @cached_property
    def least(self) -> int:
        """Headings and sentences may continue on the next line between words, numbers with their units may not."""
        heading, *body = map(text_of, self.cells)
        return max(map(len, [*heading.split(), *(body if self.numeric else " ".join(body).split())]), default=1)

    @cached_property
    def most(self) -> int:
        return max(self.least, *(len(text_of(cell)) for cell in self.cells))


def drawings(table: Table, width: int) -> Iterator[Drawing]:
    """The table, or if it is too wide even with cells of several lines, several that begin with the same column."""
    columns = [Column([row[i] for row in (table.heading, *table.rows)]) for i in range(len(table.heading))]
    for group in _groups(columns, width):
        drawing = Drawing(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
        for column, wide in zip(group, _widths(group, width), strict=True):
            side = "right" if column.numeric else "left"
            drawing.add_column(_text(column.cells[0]), justify=side, width=wide, overflow="fold")
        for cells in zip(*(column.cells[1:] for column in group), strict=True):
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


def _text(content: Rich) -> Text:
    """Styled text; what would command the terminal is made visible."""
    return Text.assemble(*((visible(span.text), STYLES[span.style]) for span in content))
