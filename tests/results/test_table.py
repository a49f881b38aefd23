"""Tables: the same after JSON, and what Markdown makes of them."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.entry_tables import COLUMNS
from jpeg_dlm.results.spread import plus_minus, spread
from jpeg_dlm.results.table import Span, Table, emphasis, is_numeric, markdown, markdown_table, write_result

cells = st.text() | st.builds(Span, st.text(), st.sampled_from(["emphasis", "code"]))
tables = st.integers(0, 4).flatmap(
    lambda n: st.builds(
        Table,
        st.text(),
        st.tuples(*[st.text()] * n),
        st.lists(st.tuples(*[cells] * n), max_size=4).map(tuple),
        st.lists(st.text(), max_size=2).map(tuple),
    )
)


@given(tables)
def test_json_keeps_everything(table):
    assert Table.from_json(json.loads(json.dumps(asdict(table)))) == table


def test_rows_are_as_long_as_the_heading():
    with pytest.raises(ValueError, match="not as long as its heading"):
        Table("t", ("a", "b"), (("1",),))


def test_markdown():
    found = markdown([Table("Head."), Table.of("First:", ("a", "b"), [[emphasis("x|y"), "1\n2"]], ["One.", "Two."])])
    assert found == "Head.\n\nFirst:\n\n| a | b |\n| --- | --- |\n| *x\\|y* | 1 2 |\n\nOne.\n\nTwo."
    shown = MarkdownIt("commonmark").enable("table").render(found)  # a parser that is not ours
    assert "<td><em>x|y</em></td>\n<td>1 2</td>" in shown and "<p>One.</p>\n<p>Two.</p>" in shown


def test_columns_without_content_are_left_out():
    rows = [
        ["a", "64", "1.5", "1 to 2", "4.1", "", "0.9", "0.1", "12", ""],
        ["real", "", "1", "1 to 1", "4.2", "", "1", "0", "", ""],
    ]
    heading, _, own, real = markdown_table(COLUMNS, rows).splitlines()
    assert heading == "| text | steps | Gen-PPL | 95% interval | entropy (nats) | distinct-2 | repeated 4-grams | texts/s |"
    assert own.count("|") == real.count("|") == heading.count("|")
    assert markdown_table(("a", "b"), []) == "| a | b |\n| --- | --- |"


def test_a_result_is_written_with_its_tables(tmp_path):
    table = Table.of("Head.", ("a",), [["ä"]], ["Note."])
    data, text = write_result(tmp_path / "deep" / "results", {"version": "1", "entries": []}, [table], new=True)
    assert (data.name, text.name) == ("results.json", "results.md") and text.read_text("utf-8") == markdown([table]) + "\n"
    content = json.loads(data.read_text("utf-8"))
    assert [Table.from_json(one) for one in content.pop("tables")] == [table] and content == {"version": "1", "entries": []}
    write_result(tmp_path / "deep" / "results", {"version": "2"}, [])
    assert json.loads(data.read_text()) == {"version": "2", "tables": []}
    with pytest.raises((UsageError, OSError)):
        write_result(tmp_path / "deep" / "results", {"version": "3"}, [], new=True)
    assert json.loads(data.read_text())["version"] == "2"


@pytest.mark.parametrize("column", [["1.5 ± 0.2", "failed", "2"], ["", "-3 M", "1 to 2"], ["12%", "1e-4", "5 of 7"]])
def test_a_column_of_numbers(column):
    assert is_numeric(column) and not is_numeric([*column, "a", "b", "c", "d"])


def test_mean_and_deviation():
    assert (
        plus_minus(spread([1.0, 3.0]), 2) == "2.00 ± 1.41" and plus_minus(spread([4.0]), 0) == "4" and plus_minus(None, 1) == ""
    )
