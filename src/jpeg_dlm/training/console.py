"""What a person sees while a long command works: progress with an estimate, on a terminal, in a notebook or in a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol, cast

from rich.console import Console as RichConsole
from rich.live import Live

from jpeg_dlm.config import Config
from jpeg_dlm.training.metrics import DIAGNOSIS, HELDOUT
from jpeg_dlm.training.progress import GAP, Progress, flow, measured

OF_DIAGNOSIS = (f"{DIAGNOSIS}ratio_0.3", f"{DIAGNOSIS}trigram")  # the two of some fifty that a line shows
PLAIN_EVERY_S = 20.0  # in a log file a line now and then is enough
NOTEBOOK_EVERY_S = 0.25  # every picture of the progress travels to the browser


class ErrorStream:
    """Standard error for messages that no work should end for: a full disk or a reader that left only silences them."""

    @property
    def target(self) -> Any:
        """The stream itself, of which a live display puts a proxy into `sys.stderr` that would lead back here."""
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
        """rich asks for it to draw bars with characters that there are."""
        return getattr(self.target, "encoding", None) or "ascii"


class Console:
    """Messages go to standard error, so that results on standard output can be piped."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.rich = RichConsole(file=cast(IO[str], ErrorStream()), quiet=quiet, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        self.rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        """A warning is shown even when quiet; where there is progress it stands above it."""
        if self.live:
            self.rich.print(f"warning: {text}", markup=False, soft_wrap=False)
        else:
            print(f"warning: {text}", file=ErrorStream())

    @property
    def live(self) -> bool:
        """Whether what was written can be drawn over: on a terminal that can, and in a notebook."""
        drawable = self.rich.is_terminal and not self.rich.is_dumb_terminal
        return (drawable or self.rich.is_jupyter) and not self.quiet

    @contextmanager
    def progress(self, title: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
        """Yields `report(done, total)` for work whose amount may be unknown."""
        state = Progress(title, unit)
        if not self.live:
            self.say(f"{title} ...")
        with self._shown(state) as show:

            def report(done: int, total: int | None) -> None:
                state.done, state.total = done, total
                show()

            yield report

    @contextmanager
    def training(self, config: Config, start: int, rows_per_step: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
        """Yields `tell(step, values)`; shows step, share, time left, rows per second and losses."""
        total, title = config.train.steps, f"Training {config.method}"
        self.say(f"{title}: {total:,} steps of {rows_per_step:,} rows, starting at step {start:,}.")
        state = Progress(title, "steps", total, start)
        with self._shown(state) as show:

            def tell(step: int, values: dict[str, float]) -> None:
                first, state.done = not state.values, step
                if any(name.startswith(HELDOUT) for name in values):
                    words = measured({name.removeprefix(HELDOUT): value for name, value in values.items() if _is_shown(name)})
                    self._say_words([f"step {step:,}, held out:", *words])
                else:
                    state.values = values
                    show(now=first or step == total)

            yield tell

    def _say_words(self, words: Sequence[str]) -> None:
        """Words on as many lines as it takes, on one where a program may read them."""
        self.say("\n".join(flow(words, self.rich.width)) if self.live else GAP.join(words))

    @contextmanager
    def _shown(self, state: Progress) -> Iterator[Show]:
        """Keeps the progress in sight; yields what shows it anew, soon or `now`."""
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
                yield lambda now=False: None  # it draws itself


def _is_shown(name: str) -> bool:
    return name in OF_DIAGNOSIS or not name.startswith(DIAGNOSIS)


class Show(Protocol):
    def __call__(self, now: bool = False) -> None: ...


def _sometimes(every_s: float, act: Callable[[], None]) -> Show:
    """`act`, but unless it must be now not sooner than `every_s` seconds after it last did."""
    before = time.monotonic()

    def show(now: bool = False) -> None:
        nonlocal before
        if now or time.monotonic() - before >= every_s:
            before = time.monotonic()
            act()

    return show
