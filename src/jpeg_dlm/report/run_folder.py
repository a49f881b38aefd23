"""Read a run directory as far as it can be read; nothing is hashed, which is what `verify` is for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpeg_dlm.config_io import read_json_file
from jpeg_dlm.files import MANIFEST, MANIFEST_BYTES, load_json
from jpeg_dlm.folders.checkpoint import STATE, STATE_BYTES, newest_step
from jpeg_dlm.report.reading import Trouble, read_text
from jpeg_dlm.studies.workshop import training_seconds
from jpeg_dlm.training.metrics import HELDOUT, read_metrics


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint by its own record."""

    name: str
    manifest: Mapping[str, Any]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The content of a run directory, as far as it can be read."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    seconds: float | None
    saved: Saved | None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def option(self, group: str, name: str) -> Any:
        values = self.config.get(group)
        return values.get(name) if isinstance(values, dict) else None

    @property
    def progress(self) -> str:
        """Steps done, and of how many if it is not finished."""
        done = max((row["step"] for row in self.metrics), default=0)
        total = self.option("train", "steps")
        return f"{done:,}" if not total or done == total else f"{done:,} of {total:,}"

    def last(self, wanted: Callable[[str], bool]) -> dict[str, float]:
        """The last measured value of each quantity whose name is wanted."""
        return {
            name: float(value)
            for row in self.metrics
            for name, value in row.items()
            if wanted(name) and isinstance(value, (int, float))
        }

    @property
    def losses(self) -> dict[str, float]:
        terms = {name.removeprefix(HELDOUT) for name in self.heldout} | {"loss"}
        return self.last(lambda name: name in terms)

    @property
    def heldout(self) -> dict[str, float]:
        return self.last(lambda name: name.startswith(HELDOUT))


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir()


def is_model(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file() and not (folder / STATE).is_file()


def read_run(folder: Path, trouble: Trouble) -> Run:
    """A run, or a stage within one, whose configuration is only in its checkpoints."""
    saved = trouble.attempt("The newest checkpoint", lambda: _newest(folder), None)
    inherited = saved.state.get("config") if saved and not (folder / "config.json").exists() else None
    return Run(
        folder,
        inherited or read_config(folder, trouble),
        trouble.attempt("The measurements", lambda: read_metrics(folder / "metrics.jsonl"), []),
        None if inherited else trouble.attempt("The time of training", lambda: training_seconds(folder), None),
        saved,
    )


def read_config(folder: Path, trouble: Trouble) -> dict[str, Any]:
    """Return the configuration of a run or model, or nothing if it cannot be read."""
    return trouble.attempt("The configuration", lambda: read_json_file(folder / "config.json"), {})


def _newest(folder: Path) -> Saved | None:
    step = newest_step(folder)
    if step is None:
        return None
    newest = folder / "checkpoints" / f"step-{step:08d}"
    manifest = load_json(newest / MANIFEST, MANIFEST_BYTES)
    return Saved(newest.name, manifest, load_json(newest / STATE, STATE_BYTES))


def samples_of(folder: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the steps of a run at which it wrote samples, the last one first, with their texts."""
    for path in sorted((folder / "samples").glob("step-*.txt"), reverse=True):
        yield int(path.stem.removeprefix("step-")), split_samples(read_text(path))


def split_samples(text: str) -> tuple[str, ...]:
    """Return the texts of a sample file: each begins with its number in brackets at the start of a line."""
    texts: list[str] = []
    for line in text.splitlines():
        match = re.match(rf"\[{len(texts)}\] ?", line)
        if match or not texts:
            texts.append(line[match.end() :] if match else line)
        else:
            texts[-1] += f"\n{line}"
    return tuple(texts)


def duration(seconds: float | None) -> str:
    """Format a time of training; nothing for none."""
    if not seconds:
        return ""
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"
