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

HOLE = "_"
AGES = ("bright_black", "yellow", "cyan", "bold green")  # colors of a word, from just changed to settled
PLAIN_LINES = 8  # approximate number of lines printed if the output is not a terminal


class Watcher:
    """Callback of the sampler that redraws a panel on a terminal and prints lines elsewhere; shows the first batch only."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.done = False
        self.words: list[tuple[str, int]] = []  # each with the number of updates it has survived

    def __call__(self, step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        if self.done:
            return
        last = step == steps
        if self.live is None and not last and step % max(1, steps // PLAIN_LINES):
            return
        text = self.text(self.model.ended(tokens()[:1])[0].tolist())
        if self.live is None:
            print(f"  step {step:>3}/{steps}  t={t:.2f}  {text}", file=sys.stderr)
        else:
            if step == 0:
                self.live.start()
            self.live.update(
                Panel(self.aged(text), title=f"step {step}/{steps}, t = {t:.2f}", width=min(100, self.console.width)),
                refresh=True,
            )
            if last:
                self.live.stop()
        self.done = last

    def aged(self, text: str) -> Text:
        """Color each word by how long it has been at its place: gray is new, green is settled."""
        before = itertools.chain(self.words, itertools.repeat(("", 0)))
        self.words = [(word, age + 1 if word == old else 0) for word, (old, age) in zip(text.split(), before, strict=False)]
        colored = [(word, AGES[min(age, len(AGES) - 1)]) for word, age in self.words]
        return Text(" ").join(Text(word, style) for word, style in colored)

    def text(self, row: list[int]) -> str:
        """Decode a row, with `HOLE` for every token that is still masked."""
        tokenizer = self.model.tokenizer
        holes = {i for i in row if not 0 <= i < tokenizer.vocab_size} | {tokenizer.mask_id}
        runs = [(hole, list(ids)) for hole, ids in itertools.groupby(row, lambda i: i in holes)]
        return " ".join(HOLE * len(ids) if hole else tokenizer.decode(ids) for hole, ids in runs)
