"""Markdown in and out: the small part of it that this project's own files use.

Read: headings, paragraphs, pipe tables, *emphasis*, **strong**, `code`, backslash escapes; a link becomes its text and address.
Anything else is text, so nothing that a file holds can become more than text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from jpeg_dlm.evaluation.report import markdown_table
from jpeg_dlm.report.blocks import (
    Block,
    Command,
    Details,
    Facts,
    Figure,
    Heading,
    Note,
    Paragraph,
    Report,
    Rich,
    Samples,
    Section,
    Span,
    Table,
    plain,
    visible,
)

_HEADING = re.compile(r"(#{1,6})\s+(.*?)(?:\s+#+)?\s*")
_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?")  # the line under a table's heading
_CELL_END = re.compile(r"(?<!\\)\|")
_ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")
_BEGINS_MORE = re.compile(r"^(\s*)(?:(?=[-+](?:\s|$)|[-=]{2}|=\s*$|#)|(\d+)(?=[.)](?:\s|$)))")  # a list, a rule, a heading
_STYLED = re.compile(
    r"""\\(?P<escaped>[!-/:-@\[-`{-~])
      | (?P<ticks>(?<!`)`+(?!`)) (?P<code>.+?) (?<!`)(?P=ticks)(?!`)
      | \*\*(?=\S) (?P<strong>(?:\\.|[^*\\])+) (?<=\S)\*\*
      | \*(?=[^\s*]) (?P<emphasis>(?:\\.|[^*\\])+) (?<=\S)\*
      | \[(?P<link>(?:\\.|[^\[\]\\])+)\]\((?P<address>[^()\s]*)\)""",
    re.VERBOSE | re.DOTALL,
)


# ---------------------------------------------------------------- reading


def parse(text: str, label: str) -> list[Block]:
    """The blocks of a Markdown text; `label` names its tables to those who do not see them."""
    blocks: list[Block] = []
    for filled, group in itertools.groupby(text.splitlines(), lambda line: bool(line.strip())):
        if filled:
            blocks += _paragraphs_and_tables(list(group), label)
    return blocks


def _paragraphs_and_tables(lines: list[str], label: str) -> Iterator[Block]:
    """Blocks of lines between blank ones; headings and tables also begin without a blank line."""
    words: list[str] = []
    while lines:
        line = lines.pop(0).strip()
        heading = _HEADING.fullmatch(line)
        is_table = "|" in line and bool(lines) and "|" in lines[0] and _RULE.fullmatch(lines[0].strip()) is not None
        if (heading or is_table) and words:
            yield Paragraph(inline(" ".join(words)))
            words = []
        if heading:
            yield Heading(len(heading[1]), inline(heading[2]))
        elif is_table:
            body = list(itertools.takewhile(lambda row: "|" in row, lines[1:]))
            del lines[: 1 + len(body)]
            yield _table(line, body, label)
        else:
            words.append(line)
    if words:
        yield Paragraph(inline(" ".join(words)))


def _table(heading: str, body: Sequence[str], label: str) -> Table:
    rows = [[inline(cell) for cell in _cells(line)] for line in (heading, *body)]
    width = max(map(len, rows))
    whole = [tuple(row + [()] * (width - len(row))) for row in rows]
    return Table(label, whole[0], tuple(whole[1:]))


def _cells(line: str) -> list[str]:
    line = line.strip().removeprefix("|")
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    return [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(line)]


def inline(text: str) -> Rich:
    """Styled text of one paragraph or cell."""
    spans: list[Span] = []
    end = 0
    for match in _STYLED.finditer(text):
        _append(spans, Span(text[end : match.start()]))
        _append(spans, _styled(match))
        end = match.end()
    _append(spans, Span(text[end:]))
    return tuple(spans)


def _append(spans: list[Span], span: Span) -> None:
    """Text in the style of the text before it belongs to it."""
    if spans and spans[-1].style == span.style == "text":
        span = Span(spans.pop().text + span.text)
    if span.text:
        spans.append(span)


def _styled(match: re.Match[str]) -> Span:
    kind, content = next((name, match[name]) for name in ("escaped", "code", "strong", "emphasis", "link") if match[name])
    if kind == "code":
        return Span(content[1:-1] if len(content) > 2 and content[0] == content[-1] == " " else content, "code")
    content = _ESCAPE.sub(r"\1", content) if kind != "escaped" else content
    if kind == "link":
        return Span(content if content == match["address"] else f"{content} ({match['address']})")
    return Span(content, "strong" if kind == "strong" else "emphasis" if kind == "emphasis" else "text")


# ---------------------------------------------------------------- writing


def render(report: Report, pictures: Mapping[Figure, str]) -> str:
    """A report as Markdown; `pictures` says where each lies."""
    lines = [f"# {_escape(report.title)}", "", _escape(report.about), ""]
    for section in report.sections:
        lines += _section(section, 2, pictures)
    return "\n".join(lines)


def _section(section: Section, level: int, pictures: Mapping[Figure, str]) -> list[str]:
    lines = [f"{'#' * level} {_escape(section.title)}", ""]
    for block in section.blocks:
        lines += [_block(block, level + 1, pictures), ""]
    for part in section.parts:
        lines += _section(part, level + 1, pictures)
    return lines


def _block(block: Block, level: int, pictures: Mapping[Figure, str]) -> str:
    match block:
        case Heading(below, content):
            return f"{'#' * min(6, level + below - 1)} {_rich(content)}"
        case Paragraph(content):
            return _rich(content)
        case Note(text):
            return f"> {_escape(text)}"
        case Table(_, heading, rows):
            return _markdown_rows(heading, rows)
        case Facts(pairs):
            return _markdown_rows((plain("what"), plain("value")), [(plain(name), value) for name, value in pairs])
        case Samples(texts):
            return _fenced("\n".join(f"[{i}] {text}" for i, text in enumerate(texts)))
        case Command(text):
            return _fenced(text)
        case Figure(_, alt, caption):
            return f"![{_escape(alt)}]({pictures[block]})\n\n*{_escape(caption)}*"
        case Details(summary, blocks):
            inner = "\n\n".join(_block(one, level + 1, pictures) for one in blocks)
            return f"**{_escape(summary)}**\n\n{inner}"


def _markdown_rows(heading: Sequence[Rich], rows: Sequence[Sequence[Rich]]) -> str:
    return markdown_table([_rich(c, True) for c in heading], [[_rich(c, True) for c in row] for row in rows])


def _rich(content: Rich, in_table: bool = False) -> str:
    return "".join(_span(span, in_table) for span in content)


def _span(span: Span, in_table: bool) -> str:
    if span.style == "code":  # a table ends its cells before it looks for code
        return _code(span.text).replace("|", "\\|") if in_table else _code(span.text)
    mark = {"text": "", "emphasis": "*", "strong": "**"}[span.style]
    return f"{mark}{_escape(span.text)}{mark}"


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = re.sub(r"[\\`*\[\]<>|&~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", visible(text).replace("\n", " "))
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
