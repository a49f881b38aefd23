"""The trajectory of a sampling run: the texts that a model would write if it had to stop after a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jpeg_dlm.api import Model
from jpeg_dlm.flow.guidance import keep_fixed
from jpeg_dlm.flow.sampler import Prediction

HOLE = "_"
FRAMES = 48  # at most about as many, spread evenly over the steps
TEXTS = 4  # of the first batch
LATENTS, COORDINATES = 32, 64  # of each text, for a picture of them

Grid = tuple[tuple[float, ...], ...]  # coordinates of each latent


@dataclass(frozen=True)
class Snapshot:
    """Texts after a step, the time of the path (1 is clean), and the latents of each text where there are any."""

    step: int
    steps: int
    texts: tuple[str, ...]
    t: float = 1.0
    latents: tuple[Grid, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what the player reads."""
        facts: dict[str, Any] = {"step": self.step, "steps": self.steps, "t": round(self.t, 4), "texts": self.texts}
        return facts | ({"latents": self.latents} if self.latents else {})


class TrajectoryRecorder:
    """Called by the sampler; keeps snapshots of the first texts of the first batch, and passes each to `notify`."""

    def __init__(
        self, model: Model, fixed: Tensor | None = None, notify: Callable[[Snapshot], None] = lambda snapshot: None
    ) -> None:
        self.model, self.fixed, self.notify = model, fixed, notify
        self.snapshots: list[Snapshot] = []

    def __call__(self, step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
        if self.snapshots and self.snapshots[-1].step == steps:
            return
        if step == steps or step % -(-steps // FRAMES) == 0:
            rows = rows_shown(self.model, tokens()[:TEXTS], self.fixed)
            texts = tuple(readable(self.model, row) for row in rows)
            self.snapshots.append(Snapshot(step, steps, texts, t, shown_latents(tokens)))
            self.notify(self.snapshots[-1])

    @property
    def heading(self) -> str:
        """The system, and how many latents stand for how many tokens."""
        config = self.model.config
        latents = f", {config.model.latent_len} latents for {config.data.token_len} tokens" if config.rate is not None else ""
        return f"{self.model.writer.title}{latents}"


def shown_latents(tokens: Callable[[], Tensor]) -> tuple[Grid, ...]:
    """Return the first latents and coordinates of each text, if the sampler tells them."""
    if not isinstance(tokens, Prediction):
        return ()
    state_BND = tokens.state_BND[:TEXTS, :LATENTS, :COORDINATES].float().cpu()
    return tuple(tuple(tuple(round(x, 2) for x in row) for row in grid) for grid in state_BND.tolist())


def rows_shown(model: Model, tokens: Tensor, fixed: Tensor | None) -> list[list[int]]:
    """Return rows of a step with the given ids in place, up to where they end."""
    fixed_BL = None if fixed is None else fixed.expand_as(tokens)
    return model.ended(keep_fixed(tokens.cpu(), fixed_BL), fixed).tolist()


def readable(model: Model, row: Sequence[int]) -> str:
    """Return a row of token ids as text, with a sign for every token that is still to be written."""
    tokenizer = model.tokenizer
    holes = {i for i in row if not 0 <= i < tokenizer.vocab_size} | {tokenizer.mask_id}
    runs = [(hole, list(ids)) for hole, ids in itertools.groupby(row, lambda i: i in holes)]
    return " ".join(HOLE * len(ids) if hole else tokenizer.decode(ids) for hole, ids in runs)
