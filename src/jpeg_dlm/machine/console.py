"""Progress with an estimate of the time left, for terminals, notebooks and log files."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol, cast

from rich.console import Console as RichConsole
from rich.live import Live

from jpeg_dlm.machine.progress import GAP, Progress, flow

PLAIN_EVERY_S = 20.0  # between lines in a log file
NOTEBOOK_EVERY_S = 0.25  # every update is sent to the browser


class ErrorStream:
    """Standard error that ignores write errors: a full disk or a closed pipe must not end a run."""

    @property
    def target(self) -> Any:
        """The real stream: a live display replaces `sys.stderr` by a proxy that would call back here."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full or gone, closed, never there
            self.target.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.target.flush()

    def isatty(self) -> bool:
        return self.target is not None and self.target.isatty()

    def fileno(self) -> int:
        return self.target.fileno()

    @property
    def encoding(self) -> str:
        """Encoding of the stream; rich uses it to choose the characters of bars."""
        return getattr(self.target, "encoding", None) or "ascii"


class Console:
    """Messages go to standard error, so that results on standard output can be piped."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.rich = RichConsole(file=cast(IO[str], ErrorStream()), quiet=quiet, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        self.rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Show a warning, even if quiet, above the progress if there is any."""
        if self.live:
            self.rich.print(f"warning: {text}", markup=False, soft_wrap=False)
        else:
            print(f"warning: {text}", file=ErrorStream())

    @property
    def live(self) -> bool:
        """True if output can be redrawn in place: on a capable terminal and in a notebook."""
        drawable = self.rich.is_terminal and not self.rich.is_dumb_terminal
        return (drawable or self.rich.is_jupyter) and not self.quiet

    @contextmanager
    def progress(self, title: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
        """Yield `report(done, total)`; `total` is None if unknown."""
        state = Progress(title, unit)
        if not self.live:
            self.say(f"{title} ...")
        with self.shown(state) as show:

            def report(done: int, total: int | None) -> None:
                state.done, state.total = done, total
                show()

            yield report

    def say_words(self, words: Sequence[str]) -> None:
        """Print words on as many lines as needed; on a single line if the output is not live."""
        self.say("\n".join(flow(words, self.rich.width)) if self.live else GAP.join(words))

    @contextmanager
    def shown(self, state: Progress) -> Iterator[Show]:
        """Display the progress; yield a function that updates it, at once with `now`."""
        if not self.live:
            yield _sometimes(PLAIN_EVERY_S, lambda: self.say(state.line()))
        elif self.rich.is_jupyter:
            from IPython.display import display  # pyright: ignore[reportMissingImports] - there in every notebook

            handle = display(state, display_id=True)
            show = _sometimes(NOTEBOOK_EVERY_S, lambda: handle.update(state))
            try:
                yield show
            finally:
                show(now=True)
        else:
            with Live(state, console=self.rich):
                yield lambda now=False: None  # `Live` refreshes by itself


class Show(Protocol):
    def __call__(self, now: bool = False) -> None: ...


def _sometimes(every_s: float, act: Callable[[], None]) -> Show:
    """Return a version of `act` that runs at most once in `every_s` seconds unless called with `now`."""
    before = time.monotonic()

    def show(now: bool = False) -> None:
        nonlocal before
        if now or time.monotonic() - before >= every_s:
            before = time.monotonic()
            act()

    return show
