"""What the stages of a run share, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jpeg_dlm.encoders import FrozenEncoder
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.feature_cache import FeatureCache
from jpeg_dlm.training.record import Invocation
from jpeg_dlm.training.signals import StopSignal

STATISTICS_ROWS = 4096  # rows over which feature statistics are measured (assumed: plenty for a mean per channel)


@dataclass(frozen=True)
class Outcome:
    """The last step of a run, what stopped it (None if it finished), and the stage that was training then."""

    step: int
    stopped_by: str | None
    stage: str = ""

    @property
    def saved(self) -> bool:
        """True if there is a checkpoint to resume from, that is, after the first step."""
        return self.step > 0


class StageStopped(Exception):
    """A stage was asked to stop, so later stages must not start."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"stopped by {outcome.stopped_by} at step {outcome.step}")
        self.outcome = outcome


@dataclass(frozen=True)
class Bench:
    """Objects that all stages of a run share."""

    blocks: Blocks
    heldout: Blocks
    ranks: Ranks
    console: Console
    stop: StopSignal
    invocation: Invocation | None
    encoder: FrozenEncoder | None = None
    cache: FeatureCache | None = None


def statistics_rows(blocks: Blocks) -> Iterator[list[int]]:
    """Yield the numbers of the rows used for feature statistics, batch by batch."""
    rows = range(min(STATISTICS_ROWS, len(blocks)))
    return (list(rows[start : start + 256]) for start in range(0, len(rows), 256))
