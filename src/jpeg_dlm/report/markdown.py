"""A report as Markdown; nothing that a file holds becomes more than text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jpeg_dlm.report import page_blocks as blocks
from jpeg_dlm.results.table import Cell, Table, visible

_BEGINS_MORE = re.compile(r"^(\s*)(?:(?=[-+](?:\s|$)|[-=]{2}|=\s*$|#)|(\d+)(?=[.)](?:\s|$)))")  # a list, a rule, a heading


def render(report: blocks.Report, pictures: Mapping[blocks.Figure, str]) -> str:
    """A report as Markdown; `pictures` says where each lies."""
    lines = [f"# {_escape(report.title)}", "", _escape(report.about), ""]
    for section in report.sections:
        lines += _section(section, 2, pictures)
    return "\n".join(lines)


def _section(section: blocks.Section, level: int, pictures: Mapping[blocks.Figure, str]) -> list[str]:
    title = re.sub(r"(?<= )#+$", r"\\\g<0>", _escape(section.title))  # at its end they would close the heading
    lines = [f"{'#' * level} {title}", ""]
    for block in section.blocks:
        lines += [_block(block, pictures), ""]
    for part in section.parts:
        lines += _section(part, level + 1, pictures)
    return lines


def _block(block: blocks.Block, pictures: Mapping[blocks.Figure, str]) -> str:
    match block:
        case blocks.Paragraph(text):
            return _escape(text)
        case blocks.Note(text):
            return f"> {_escape(text)}"
        case Table():
            return block.grid(_cell)
        case blocks.Facts(pairs):
            return Table("", ("what", "value"), pairs).grid(_cell)
        case blocks.Course():
            return _block(blocks.Samples(block.texts[-1]), pictures)
        case blocks.Samples(texts):
            return _fenced("\n".join(f"[{i}] {text}" for i, text in enumerate(texts)))
        case blocks.Verbatim(text):
            return _fenced(text)
        case blocks.Figure(_, alt, caption):
            return f"![{_escape(alt)}]({pictures[block]})\n\n*{_escape(caption)}*"
        case blocks.Details(summary, inside):
            inner = "\n\n".join(_block(one, pictures) for one in inside)
            return f"**{_escape(summary)}**\n\n{inner}"


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return _escape(cell)
    # A table ends its cells before it looks for code.
    return _code(cell.text).replace("|", "\\|") if cell.style == "code" else f"*{_escape(cell.text)}*"


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = re.sub(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", visible(text).replace("\n", " "))
    return _BEGINS_MORE.sub(r"\1\2\\", text)


def _code(text: str) -> str:
    text = visible(text).replace("\n", " ")
    ticks = "`" * (1 + _longest_run(text))
    pad = " " if text[:1] in "` " or text[-1:] in "` " else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + _longest_run(text))
    return f"{fence}text\n{visible(text)}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
