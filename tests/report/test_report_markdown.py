"""A report as Markdown: a reader of Markdown shows every text as it was."""

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_folders import tiny_png

from jpeg_dlm.report.markdown import render
from jpeg_dlm.report.page_blocks import Facts, Figure, Paragraph, Report, Samples, Section, Verbatim, code
from jpeg_dlm.results.table import Table

words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).map(lambda s: " ".join(s.split()))


def spans(text):
    """What each inline run of the text shows, with its kinds of content, by a parser that is not ours."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return [
        ("".join(child.content for child in token.children), {child.type for child in token.children})
        for token in tokens
        if token.type == "inline"
    ]


@given(words.filter(bool), words.filter(bool))
@example("0 #", "0")
@example("a ##", "b")
@example("#", "#")
@example("__0__", "0")
def test_any_text_reads_back(a, b):
    table = Table("t", ("h", "i"), ((a, code(b)),))
    text = render(Report("title", "about", (Section(a, (Paragraph(a), table)),)), {})
    *_, heading, paragraph, _, _, cell, styled = spans(text)
    assert heading[0] == paragraph[0] == cell[0] == a and styled == (b, {"code_inline"})
    assert all(kinds <= {"text", "text_special"} for _, kinds in (heading, paragraph, cell))


def test_a_fence_is_longer_than_what_it_holds():
    section = Section("s", (Samples(("a\n```\n# no heading", "b")), Verbatim("echo ````"), Facts((("n", "1.5"),))))
    text = render(Report("t", "a", (section,)), {})
    assert "````text\n[0] a\n```\n# no heading\n[1] b\n````\n" in text and "`````text\necho ````\n`````" in text
    assert "| n | 1.5 |" in text  # numbers need no escape


def test_pictures_lie_beside():
    figure = Figure(tiny_png(), "alt ]", "caption")
    text = render(Report("t", "a", (Section("s", (figure,)),)), {figure: "figures/figure-01.png"})
    assert r"![alt \]](figures/figure-01.png)" in text and "*caption*" in text
