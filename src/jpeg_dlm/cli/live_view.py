"""Shows noise becoming text: the prediction of the first sample after some of the steps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from torch import Tensor

from jpeg_dlm.api import Model
from jpeg_dlm.report.trajectory import readable, rows_shown

AGES = ("bright_black", "yellow", "cyan", "bold green")  # colors of a word, from just changed to settled
PLAIN_LINES = 8  # approximate number of lines printed if the output is not a terminal


class Watcher:
    """Callback of the sampler that redraws a panel on a terminal and prints lines elsewhere, for the first batch alone."""

    def __init__(self, model: Model, fixed: Tensor | None = None, every_block: bool = False) -> None:
        self.model, self.fixed, self.every_block = model, fixed, every_block
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.done = False
        self.words: list[tuple[str, int]] = []  # each with the number of moments that it has stood at its place

    def __call__(self, step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        if self.done and not (self.every_block and step == 0):
            return
        last = step == steps
        if self.live is None and not last and step % max(1, steps // PLAIN_LINES):
            return
        text = readable(self.model, rows_shown(self.model, tokens()[:1], self.fixed)[0])
        if self.live is None:
            print(f"  step {step:>3}/{steps}  t={t:.2f}  {text}", file=sys.stderr)
        else:
            if step == 0:
                self.live.start()
            self.live.update(
                Panel(self.colored(text), title=f"step {step}/{steps}, t = {t:.2f}", width=min(100, self.console.width)),
                refresh=True,
            )
            if last:
                self.live.stop()
        self.done = last

    def colored(self, text: str) -> Text:
        """Return the text with each word colored by how long it has stood at its place: gray is new, green is settled."""
        before = itertools.chain(self.words, itertools.repeat(("", 0)))
        pairs = zip(text.split(), before, strict=False)
        self.words = [(word, age + 1 if word == old else 0) for word, (old, age) in pairs]
        return Text(" ").join(Text(word, AGES[min(age, len(AGES) - 1)]) for word, age in self.words)
