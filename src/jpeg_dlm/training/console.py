"""What a person sees while a long command works: progress with an estimate, on a terminal or in a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jpeg_dlm.config import Config
from jpeg_dlm.training.metrics import DIAGNOSIS

OF_DIAGNOSIS = (f"{DIAGNOSIS}ratio_0.3", f"{DIAGNOSIS}trigram")  # the two of some fifty that a line shows
PLAIN_EVERY_S = 20.0  # in a log file a line now and then is enough


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
        """A warning is shown even when quiet."""
        print(f"warning: {text}", file=ErrorStream())

    @property
    def live(self) -> bool:
        return self.rich.is_terminal and not self.quiet

    @contextmanager
    def progress(self, title: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
        """Yields `report(done, total)` for work whose amount may be unknown."""
        if not self.live:
            self.say(f"{title} ...")
            yield _plain_reporter(self, title, unit)
            return
        with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                      TimeElapsedColumn(), TimeRemainingColumn(), console=self.rich) as bar:  # fmt: skip
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @contextmanager
    def training(self, config: Config, start: int, rows_per_step: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
        """Yields `tell(step, values)`; shows loss terms, rows per second and the time left."""
        total, title = config.train.steps, f"Training {config.method}"
        self.say(f"{title}: {total:,} steps of {rows_per_step:,} rows, starting at step {start:,}.")
        began, last = time.monotonic(), [0.0]

        def line(step: int, values: dict[str, float]) -> str:
            terms = [f"{k} {v:.4g}" for k, v in values.items() if k in OF_DIAGNOSIS or not k.startswith(("lr_", DIAGNOSIS))]
            return "  ".join(terms)

        if self.live:
            with Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
                          TimeRemainingColumn(), TextColumn("{task.fields[terms]}"), console=self.rich) as bar:  # fmt: skip
                task = bar.add_task(title, total=total, completed=start, terms="")

                def tell_live(step: int, values: dict[str, float]) -> None:
                    if any(k.startswith("heldout_") for k in values):
                        bar.console.print(f"step {step:,}  {line(step, values)}", highlight=False)
                    else:
                        bar.update(task, completed=step, terms=line(step, values))

                yield tell_live
            return

        def tell_plain(step: int, values: dict[str, float]) -> None:
            now = time.monotonic()
            if now - last[0] >= PLAIN_EVERY_S or step == total or any(k.startswith("heldout_") for k in values):
                last[0] = now
                left = (now - began) / max(1, step - start) * (total - step)
                self.say(f"step {step:,}/{total:,}  {_minutes(left)} left  {line(step, values)}")

        yield tell_plain


def _minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"


def _plain_reporter(console: Console, title: str, unit: str) -> Callable[[int, int | None], None]:
    began = time.monotonic()
    last = [began]

    def report(done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - last[0] >= PLAIN_EVERY_S:
            last[0] = now
            left = f", {_minutes((now - began) / max(1, done) * (total - done))} left" if total else ""
            console.say(f"{title}: {done:,}{f' of {total:,}' if total else ''} {unit}{left}")

    return report
