"""The commands that train a run again, from what the run recorded of every `train` that worked in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpeg_dlm.config_io import flatten
from jpeg_dlm.report.page_blocks import Block, Paragraph, Verbatim
from jpeg_dlm.training.record import INVOCATIONS, read_rows

AGAIN = "AGAIN"  # the folder of the repetition


def training_commands(folder: Path, config: Mapping[str, Any], threads: int) -> list[Block]:
    """Return the commands that give the same weights, in order."""
    taken = effective(read_rows(folder / INVOCATIONS), str(config.get("method")))
    if not taken or taken[0]["step"]:
        said = "How it was begun is not recorded; unless its options were changed on the way, this trains it again:"
        taken = [{"config": config, "threads": threads, "processes": 1}]
    else:
        said = "To train it again:" if len(taken) == 1 else "To train it again, in this order, as its options were changed:"
    blocks: list[Block] = [Paragraph(said)]
    for i, row in enumerate(taken):
        after = taken[i + 1] if i + 1 < len(taken) else None
        first = ["--config", str(folder / "config.json")]
        words = [*(first if i == 0 else ["--resume"]), "--threads", str(row["threads"]), "--out", AGAIN]
        words += _options(taken[i - 1]["config"] if i else config, row["config"])
        if after and after["stage"] == config.get("method") and after["step"] != row["config"]["train"]["steps"]:
            words += ["--stop-at", str(after["step"])]
        blocks.append(Verbatim(shlex.join([*_program(row["processes"]), "train", *words])))
        if after and after["stage"] != config.get("method"):
            place = f"at step {after['step']:,} of its stage '{after['stage']}'"
            blocks.append(Paragraph(f"This one was stopped {place}, before the next began."))
    return blocks


def effective(rows: Sequence[Mapping[str, Any]], method: str) -> list[Mapping[str, Any]]:
    """Return the invocations that left something, and of several with the same options in a row the first."""
    stages = list(dict.fromkeys([*(row["stage"] for row in rows if row["stage"] != method), method]))
    left: list[Mapping[str, Any]] = []
    for row in rows:
        while left and _place(left[-1], stages) >= _place(row, stages):
            left.pop()
        left.append(row)
    return [row for before, row in zip([None, *left], left, strict=False) if before is None or _asked(before) != _asked(row)]


def _place(row: Mapping[str, Any], stages: Sequence[str]) -> tuple[int, int]:
    return stages.index(row["stage"]), row["step"]


def _asked(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["config"], row["threads"], row["processes"]


def _options(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The options by which a config differs from another, as they are typed."""
    known, words = flatten(before), []
    for name, value in flatten(now).items():
        if name not in known or known[name] != value:
            words += [f"--{name.replace('_', '-')}", _typed(value)]
    return words


def _typed(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _program(processes: int) -> list[str]:
    if processes == 1:
        return ["jpeg-dlm"]
    return ["torchrun", "--nproc-per-node", str(processes), "-m", "jpeg_dlm"]
