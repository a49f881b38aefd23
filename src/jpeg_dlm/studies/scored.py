"""Scores of one source of texts, by the evaluation and by the training text: the columns of comparisons and studies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm import __version__
from jpeg_dlm.evaluation.anchors import ANCHORS, Anchor
from jpeg_dlm.evaluation.entry import EvaluationEntry
from jpeg_dlm.evaluation.evaluate import Evaluation
from jpeg_dlm.evaluation.sources import ModelSource, Source, SourceTexts
from jpeg_dlm.results.spread import Spread, plus_minus, spread
from jpeg_dlm.results.table import Cell, emphasis
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.known_text import KnownText

WRITTEN = ("words", "distinct", "copied")  # by the training text
MEASURES = ("gen_ppl", "entropy", "mauve", *WRITTEN)
HEADINGS = ("Gen-PPL", "entropy (nats)", "MAUVE", "words that exist", "distinct-2 (words)", "copied")
DIGITS = (1, 3, 3, 3, 3, 3)
SPEED = "texts_per_second"


@cache
def known_text(folder: Path) -> KnownText:
    """Return the statistics of a prepared folder, which take some seconds."""
    heldout = Blocks(folder, "heldout")
    return KnownText(Blocks(folder, "train"), heldout, heldout.tokenizer())


def by_training_text(texts: SourceTexts, heldout: Blocks, known: Callable[[Path], KnownText] = known_text) -> dict[str, float]:
    """Return the share of words that exist in the training text, of distinct word pairs, and of copied texts."""
    text = known(heldout.folder)
    end = [text.tokenizer.eos_id] if text.padded else []
    rows = [np.array((ids + end)[: heldout.token_len]) for ids in texts.ids or [] if ids]
    if not rows:
        return dict.fromkeys(WRITTEN, 0.0)
    found = vars(text.measure(rows))
    return {name: found[name] for name in WRITTEN}


@dataclass
class Scores:
    """Scores sources with one evaluation; floors and ceiling are scored once for each held-out text."""

    evaluation: Evaluation
    anchors: dict[str, dict[str, Spread]] = field(default_factory=dict)

    def entry(self, source: Source, heldout: Blocks) -> EvaluationEntry:
        """Return the entry of a source with the measures by the training text."""
        entry = self.evaluation.entry(source, {})
        runs = source.runs(self.evaluation.request.seeds)
        found = [self._written(source, run, heldout) for run in runs]
        if isinstance(source, ModelSource):
            self._bound(source, heldout)
        return replace(entry, measures={**entry.measures, **{name: spread([f[name] for f in found]) for name in WRITTEN}})

    def _written(self, source: Source, run: int, heldout: Blocks) -> dict[str, float]:
        texts = self.evaluation.texts(source, run, {})
        depends = {"kind": "written", "version": __version__, "texts": texts.sha256, "data": heldout.fingerprint}
        label = f"written-{source.name}-seed{run}"
        return self.evaluation.parts.get_or_make(label, depends, lambda: by_training_text(texts, heldout))

    def _bound(self, source: ModelSource, heldout: Blocks) -> None:
        """Score the floors and the ceiling of a held-out text, beside the first model that is compared with it."""
        if self.anchors:
            return
        for kind in ANCHORS:
            anchor = Anchor(kind, source)
            entry = self.entry(anchor, heldout)
            self.anchors[kind] = shown(entry)
            if kind == "real" and not anchor.enough(entry.runs[0].figures.texts):
                self.anchors[kind].pop("mauve", None)  # it would compare the texts with themselves


def shown(entry: EvaluationEntry) -> dict[str, Spread]:
    """Return the measures that tables show, where they were taken."""
    return {name: entry.measures[name] for name in (*MEASURES, SPEED) if name in entry.measures}


@dataclass(frozen=True)
class TrainedScores:
    """Scores over the trainings of one configuration."""

    measures: Mapping[str, Spread]
    reconstruction: Spread | None
    training_seconds: float
    degenerate: Sequence[str]


def over_trainings(entries: Sequence[EvaluationEntry], seconds: Sequence[float]) -> TrainedScores:
    """Summarize trainings: deviations are over training seeds if there are several, else over sampling seeds."""
    measures = shown(entries[0])
    if len(entries) > 1:
        kept = [name for name in measures if all(name in entry.measures for entry in entries)]
        measures = {name: spread([entry.measures[name]["mean"] for entry in entries]) for name in kept}
    codec = [entry.reconstruction for entry in entries if entry.reconstruction is not None]
    degenerate = sorted({sentence for entry in entries for sentence in entry.degenerate})
    return TrainedScores(measures, spread(codec) if codec else None, statistics.fmean(seconds), degenerate)


def cells(measures: Mapping[str, Any]) -> list[str]:
    """Return the cells below `HEADINGS`."""
    return [plus_minus(measures.get(name), digits) for name, digits in zip(MEASURES, DIGITS, strict=True)]


def anchor_rows(anchors: Mapping[str, Any], before: int, after: int) -> list[Sequence[Cell]]:
    """Return the rows of floors and ceiling of a table with so many columns before and after `HEADINGS`, and the name."""
    return [
        [emphasis(ANCHORS[kind]), *[""] * before, *cells(anchors[kind]), *[""] * after] for kind in ANCHORS if kind in anchors
    ]
