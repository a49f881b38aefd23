"""A report as one HTML page that needs nothing else: no font, no file beside it, and no script but that of the player."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from jpeg_dlm.report import page_blocks as blocks
from jpeg_dlm.report.player import closing, element, head, player_script
from jpeg_dlm.report.player import escape as _escape
from jpeg_dlm.results.table import Cell, Table, is_numeric

LONG_CELL = 28  # characters; longer ones may be broken into lines
WIDE_PIXELS = 800  # a picture of more than one panel
_TAGS = {"emphasis": "em", "code": "code"}


def render(report: blocks.Report) -> str:
    """The whole page."""
    title = _escape(report.title)
    sections = [_section(section, f"s{i}", 2) for i, section in enumerate(report.sections, 1)]
    played = any(isinstance(block, blocks.Course) for block in blocks.every_block(report.sections))
    script = player_script() if played else None
    return "\n".join(
        [
            head(report.title, script),
            '<a class="skip" href="#main">Skip to the content</a>',
            f'<header>\n<h1 dir="auto">{title}</h1>\n<p>{_escape(report.about)}</p>\n</header>',
            f'<nav aria-label="Contents">\n<h2>Contents</h2>\n{_contents(report.sections, "s")}</nav>',
            '<main id="main">',
            *sections,
            "</main>",
            closing(script),
        ]
    )


def _contents(sections: Sequence[blocks.Section], prefix: str) -> str:
    items = []
    for i, section in enumerate(sections, 1):
        below = _contents(section.parts, f"{prefix}{i}-") if section.parts else ""
        items.append(f'<li><a href="#{prefix}{i}">{_escape(section.title)}</a>{below}</li>\n')
    return f"<ol>\n{''.join(items)}</ol>\n"


def _section(section: blocks.Section, anchor: str, level: int) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    parts = "\n".join(_section(part, f"{anchor}-{i}", level + 1) for i, part in enumerate(section.parts, 1))
    heading = f'<h{level} id="{anchor}" dir="auto">{_escape(section.title)}</h{level}>'
    return f'<section aria-labelledby="{anchor}">\n{heading}\n{blocks}\n{parts}</section>'


def _block(block: blocks.Block) -> str:
    match block:
        case blocks.Paragraph(text):
            return f"<p>{_escape(text)}</p>"
        case blocks.Note(text):
            return f'<p class="note">{_escape(text)}</p>'
        case Table():
            return _table(block)
        case blocks.Facts(pairs):
            rows = "\n".join(f"<div><dt>{_escape(name)}</dt><dd>{_cell(value)}</dd></div>" for name, value in pairs)
            return f"<dl>\n{rows}\n</dl>"
        case blocks.Course(steps, texts):
            moments = [{"step": step, "steps": steps[-1], "texts": each} for step, each in zip(steps, texts, strict=True)]
            return element(moments, "Texts at each step of training")
        case blocks.Samples(texts):
            items = "\n".join(f'<li dir="auto">{_escape(text)}</li>' for text in texts)
            return f'<ol class="samples" start="0">\n{items}\n</ol>'
        case blocks.Verbatim(text):
            return f'<pre tabindex="0"><code>{_escape(text)}</code></pre>'
        case blocks.Figure():
            return _figure(block)
        case blocks.Details(summary, inside, unfolded):
            inner = "\n".join(_block(one) for one in inside)
            return f"<details{' open' if unfolded else ''}>\n<summary>{_escape(summary)}</summary>\n{inner}\n</details>"


def _table(table: Table) -> str:
    kinds = [_kind(table.column(i)) for i in range(len(table.columns))]
    heading = "".join(
        f'<th scope="col"{kind}>{_escape(name)}</th>' if name else f"<td{kind}></td>"
        for kind, name in zip(kinds, table.columns, strict=True)
    )
    rows = "\n".join(f"<tr>{_row(row, kinds)}</tr>" for row in table.rows)
    # A region that scrolls must be reachable with the keyboard and say what it is.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_escape(table.title)}">\n'
        f"<table>\n<thead><tr>{heading}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _row(row: Sequence[Cell], kinds: Sequence[str]) -> str:
    first, *others = (f"{kind}>{_cell(content)}" for kind, content in zip(kinds, row, strict=True))
    return f'<th scope="row"{first}</th>' + "".join(f"<td{cell}</td>" for cell in others)


def _kind(cells: Sequence[str]) -> str:
    """The class of a column of numbers or of long texts."""
    if is_numeric(cells):
        return ' class="number"'
    return ' class="long"' if any(len(cell) > LONG_CELL for cell in cells) else ""


def _figure(figure: blocks.Figure) -> str:
    width, height = figure.size
    data = base64.b64encode(figure.png).decode()
    kind = ' class="wide" ' if width > WIDE_PIXELS else " "
    image = f'<img{kind}src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{_escape(figure.alt)}">'
    caption = _escape(figure.caption)
    return (
        f'<figure>\n<div role="region" tabindex="0" aria-label="{caption}">{image}</div>\n'
        f"<figcaption>{caption}</figcaption>\n</figure>"
    )


def _cell(cell: Cell) -> str:
    tag = "" if isinstance(cell, str) else _TAGS[cell.style]
    return f"<{tag}>{_escape(str(cell))}</{tag}>" if tag else _escape(str(cell))
