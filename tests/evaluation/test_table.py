"""Tables of numbers: the same after JSON, and what Markdown and a terminal make of them."""

import io
import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from jpeg_dlm.cli.show import show
from jpeg_dlm.evaluation.results import mean_std
from jpeg_dlm.evaluation.table import Column, Span, Table, markdown, to_json, write_result
from jpeg_dlm.util.errors import UsageError

numbers = st.floats(allow_nan=False, allow_infinity=False)
cells = (
    st.none()
    | st.text()
    | st.integers()
    | numbers
    | st.tuples(numbers, numbers)
    | st.builds(Span, st.text() | numbers)
    | st.builds(lambda mean, sd: {"mean": mean, "sd": sd}, numbers, st.none() | numbers)
)
columns = st.builds(Column, st.text(), st.none() | st.integers(0, 4), st.booleans())
tables = st.integers(0, 4).flatmap(
    lambda n: st.builds(
        Table,
        st.text(),
        st.tuples(*[columns] * n),
        st.lists(st.tuples(*[cells] * n), max_size=4).map(tuple),
        st.lists(st.text(), max_size=2).map(tuple),
    )
)


@given(tables)
def test_json_keeps_everything(table):
    assert Table.from_json(json.loads(json.dumps(to_json(table)))) == table


def test_cells_are_formatted_when_they_are_drawn():
    column = Column("x", 2)
    assert column.text(mean_std([1.0, 3.0])) == "2.00 ± 1.41" and column.text(mean_std([4.0])) == "4.00"
    assert column.text((1.0, 2.345)) == "1.00 to 2.35" and column.text(None) == "" and column.text(math.nan) == ""
    assert column.text(Span(96.76)) == "96.76" and column.text("failed") == "failed"
    assert Column("x", 1, percent=True).text(0.1234) == "12.3%"
    assert Column("x").text(12345) == "12,345" and Column("x").text(0.123456) == "0.1235"


def test_markdown():
    tables = [Table("Head."), Table.of("First:", ("a", "b", "c"), [[Span("x|y"), 12, ""]], ["One.", "Two."])]
    text = markdown(tables)
    assert text == "Head.\n\nFirst:\n\n| a | b |\n| --- | ---: |\n| *x\\|y* | 12 |\n\nOne.\n\nTwo."
    shown = MarkdownIt("commonmark").enable("table").render(text)  # a parser that is not ours
    assert "<td><em>x|y</em></td>" in shown and "<p>One.</p>\n<p>Two.</p>" in shown
    assert Table.of("", ("a", "b"), []).markdown() == "| a | b |\n| --- | --- |"


def test_a_result_is_written_with_its_tables(tmp_path):
    table = Table.of("Head.", ("a", Column("b", 1)), [["ä", 1.25]], ["Note."])
    data, text = write_result(tmp_path / "deep" / "results", {"version": "1", "x": math.nan}, [table], new=True)
    assert (data.name, text.name) == ("results.json", "results.md") and text.read_text("utf-8") == markdown([table]) + "\n"
    content = json.loads(data.read_text("utf-8"), parse_constant=pytest.fail)  # NaN and Infinity are null
    assert [Table.from_json(value) for value in content["tables"]] == [table] and content["tables"][0]["rows"] == [["ä", 1.25]]
    with pytest.raises((UsageError, OSError)):
        write_result(tmp_path / "deep" / "results", {"version": "3"}, [], new=True)


class Screen(io.StringIO):
    encoding = "utf-8"
    isatty = lambda self: True  # noqa: E731


def test_a_terminal_gets_aligned_numbers_and_nothing_that_commands_it(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    show([Table.of("a\x1b[2J", ("name", Column("value", 2)), [["a\x07", 1.5], [Span("b"), 100.25]], ["[bold] note."])])
    text = screen.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    assert "[U+001B]" in text and "[U+0007]" in text and "\x07" not in text and "[bold] note." in lines
    assert any(line.startswith("a[U+0007]") and line.endswith("   1.50") for line in lines)
    assert any(line.startswith("b ") and line.endswith(" 100.25") for line in lines)
