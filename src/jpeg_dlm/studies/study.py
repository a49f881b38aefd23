"""Building blocks of studies: variants or models, an evaluation, and an outcome with a table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.machine.console import Console
from jpeg_dlm.presets import preset
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import Table, write_result
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.studies.conjectures import Conjecture


@dataclass(frozen=True)
class Variant:
    """A configuration to train and the paper's figures for it (OWT-128, gpt2-large)."""

    label: str  # in tables
    config: Config
    paper: Mapping[str, Any] = field(default_factory=dict)  # gen_ppl, entropy, mauve, if the paper states them
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the axes of the picture, such as rate or width


@dataclass(frozen=True)
class Variants:
    """The variants of a study, and a sentence for each row of the paper that the preset cannot reproduce."""

    variants: list[Variant]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingStudy:
    """Variants of a preset, trained with an equal budget; `draw(result, path)` draws the picture."""

    title: str
    variants: Callable[[Config], Variants]
    draw: Callable[[Mapping[str, Any], Path], Path | None]
    sets: tuple[str, ...] = ()  # options that the study sets itself
    conjectures: tuple[Conjecture, ...] = ()  # of the paper, which the result judges


@dataclass(frozen=True)
class Asked:
    """Settings for a study of trained models."""

    n: int  # texts
    seeds: tuple[int, ...]
    batch: int
    scorer: Callable[[], Scorer]  # loaded when first needed
    parts: Parts
    console: Console
    mauve: str = "auto"


@dataclass(frozen=True)
class StudyOutcome:
    """`result` holds everything that the table and the picture show."""

    result: dict[str, Any]
    tables: Sequence[Table]
    draw: Callable[[Path], Path | None]

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write `study-NAME.json`, `.md` and `.png` in a folder; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"study-{name}"
        written = write_result(stem, self.result, self.tables)
        return [*written, *filter(None, [self.draw(stem.with_suffix(".png"))])]


EVERY_METHOD = ("data.", "encoder.", "train.")  # groups of options that all methods have


def read_base(
    name: str, source: str | None, options: Mapping[str, Any], world: int = 1
) -> tuple[Config, dict[str, Any]]:  # fmt: skip
    """Return a preset of JPEG-DLM with options, and those options to apply again to every config derived from it.

    A step has the rows that the preset is meant for on any number of processes; a batch that was set is that of each process.
    """
    options = dict(options) | ({"data.source": source} if source else {})
    if options.keys() & {"train.batch", "train.accumulation"}:
        options = {"train.devices": world} | options
    return override(preset(name), options), {key: value for key, value in options.items() if key.startswith(EVERY_METHOD)}
