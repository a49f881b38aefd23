"""Infilling and continuation in a comparison: what every system is asked for, and the columns of the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.evaluation.evaluate import Evaluation
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.evaluation.tasks import task_results
from jpeg_dlm.results.spread import Spread, plus_minus, spread

TASKS = ("infill", "continue")
LOGITS = 2**27  # most logits of a batch: the gradients of guided methods hold several of this size (assumed)


@dataclass(frozen=True)
class TaskColumn:
    """A measure of a task: its name and heading, and its value in a result of the task, and in that for real text."""

    task: str
    name: str
    heading: str
    digits: int
    value: Callable[[Mapping[str, Any]], float | None]
    real: Callable[[Mapping[str, Any]], float | None] = lambda result: None


def _perplexity(of: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda result: result["scores"][of]["perplexity"]


COLUMNS = (
    TaskColumn("infill", "kept", "infilling: given tokens kept", 3, lambda r: r["kept"]),
    TaskColumn("infill", "recovered", "hidden tokens recovered", 3, lambda r: r["recovered"]),
    TaskColumn("infill", "perplexity", "perplexity of filled texts", 1, _perplexity("filled"), _perplexity("real")),
    TaskColumn(
        "continue", "perplexity", "continuation: perplexity given its prompt", 1, _perplexity("written"), _perplexity("real")
    ),
    TaskColumn(
        "continue", "elsewhere", "given another prompt", 1, _perplexity("written_elsewhere"), _perplexity("real_elsewhere")
    ),
    TaskColumn("continue", "mauve", "MAUVE of continuations", 3, lambda r: r["mauve"].get("mauve")),
    TaskColumn(
        "continue", "repetition", "repeated 4-grams", 3,
        lambda r: r["repetition"]["written"], lambda r: r["repetition"]["real"],
    ),
)  # fmt: skip


def task_names(text: str) -> tuple[str, ...]:
    """Parse names of tasks separated by commas."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in TASKS:
            raise UsageError(f"Unknown task '{name}': choose some of {','.join(TASKS)}.")
    return tuple(name for name in TASKS if name in chosen)


def perform(tasks: Sequence[str], source: ModelSource, evaluation: Evaluation) -> dict[str, Any]:
    """Return the results of one model by task, or the reason why there are none."""
    data = source.model.config.data
    batch = max(1, min(source.batch, LOGITS // (data.token_len * data.vocab_size)))
    own = ModelSource(source.model, source.name, batch, source.heldout)
    found: dict[str, Any] = {}
    for task in tasks:
        try:
            found[task] = {"results": task_results(task, own, evaluation)}
        except (UsageError, DataError) as error:  # what a system does not support, or text too short for the task
            found[task] = {"reason": str(error)}
    return found


def summarized(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize what models of one system found: deviations are over models if there are several, else over seeds."""
    summary: dict[str, Any] = {}
    for task in models[0] if models else ():
        runs = [model[task]["results"] for model in models if "results" in model[task]]
        if not runs:
            summary[task] = {"reason": models[0][task]["reason"]}
            continue
        columns = [column for column in COLUMNS if column.task == task]
        measures = {
            column.name: _spread([[column.value(result) for result in results] for results in runs]) for column in columns
        }
        real = {column.name: column.real(runs[0][0]) for column in columns}
        summary[task] = {"measures": measures, "real": real, "results": [result for results in runs for result in results]}
    return summary


def _spread(values: Sequence[Sequence[float | None]]) -> Spread | None:
    known = [[value for value in found if value is not None] for found in values]
    if not all(known):
        return None
    return spread(known[0] if len(known) == 1 else [statistics.fmean(found) for found in known])


def task_columns(result: Mapping[str, Any]) -> list[TaskColumn]:
    """Return the columns of the tasks that a comparison asked for."""
    return [column for column in COLUMNS if column.task in result.get("tasks", ())]


def task_cells(row: Mapping[str, Any], columns: Sequence[TaskColumn]) -> list[str]:
    """Return the cells of a system; those of a task that it does not do are empty."""
    found = row.get("tasks", {})
    measures = [found.get(column.task, {}).get("measures", {}).get(column.name) for column in columns]
    return [plus_minus(measure, column.digits) for measure, column in zip(measures, columns, strict=True)]


def real_cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[TaskColumn]) -> list[str]:
    """Return the cells of real text, by the first system that did a task."""
    cells = []
    for column in columns:
        of_all = [row["tasks"][column.task].get("real", {}).get(column.name) for row in rows if "tasks" in row]
        value = next((value for value in of_all if value is not None), None)
        cells.append("" if value is None else f"{value:.{column.digits}f}")
    return cells


def task_notes(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence on each task, on what systems do not do, and on those with prompts of their own."""
    rows = [row for row in result["rows"] if "tasks" in row]
    notes = []
    for task in result.get("tasks", ()):
        done = [row["tasks"][task]["results"][0] for row in rows if "results" in row["tasks"][task]]
        if task == "infill" and done:
            other, first = _perplexity("other")(done[0]), done[0]
            notes.append(
                f"Infilling: {first['n']:,} held-out texts, {first['given'] / (first['given'] + first['hidden']):.0%} of their "
                f"tokens given; with the holes filled from other texts their perplexity is {other:.1f}."
            )
        if task == "continue" and done:
            notes.append(f"Continuation: the second half of {done[0]['n']:,} held-out texts after the first.")
            notes += [
                f"{row['title']} sees {blocks} blocks of context and goes on by a block instead."
                for row in rows
                if (blocks := row["config"]["model"].get("context_blocks"))
            ]
        notes += dict.fromkeys(row["tasks"][task]["reason"] for row in rows if "reason" in row["tasks"][task])
    return notes
