"""The progress of a training run: step, time left, rows per second and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jpeg_dlm.config import Config
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.progress import Progress, measured
from jpeg_dlm.training.metrics import DIAGNOSIS, HELDOUT

# A line shows these few of about fifty; only contextual decoders have the last.
OF_DIAGNOSIS = (f"{DIAGNOSIS}ratio_0.3", f"{DIAGNOSIS}trigram", f"{DIAGNOSIS}decoder_gap")


@contextmanager
def training_progress(
    console: Console, config: Config, start: int, rows_per_step: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Yield `tell(step, values)`, which shows step, share, time left, rows per second and losses."""
    total, title = config.train.steps, f"Training {config.method}"
    console.say(f"{title}: {total:,} steps of {rows_per_step:,} rows, starting at step {start:,}.")
    state = Progress(title, "steps", total, start)
    with console.shown(state) as show:

        def tell(step: int, values: dict[str, float]) -> None:
            first, state.done = not state.values, step
            if any(name.startswith(HELDOUT) for name in values):
                words = measured({name.removeprefix(HELDOUT): value for name, value in values.items() if _is_shown(name)})
                console.say_words([f"step {step:,}, held out:", *words])
            else:
                state.values = values
                show(now=first or step == total)

        yield tell


def _is_shown(name: str) -> bool:
    return name in OF_DIAGNOSIS or not name.startswith(DIAGNOSIS)
