"""Results on standard output: tables are drawn on a terminal, and stay Markdown in files and pipes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Drawing
from rich.text import Text

from jpeg_dlm.evaluation.table import Span, Table, markdown, visible


def show(tables: Sequence[Table]) -> None:
    """Print tables with their titles and notes, blank lines between them."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        print(markdown(tables))
        return
    sys.stdout.flush()
    for i, table in enumerate(tables):
        parts = [Text(visible(table.title)), _drawing(table) if table.columns else "", *map(Text, map(visible, table.notes))]
        for j, part in enumerate(part for part in parts if part):
            console.print(*[""][: i + j], part, sep="\n")


def _drawing(table: Table) -> Drawing:
    """Return a table for rich; a cell that would command the terminal is made visible."""
    drawing = Drawing(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(table.columns):
        numeric = table.is_numeric(i)
        drawing.add_column(visible(column.name), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in table.rows:
        texts = (visible(column.text(cell)) for cell, column in zip(row, table.columns, strict=True))
        styles = ("italic" if isinstance(cell, Span) else "" for cell in row)
        drawing.add_row(*map(Text, texts, styles))
    return drawing
