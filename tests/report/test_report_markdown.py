"""The Markdown subset: what is read, and that whatever is written reads back as the same text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_folders import tiny_png

from jpeg_dlm.evaluation.report import markdown_table
from jpeg_dlm.report.blocks import (
    Command,
    Facts,
    Figure,
    Heading,
    Paragraph,
    Report,
    Samples,
    Section,
    Span,
    Table,
    code,
    plain,
)
from jpeg_dlm.report.markdown import inline, parse, render


def test_blocks():
    text = "# A *b*\n\nfirst\nsecond\n\n| x | y |\n|:---|---:|\n| 1 | `a\\|b` |\n| 2 |\nafter\n## End ##\n"
    heading, paragraph, table, after, end = parse(text, "label")
    assert heading == Heading(1, (Span("A "), Span("b", "emphasis")))
    assert paragraph == Paragraph((Span("first second"),))
    assert table == Table("label", (plain("x"), plain("y")), ((plain("1"), code("a|b")), (plain("2"), ())))
    assert (after, end) == (Paragraph((Span("after"),)), Heading(2, (Span("End"),)))


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("a *b c* d", [("a ", "text"), ("b c", "emphasis"), (" d", "text")]),
        ("**b** and *e*", [("b", "strong"), (" and ", "text"), ("e", "emphasis")]),
        ("2 * 3 * 4", [("2 * 3 * 4", "text")]),
        ("`a *b*` ``c`d``", [("a *b*", "code"), (" ", "text"), ("c`d", "code")]),
        ("see [the docs](https://e.org/x)", [("see the docs (https://e.org/x)", "text")]),
        ("[x](javascript:alert(1))", [("[x](javascript:alert(1))", "text")]),
        (r"\*no\* gen_ppl_low <b>", [("*no* gen_ppl_low <b>", "text")]),
        ("", []),
    ],
)
def test_inline(text, spans):
    assert [(span.text, span.style) for span in inline(text)] == spans


def test_our_own_tables_are_read():
    (table,) = parse(markdown_table(("a", "", "c"), [["1", "", "x"], ["2", "y", ""]]), "t")
    assert isinstance(table, Table)
    assert table.heading == (plain("a"), (), plain("c")) and [row[1] for row in table.rows] == [(), plain("y")]


words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).map(lambda s: " ".join(s.split()))


@given(words.filter(bool), words.filter(bool))
def test_any_text_reads_back(a, b):
    table = Table("t", (plain("h"), plain("i")), ((plain(a), code(b)),))
    text = render(Report("title", "about", (Section(a, (Paragraph(plain(a)), table)),)), {})
    title, about, heading, paragraph, again = parse(text, "t")
    assert isinstance(heading, Heading) and heading.content == plain(a)
    assert paragraph == Paragraph(plain(a)) and again == table


def test_a_fence_is_longer_than_what_it_holds():
    section = Section("s", (Samples(("a\n```\n# no heading", "b")), Command("echo ````"), Facts((("n", plain("1.5")),))))
    text = render(Report("t", "a", (section,)), {})
    assert "````text\n[0] a\n```\n# no heading\n[1] b\n````\n" in text and "`````text\necho ````\n`````" in text
    assert "| n | 1.5 |" in text  # numbers need no escape


def test_pictures_lie_beside():
    figure = Figure(tiny_png(), "alt ]", "caption")
    text = render(Report("t", "a", (Section("s", (figure,)),)), {figure: "figures/figure-01.png"})
    assert r"![alt \]](figures/figure-01.png)" in text and "*caption*" in text


@pytest.mark.parametrize("text", ["[" * 30_000, "**a " * 20_000, "*a " * 20_000, "`" * 30_000, "| " * 20_000, "\\" * 30_001])
def test_hostile_markup_is_text(text):
    shown = "".join(span.text for block in parse(text, "t") if isinstance(block, Paragraph) for span in block.content)
    assert re.sub(r"\s", "", shown.replace("\\", "")) == re.sub(r"\s", "", text.replace("\\", ""))
