"""Progress display: no important word is cut at any width, in a terminal, a notebook or a file."""

import builtins
import io
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from jpeg_dlm.machine import console as console_module
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.progress import Progress, duration, flow
from jpeg_dlm.presets import preset
from jpeg_dlm.training.telling import training_progress

VALUES = {
    "ce": 3.811, "cov": 10.75, "feat": 0.94, "flow": 0.9123, "jep": 0.123, "loss": 6.123, "sigreg": 1.252, "var": 0.1398,
    "grad_norm": 1.234, "lr_flow": 1e-3, "rows_per_s": 1234.5,
}  # fmt: skip
TERMS = [f"{name} {value:g}" for name, value in VALUES.items() if name not in ("loss", "lr_flow", "rows_per_s")]
CONFIG = preset("smoke")


class Screen(io.StringIO):
    """What a terminal gets."""

    encoding = "utf-8"
    isatty = lambda self: True  # noqa: E731


def terminal(monkeypatch, width: int, kind: str = "xterm-256color") -> Screen:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def last_picture(text: str) -> list[str]:
    """The lines that stay on a terminal: those after the last clearing, without colors."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-ln-zA-JL-Z]|\x1b\[[0-9;]*m", "", re.split(r"\x1b\[\dK", text)[-1])
    return [line.rstrip() for line in plain.replace("\r", "").splitlines() if line.strip()]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_training_shows_what_matters_and_cuts_no_word(width, monkeypatch):
    screen = terminal(monkeypatch, width)
    config = replace(CONFIG, train=replace(CONFIG.train, steps=6000))
    console = Console()
    with training_progress(console, config, 0, 64) as tell:
        tell(1230, VALUES)
    lines = last_picture(screen.getvalue())
    assert max(map(len, lines)) <= width and len(lines) == (1 if width == 200 else 2)
    assert re.match(r"Training jpeg-dlm  ━+─+  1,230/6,000  20%  \d+ (s|min) left", lines[0])
    assert re.search(r"1,23[45] rows/s  loss 6\.123  ce 3\.811", lines[-1])
    shown = lines[-1].partition("loss 6.123  ")[2].split("  ")
    assert shown == TERMS[: len(shown)] and len(shown) >= {60: 3, 80: 5, 120: 7, 200: 8}[width]


def test_heldout_measures_stay_above_and_whole(monkeypatch):
    screen = terminal(monkeypatch, 60)
    heldout = {f"heldout_{name}": value for name, value in VALUES.items() if name in ("ce", "cov", "feat", "flow", "jep")}
    with training_progress(Console(), CONFIG, 0, 64) as tell:
        tell(10, VALUES)
        tell(10, heldout | {"latent_rank": 0.3, "decode_t0.3": 0.25})
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    first, second, *_ = plain[plain.index("step 10, held out:") :].splitlines()
    assert [*first.split("  ")[1:], *second.split("  ")] == [
        "ce 3.811", "cov 10.75", "feat 0.94", "flow 0.9123", "jep 0.123", "latent_rank 0.3", "decode_t0.3 0.25",
    ]  # fmt: skip


def test_a_warning_stands_above_and_whole(monkeypatch):
    screen = terminal(monkeypatch, 60)
    console = Console()
    with training_progress(console, CONFIG, 0, 64) as tell:
        tell(10, VALUES)
        console.warn("the loss is 9.0, where up to 7.0 would be usual; " * 3)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    lines = [line.rstrip() for line in lines]
    start = lines.index("warning: the loss is 9.0, where up to 7.0 would be usual;")
    assert lines[start + 1].startswith("the loss is 9.0") and max(map(len, lines)) <= 60


def drawn(progress: Progress, width: int, **options) -> list[str]:
    file = io.StringIO()
    RichConsole(file=file, width=width, **options).print(progress)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [16, 20, 33, 40])
def test_on_a_narrow_screen_words_go_to_more_lines(width):
    state = Progress("Training", "steps", 600_000, 0, VALUES)
    state.done = 123_450
    lines = drawn(state, width)
    words = [word for line in lines for word in line.split("  ")]
    assert [word for word in words if not set(word) & set("━─")][:3] == ["Training", "123,450/600,000", "21%"]
    assert {"1,234 rows/s", "loss 6.123"} <= set(words)
    assert all(len(line) <= width or "  " not in line for line in lines)


def test_the_bar_is_as_long_as_the_share():
    state = Progress("Work", "rows", 200, 0)
    state.done = 50
    (line,) = drawn(state, 100)
    assert (line.count("━"), line.count("─")) == (10, 30)
    state.done = 300  # an estimate of the amount may have been too low
    assert drawn(state, 100)[0].count("━") == 40


def test_an_unknown_amount_is_told_by_what_is_done():
    state = Progress("Preparing text", "bytes")
    state.done = 12_345
    assert drawn(state, 80) == ["Preparing text  12,345 bytes  0 s"]


def test_the_time_left_is_that_of_the_steps_taken_here(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("jpeg_dlm.machine.progress.time.monotonic", lambda: now[0])
    state = Progress("Training", "steps", 1000, start=500)
    assert state.left() == "? left"
    now[0], state.done = 160.0, 600  # 100 steps of a minute, 400 to go
    assert state.left() == "4 min left"
    assert [duration(s) for s in (12.4, 89, 90, 5400, 9000)] == ["12 s", "89 s", "2 min", "90 min", "2.5 h"]


def test_words_are_never_divided():
    assert flow(["a b", "cc", "ddddd", "e"], 7) == ["a b  cc", "ddddd", "e"]


def test_a_file_gets_one_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "PLAIN_EVERY_S", 1e9)
    with training_progress(Console(), CONFIG, 0, 64) as tell:
        for step in (10, 20, 600):
            tell(step, VALUES)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "Training jpeg-dlm: 600 steps of 64 rows, starting at step 0."
    assert [line.split("  ")[1] for line in lines] == ["10/600", "600/600"]
    assert all("loss 6.123" in line and "grad_norm 1.234" in line and "left" in line for line in lines)


def test_a_simple_terminal_gets_lines_too(monkeypatch):
    screen = terminal(monkeypatch, 80, "dumb")
    with training_progress(Console(), CONFIG, 0, 64) as tell:
        tell(10, VALUES)
        assert "10/600" in screen.getvalue() and "\x1b" not in screen.getvalue()


# ---------------------------------------------------------------- notebooks


class ZMQInteractiveShell:
    """By this name a notebook is known."""


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook would show: a list per output, of the pictures that it had one after the other."""
    outputs: list[list[dict[str, str]]] = []

    def display(thing, display_id=False):
        outputs.append([thing._repr_mimebundle_([], [])])
        update = lambda again, own=outputs[-1]: own.append(again._repr_mimebundle_([], []))  # noqa: E731
        return SimpleNamespace(update=update) if display_id else None

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("rich._console", None)  # its shared console looks where it is when it is made
    monkeypatch.setattr(console_module, "NOTEBOOK_EVERY_S", 0.0)
    return outputs


def test_a_notebook_shows_one_bar_that_moves(notebook, capsys):
    with Console().progress("Preparing text", "bytes") as report:
        report(10, 100)
        report(50, 100)
    (pictures,) = notebook
    assert [re.findall(r"\d+%", one["text/plain"]) for one in pictures] == [[], ["10%"], ["50%"], ["50%"]]
    assert "━" in pictures[-1]["text/html"]
    assert capsys.readouterr() == ("", "")


def test_training_in_a_notebook(notebook):
    console = Console()
    with training_progress(console, CONFIG, 0, 64) as tell:
        tell(10, VALUES)
        tell(10, {"heldout_ce": 3.5})
        tell(600, VALUES)
    said, bar, heldout = notebook
    assert "600 steps" in said[0]["text/plain"] and "held out:  ce 3.5" in heldout[0]["text/plain"]
    assert "600/600  100%" in bar[-1]["text/plain"] and "loss 6.123" in bar[-1]["text/plain"]


def test_a_quiet_console_shows_nothing_in_a_notebook(notebook):
    with Console(quiet=True).progress("Work", "rows") as report:
        report(1, 2)
    assert not notebook
