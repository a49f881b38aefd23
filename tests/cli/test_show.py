"""Result tables: never break a number across lines on a terminal; Markdown in files and pipes."""

import io
import re
import sys

import pytest

from jpeg_dlm.cli.show import show
from jpeg_dlm.evaluation.entry_tables import COLUMNS
from jpeg_dlm.results.table import Table, emphasis, markdown

OWN = ["bundled (JPEG-DLM, 3 x 256)", "64 euler steps", "123.4 ± 5.6", "118.2 to 128.1", "4.123 ± 0.012", "0.951 ± 0.004",
       "0.912 ± 0.010", "0.023 ± 0.002", "12.34", "degenerate?"]  # fmt: skip
REAL = ["real (256)", "", "80.2", "75.1 to 85.2", "4.234", "", "0.900", "0.010", "", ""]
RESULT = Table.of("Gen-PPL by smollm2.", COLUMNS, [OWN, REAL], ["First [bold] sentence.", "Second sentence."])


class Screen(io.StringIO):
    encoding = "utf-8"
    isatty = lambda self: True  # noqa: E731


def seen(monkeypatch, table: Table, width: int) -> str:
    """What a terminal of this width shows, without styles."""
    screen = Screen()
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", screen)
    show([table])
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_terminal_gets_whole_numbers_in_columns(width, monkeypatch):
    text = seen(monkeypatch, RESULT, width)
    lines = text.splitlines()
    assert "|" not in text and "---" not in text and max(map(len, lines)) <= width
    cells = {cell for line in lines for cell in re.split(r"\s{2,}", line.strip())}
    assert {cell for cell in (*OWN[2:], *REAL[2:]) if cell} <= cells
    words = set(text.split())
    assert all(word in words for cell in (*COLUMNS, *OWN, *REAL) for word in cell.split())
    tables = sum("text" in re.split(r"\s{2,}", line.strip()) for line in lines)
    assert tables == {40: 7, 80: 2, 120: 2, 200: 1}[width]
    assert {"Gen-PPL by smollm2.", "First [bold] sentence.", "Second sentence."} <= set(lines)


def test_numbers_stand_below_each_other(monkeypatch):
    lines = seen(monkeypatch, Table.of("", ("name", "value"), [["a", "1.5"], ["b", "100.25"]]), 80).splitlines()
    assert [line.rstrip() for line in lines] == ["name   value", "────────────", "a        1.5", "b     100.25"]


def test_what_would_command_the_terminal_is_shown(monkeypatch):
    text = seen(monkeypatch, Table.of("a\x1b[2J", ("name",), [[emphasis("a\x1b]0;title\x07b")]]), 80)
    assert "\x1b" not in text and "\x07" not in text and "[U+001B]" in text


def test_a_pipe_gets_markdown(capsys):
    show([RESULT])
    assert capsys.readouterr().out == markdown([RESULT]) + "\n"
