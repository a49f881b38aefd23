"""Run a study that trains: plan the variants, train each configuration once, evaluate.

Several processes that share the training make the same plan, and find the results of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from jpeg_dlm import __version__
from jpeg_dlm.api import load
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.entry import EvaluationEntry
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.studies.budget import Budget, all_steps
from jpeg_dlm.studies.conjectures import conjecture_table, judge
from jpeg_dlm.studies.scored import Scores, over_trainings, shown
from jpeg_dlm.studies.study import StudyOutcome, Variant, read_base
from jpeg_dlm.studies.variant_report import diagnosis_table, study_table
from jpeg_dlm.studies.variants import TRAINING
from jpeg_dlm.studies.workshop import Workshop, last_diagnosis, last_latents, parameter_count, training_seconds

SHOWN = 4  # texts per run kept in the result


@dataclass(frozen=True)
class Question:
    """A study with its base config and training budget."""

    study: str
    base: Config  # of JPEG-DLM; every variant derives from it
    shared: Mapping[str, Any] = field(default_factory=dict)  # options applied to every variant
    budget: Budget | None = None
    train_seeds: int = 1
    only: str = ""  # a text that labels of variants must contain


def ask(
    study: str, preset: str, source: str | None, options: Mapping[str, Any], budget: Budget | None = None,
    train_seeds: int = 1, only: str = "", world: int = 1,
) -> Question:  # fmt: skip
    """Build a question from command line values; reject options that the study sets itself."""
    for option in options:
        if option.replace("-", "_") in TRAINING[study].sets:
            raise UsageError(f"The study '{study}' sets {option} itself: leave --{option} out.")
    return Question(study, *read_base(preset, source, options, world), budget, train_seeds, only)


@dataclass
class Row:
    """A variant in progress: a configuration per training seed, the finished runs, and its record in the result."""

    variant: Variant
    title: str  # in messages
    configs: list[Config] = field(default_factory=list)
    runs: dict[int, Path] = field(default_factory=dict)  # by training seed
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """All training that a question requires."""

    question: Question
    rows: list[Row]
    left_out: list[str]


def plan(question: Question, workshop: Workshop) -> Plan:
    """Return every configuration of a study, on prepared text and with the steps that the budget allows."""
    derived = TRAINING[question.study].variants(question.base)
    chosen = [variant for variant in derived.variants if question.only in variant.label]
    if not chosen:
        known = ", ".join(f"'{variant.label}'" for variant in derived.variants)
        raise UsageError(f"No variant of '{question.study}' has '{question.only}' in its name: choose from {known}.")
    rows = [Row(variant, f"{question.study}: {variant.label}") for variant in chosen]
    for row in rows:
        row.record |= {"label": row.variant.label, "paper": dict(row.variant.paper), "facts": dict(row.variant.facts)}
        with workshop.recorded(row.record, row.title):
            config = validate(override(row.variant.config, question.shared))
            config = workshop.budgeted(workshop.conditions(config), question.budget)
            # Set the seed last: text, encoder and steps are the same for all seeds of a variant.
            seeds = range(config.train.seed, config.train.seed + question.train_seeds)
            row.configs = [replace(config, train=replace(config.train, seed=seed)) for seed in seeds]
    return Plan(question, rows, derived.left_out)


def train(planned: Plan, workshop: Workshop, wait: bool = True) -> None:
    """Train all planned configurations; without `wait`, skip those that other processes are training."""

    def one(row: Row, config: Config) -> None:
        with workshop.recorded(row.record, row.title):
            row.runs[config.train.seed] = workshop.train(config)

    # Train all variants with the first seed before the second, so that all processes finish at about the same time.
    rows = [row for row in planned.rows if row.configs]
    pairs = [(row, row.configs[i]) for i in range(planned.question.train_seeds) for row in rows]
    workshop.take_turns([partial(one, row, config) for row, config in pairs], wait)


def so_far(planned: Plan, workshop: Workshop) -> Plan:
    """Return the part of a plan that is trained by now, with a sentence on each variant that lacks a training."""
    rows, left_out = [], list(planned.left_out)
    for row in planned.rows:
        each = {config.train.seed: (workshop.run_of(config), config) for config in row.configs}
        runs = {seed: run for seed, (run, config) in each.items() if workshop.finished(run, config)}
        rows += [replace(row, runs=runs)] if runs or "error" in row.record else []
        if len(runs) < (wanted := planned.question.train_seeds) and "error" not in row.record:
            left_out.append(f"{row.variant.label}: {len(runs)} of {wanted} trainings so far.")
    if not rows:
        raise UsageError(f"No training of '{planned.question.study}' has ended yet: leave --so-far out to train.")
    return replace(planned, rows=rows, left_out=left_out)


def evaluate(
    planned: Plan, workshop: Workshop, scorer: Callable[[], Scorer], request: EvaluationRequest, batch: int = 64
) -> StudyOutcome:
    """Score every trained run and assemble the result."""
    question, study, rows = planned.question, TRAINING[planned.question.study], planned.rows
    if not any(row.runs for row in rows):  # most likely for one reason: raise it before a scorer is downloaded
        raise UsageError(f"No variant could be trained: {rows[0].record['error']}")
    with workshop.alone(f"study-{question.study}"):  # other machines with the same command then reuse the results
        scores = Scores(Evaluation(scorer(), request, workshop.parts, workshop.console))
        beside: dict[str, Any] = {}
        for row in rows:
            with workshop.recorded(row.record, row.title):
                trained = [config for config in row.configs if config.train.seed in row.runs]
                found = [_scored(row, config, workshop, scores, batch, beside) for config in trained]
                row.record |= summary(*zip(*found, strict=True)) if found else {}
    result = {
        "study": question.study, "title": study.title, "version": __version__, "preset": question.base.preset,
        "budget": asdict(question.budget) if question.budget else None, "scorer": scores.evaluation.scorer.name,
        "protocol": asdict(request.protocol), "texts": request.n or request.protocol.n, "seeds": len(request.seeds),
        "train_seeds": question.train_seeds, "left_out": planned.left_out, "rows": [row.record for row in rows],
        "anchors": scores.anchors, **beside,
    }  # fmt: skip
    tables = [study_table(result), *diagnosis_table(result)]
    if study.conjectures:
        result["conjectures"] = judge(study.conjectures, result["rows"])
        tables.append(conjecture_table(result["conjectures"]))
    return StudyOutcome(result, tables, partial(study.draw, result))


def _scored(
    row: Row, config: Config, workshop: Workshop, scores: Scores, batch: int, beside: dict[str, Any]
) -> tuple[EvaluationEntry, dict[str, Any]]:
    """Return the scores of one trained run and its record; add the figures of real and shuffled text to `beside`."""
    run = row.runs[config.train.seed]
    model = load(run, str(workshop.ranks.device))
    heldout = workshop.blocks(Path(config.data.source), "heldout")
    entry = scores.entry(ModelSource(model, run.name, batch, heldout), heldout)
    beside |= {name: asdict(entry.figures[name]) for name in ("real", "shuffled")}
    return entry, {
        "run": run.name, "seed": config.train.seed, "steps": all_steps(config),
        "training_seconds": training_seconds(run), "parameters": parameter_count(model),
        "measures": shown(entry), "latents": last_latents(run), "diagnosis": last_diagnosis(run),
        "reconstruction": entry.reconstruction, "degenerate": entry.degenerate, "notes": entry.notes,
        "samples": entry.runs[0].samples[:SHOWN],
    }  # fmt: skip


def summary(entries: Sequence[EvaluationEntry], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the scores of a row over its runs, and the runs."""
    scores = over_trainings(entries, [run["training_seconds"] for run in runs])
    return {
        "runs": list(runs), "measures": scores.measures, "reconstruction": scores.reconstruction,
        "training_seconds": scores.training_seconds, "parameters": runs[0]["parameters"], "degenerate": scores.degenerate,
    }  # fmt: skip
