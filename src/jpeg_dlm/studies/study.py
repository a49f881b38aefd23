"""The parts of a study: configurations or models, an evaluation, and an outcome of tables and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import override
from jpeg_dlm.evaluation.scoring import Scorer
from jpeg_dlm.presets import preset
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import Table, write_result
from jpeg_dlm.training.console import Console


@dataclass(frozen=True)
class Variant:
    """A configuration to train and what the paper found for it (OWT-128, gpt2-large)."""

    label: str  # as the table names it
    config: Config
    paper: Mapping[str, Any] = field(default_factory=dict)  # gen_ppl, entropy, mauve, as far as the paper gives them
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the picture is ordered by, such as rate or width


@dataclass(frozen=True)
class Variants:
    """The variants that a study trains, and a sentence for each of the paper's rows that the preset has no room for."""

    variants: list[Variant]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingStudy:
    """Variants of a preset, trained with an equal budget; `draw(result, path)` makes the picture."""

    title: str
    variants: Callable[[Config], Variants]
    draw: Callable[[Mapping[str, Any], Path], Path | None]
    sets: tuple[str, ...] = ()  # options whose values are the study's own, whatever the preset says


@dataclass(frozen=True)
class Asked:
    """The request to a study of trained models."""

    n: int  # texts
    seeds: tuple[int, ...]
    batch: int
    scorer: Callable[[], Scorer]  # loaded when it is first needed
    parts: Parts
    console: Console
    mauve: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """`result` is plain JSON and holds everything that the tables and the picture show."""

    result: dict[str, Any]
    tables: Sequence[Table]
    draw: Callable[[Path], Path | None]

    def write(self, folder: Path, name: str) -> list[Path]:
        """`study-NAME.json`, `.md` and `.png` in a folder."""
        stem = folder / f"study-{name}"
        written = write_result(stem, self.result, self.tables)
        return [*written, *filter(None, [self.draw(stem.with_suffix(".png"))])]


EVERY_METHOD = ("data.", "encoder.", "train.")  # groups of options that all methods have


def read_base(name: str, source: str | None, options: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """A preset of JPEG-DLM with options, from which others derive, and those options that every derived config gets again.

    Other methods and the paper's recipes replace some of `data`, `encoder` and `train`; what a person asks for holds for all.
    """
    options = dict(options) | ({"data.source": source} if source else {})
    return override(preset(name), options), {key: value for key, value in options.items() if key.startswith(EVERY_METHOD)}
