"""Studies of trained models: their settings and outcome, and quality against solver steps, a sweep of the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.metrics import MauveMode
from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.evaluation.plots import draw_sweep
from jpeg_dlm.evaluation.protocols import PROTOCOLS, Protocol
from jpeg_dlm.evaluation.results import SystemResult
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.table import Column, Table, to_json, write_result
from jpeg_dlm.evaluation.tables import texts_table
from jpeg_dlm.evaluation.texts import ModelSource
from jpeg_dlm.util.console import Console

PAPER_PRESET = "lm1b"  # of the paper's sweep over steps
DEFAULT_STEPS = (4, 8, 16, 32, 64, 128)  # for other models (assumed)


@dataclass(frozen=True)
class AnalysisRequest:
    """Settings of a study of trained models."""

    n: int  # texts
    seeds: tuple[int, ...]
    scorer: Callable[[], Scorer]  # loaded when first needed
    parts: DiskCache
    console: Console
    mauve: MauveMode = "auto"


@dataclass(frozen=True)
class StudyOutcome:
    """`result` holds everything that the tables and the picture show."""

    result: dict[str, Any]
    tables: Sequence[Table]
    draw: Callable[[Path], Path | None]

    def write(self, stem: Path) -> list[Path]:
        """Write `STEM.json`, `.md` and `.png`; return their paths."""
        written = write_result(stem, self.result, self.tables)
        return [*written, *filter(None, [self.draw(stem.with_suffix(".png"))])]


def analyze(name: str, sources: Sequence[ModelSource], request: AnalysisRequest) -> StudyOutcome:
    """Run the study of this name on trained models."""
    from jpeg_dlm.studies import latents

    studies = {"steps": sweep_steps, "correlation": latents.correlate, "interpolation": latents.interpolate}
    return studies[name](sources, request)


def common_protocol(sources: Sequence[ModelSource]) -> Protocol:
    """Return the paper's protocol if all models share one of its setups, else the default."""
    presets = {source.model.config.preset for source in sources}
    return PROTOCOLS.get(presets.pop() if len(presets) == 1 else "", PROTOCOLS["default"])


def sweep_of(preset: str, own: int) -> tuple[int, ...]:
    """Return the paper's steps for its own setup, else powers of two, and always the model's own number."""
    paper = tuple(row["steps"] for row in paper_tables()["lm1b_steps"]["rows"])
    return tuple(sorted({*(paper if preset == PAPER_PRESET else DEFAULT_STEPS), own}))


def sweep_steps(sources: Sequence[ModelSource], request: AnalysisRequest) -> StudyOutcome:
    """Evaluate every model at every number of steps; a model without steps, such as AR, is one point."""
    settings = EvaluationRequest(common_protocol(sources), request.seeds, request.n, mauve=request.mauve)
    evaluation = Evaluation(request.scorer(), settings, request.parts, request.console)
    entries: list[SystemResult] = []
    for source in sources:
        config = source.model.config
        steps = sweep_of(config.preset, config.sampler.steps) if hasattr(config.sampler, "steps") else ()
        entries += [evaluation.entry(source, {"steps": k}) for k in steps] or [evaluation.entry(source, {})]
    result = evaluation.result(entries)
    values = to_json(result) | {"study": "steps", "paper": paper_tables()["lm1b_steps"]}
    tables = [texts_table(result), _paper_steps()]
    return StudyOutcome(values, tables, lambda path: draw_sweep(entries, evaluation.scorer.name, path))


def _paper_steps() -> Table:
    """Return the paper's sweep, which is of LM1B and of its own scorer."""
    paper = paper_tables()["lm1b_steps"]
    rows = [[row[name] for name in ("steps", "gen_ppl", "entropy", "mauve")] for row in paper["rows"]]
    head = f"The paper's sweep: LM1B, r = {paper['rate']:g}, {paper_tables()['scorer']}, {paper['seeds']} seeds."
    return Table.of(head, ("steps", Column("Gen-PPL", 2), Column("entropy (nats)", 3), Column("MAUVE", 3)), rows)
