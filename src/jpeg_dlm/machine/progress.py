"""Progress display: a bar, the share done, the time left and the measures, laid out for the width of the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

GAP = "  "
LEAST_BAR, MOST_BAR = 8, 40  # characters; a shorter bar is useless (assumed)


def flow(words: Sequence[str], width: int) -> list[str]:
    """Join words, which may contain spaces, into lines of at most `width` characters; a longer word gets its own line."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(GAP) + len(word) <= width:
            lines[-1] += GAP + word
        else:
            lines.append(word)
    return lines


def duration(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"


def measured(values: Mapping[str, float]) -> list[str]:
    """Format each value as a word, except learning rates."""
    return [f"{name} {value:.4g}" for name, value in values.items() if not name.startswith("lr_")]


@dataclass
class Progress(JupyterMixin):
    """Work of `total` parts that began at part `start`; without a total, it shows only the amount done."""

    title: str
    unit: str
    total: int | None = None
    start: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    done: int = field(init=False)
    began: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self.done = self.start

    def words(self) -> list[str]:
        """Return words for the amount done and the time left."""
        if not self.total:
            return [f"{self.done:,} {self.unit}", duration(time.monotonic() - self.began)]
        return [f"{self.done:,}/{self.total:,}", f"{self.done / self.total:.0%}", self.left()]

    def left(self) -> str:
        """Estimate the time left from the mean speed since the start, evaluations and checkpoints included."""
        if not self.total or self.done <= self.start:
            return "? left"
        return f"{duration((time.monotonic() - self.began) / (self.done - self.start) * (self.total - self.done))} left"

    def measures(self) -> tuple[list[str], list[str]]:
        """Return the words that are always shown (speed and total loss) and those shown if there is room."""
        values = dict(self.values)
        speed, loss = values.pop("rows_per_s", None), values.pop("loss", None)
        always = [f"{speed:,.0f} rows/s" if speed >= 10 else f"{speed:.2g} rows/s"] if speed is not None else []
        always += [f"loss {loss:.4g}"] if loss is not None else []
        return always, measured(values)

    def line(self) -> str:
        """Return everything on one line, for a log file."""
        always, terms = self.measures()
        return GAP.join([self.title, *self.words(), *always, *terms])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, (always, terms) = options.max_width, self.measures()
        if len(self.line()) + len(GAP) + LEAST_BAR <= width:
            yield from self._with_bar([*self.words(), *always, *terms], options)
            return
        yield from self._with_bar(self.words(), options)
        lines = flow(always, width)
        if lines:  # fill the last line with as many terms as fit
            lines[-1] = flow([lines[-1], *terms], width)[0]
        yield from map(Text, lines)

    def _with_bar(self, words: Sequence[str], options: ConsoleOptions) -> RenderResult:
        """Yield title, bar and words on one line, or without the bar on several lines if they do not fit."""
        room = options.max_width - len(GAP.join([self.title, "", *words]))
        if not self.total or room < LEAST_BAR:
            yield from map(Text, flow([self.title, *words], options.max_width))
            return
        whole = min(MOST_BAR, room)
        full = int(whole * min(1.0, self.done / self.total))
        done, rest = ("=", "-") if options.ascii_only else ("━", "─")  # distinct without colors too
        bar = ((done * full, "bar.complete"), (rest * (whole - full), "bar.back"))
        yield Text.assemble(self.title, GAP, *bar, GAP, GAP.join(words))
