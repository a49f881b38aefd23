"""Messages and progress, for terminals and log files, on standard error, so that results can be piped."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import IO, Any, Protocol, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TimeRemainingColumn

PLAIN_EVERY_S = 20.0  # between lines in a log file


class ErrorStream:
    """Standard error that ignores write errors: a full disk or a closed pipe must not end a run."""

    def __getattr__(self, name: str) -> Any:
        # A live display replaces `sys.stderr` by a proxy that would call back here.
        return getattr(getattr(sys.stderr, "rich_proxied_file", sys.stderr), name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full or gone, closed, never there
            self.__getattr__("write")(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.__getattr__("flush")()


class Report(Protocol):
    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


class Console:
    """Where a command says what it does."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.rich = RichConsole(file=cast(IO[str], ErrorStream()), quiet=quiet, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        self.rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Show a warning, even if quiet, above the progress if there is any."""
        if self.quiet:
            print(f"warning: {text}", file=ErrorStream())
        else:
            self.say(f"warning: {text}")

    @contextlib.contextmanager
    def progress(self, title: str, unit: str, total: int | None = None, done: int = 0) -> Iterator[Report]:
        """Yield `report(done, total, note)`: a bar with the time left on a terminal, else a line every 20 seconds."""
        if self.quiet or not self.rich.is_terminal or self.rich.is_dumb_terminal:
            self.say(f"{title} ...")
            yield self._lines(title, unit, done)
            return
        columns = (BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress("{task.description}", *columns, "{task.fields[note]}", console=self.rich) as progress:
            task = progress.add_task(title, total=total, completed=done, note="")
            yield lambda done, total, note="": progress.update(task, completed=done, total=total, note=note)

    def _lines(self, title: str, unit: str, start: int) -> Report:
        """Return a report of progress as lines of a log file."""
        began = last_line = time.monotonic()

        def report(done: int, total: int | None, note: str = "") -> None:
            nonlocal last_line
            now = time.monotonic()
            if now - last_line < PLAIN_EVERY_S:
                return
            last_line = now
            words = [title, f"{done:,} {unit}" if not total else f"{done:,}/{total:,} {done / total:.0%}"]
            if total and done > start:
                words.append(f"{(now - began) / (done - start) * (total - done) / 60:.0f} min left")
            self.say("  ".join([*words, note]).rstrip())

        return report
