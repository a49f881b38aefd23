"""The result of an evaluation: an entry for each system and sampler. `results.plain` turns it into `results.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpeg_dlm.evaluation.figures import TextFigures
from jpeg_dlm.results.plain import INLINED
from jpeg_dlm.results.spread import Spread


@dataclass(frozen=True)
class Frame:
    """Lengths and conventions shared by all runs of an entry; the first run fixes them to keep the figures comparable."""

    limit: int  # most scored tokens of a text
    cut: int | None  # most scored tokens of a real text, if real texts are not of the generated length
    budget: int  # tokens of a text used for MAUVE
    own_entropy: bool
    ids: bool


@dataclass(frozen=True)
class ModelFacts:
    """The model and the sampler that wrote the texts of an entry."""

    method: str
    title: str
    preset: str
    config: Mapping[str, Any]
    sampler: Mapping[str, Any]
    sampler_label: str
    evaluations: int  # of the network, for a text
    rate: float | None
    seeds: Sequence[int]
    reconstruction: float | None


@dataclass(frozen=True)
class ScoredRun:
    """The scores of the texts of one seed, or of one file."""

    run: int
    identity: Mapping[str, Any]
    figures: TextFigures
    lengths: Mapping[str, Any] | None
    mauve: Mapping[str, Any]  # `skipped` says why there is none
    throughput: Mapping[str, float] | None
    cut_lines: int
    samples: Sequence[str]
    texts_sha256: str


@dataclass(frozen=True)
class EvaluationEntry:
    """The runs of one system with one sampler, beside real and shuffled text."""

    name: str
    reference: str
    frame: Frame
    model: ModelFacts | None = field(metadata=INLINED)  # None for texts of other programs
    identity: Mapping[str, Any]
    measures: Mapping[str, Spread]
    figures: Mapping[str, TextFigures]  # of generated, real and shuffled text
    way_from_shuffled_to_real: float | None
    entropy_gap: float
    degenerate: Sequence[str]
    notes: Sequence[str]
    runs: Sequence[ScoredRun]

    @property
    def label(self) -> str:
        """The system and its sampler."""
        return f"{self.name}, {self.model.sampler_label}" if self.model else self.name

    @property
    def reconstruction(self) -> float | None:
        """The share of held-out tokens that survive the codec."""
        return self.model.reconstruction if self.model else None


def of_models(entries: Sequence[EvaluationEntry]) -> list[tuple[EvaluationEntry, ModelFacts]]:
    """Return the entries whose texts a model wrote, each with the facts about it."""
    return [(entry, entry.model) for entry in entries if entry.model]


@dataclass(frozen=True)
class EvaluationResult:
    """Entries with the conditions of their scores, and the rows of `likelihood`, `continue` and `infill`, where asked."""

    conditions: Mapping[str, Any] = field(metadata=INLINED)
    entries: Sequence[EvaluationEntry]
    tasks: Mapping[str, Sequence[Mapping[str, Any]]] = field(metadata=INLINED)
