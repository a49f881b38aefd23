"""Table 1: every system on the same text with an equal budget, scored by the same protocol and timed in turns.

With several budgets, a system is trained once per seed at a constant rate and scored with averaged weights on the way, because
a falling rate would make earlier points worse than trainings of that length. A system whose training has stages or phases
(COSMOS, Duo, LangFlow) is trained anew for each budget. If a method fails, its row holds the error; finished work is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from jpeg_dlm import __version__
from jpeg_dlm.api import Model, load
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import override, to_dict
from jpeg_dlm.encoders.frozen import tensors_sha256
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.entry import EvaluationEntry
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.evaluation.throughput import Subject, measure
from jpeg_dlm.machine.collectives import on_main
from jpeg_dlm.methods.registry import for_method, method_class, names
from jpeg_dlm.results.plain import INLINED
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.studies.budget import Budget, all_steps, step_rows
from jpeg_dlm.studies.compare_tasks import perform, summarized
from jpeg_dlm.studies.scored import Scores, TrainedScores, over_trainings
from jpeg_dlm.studies.workshop import Workshop, parameter_count, training_seconds

CACHED = ", KV cache"  # after the title of a system that is timed with its cache too


@dataclass(frozen=True)
class Comparison:
    """Methods to compare and the conditions they share."""

    base: Config  # of JPEG-DLM; every method derives its own config from it
    methods: tuple[str, ...]
    budgets: tuple[Budget, ...] = ()  # increasing; none is the preset's steps
    overrides: Mapping[str, Any] = field(default_factory=dict)  # options applied to every method
    batch: int = 16  # for timing
    repeats: int = 5
    train_seeds: int = 1
    tasks: tuple[str, ...] = ()  # beside free writing, at the last budget


@dataclass(frozen=True)
class CurvePoint:
    """A model to score: the training that it is of, and the step of it."""

    config: Config
    step: int
    budget: str

    @property
    def tokens(self) -> int:
        """Tokens that the model has seen, in all stages."""
        steps = all_steps(self.config) - self.config.train.steps + self.step
        return steps * step_rows(self.config) * self.config.data.token_len


def method_names(text: str) -> tuple[str, ...]:
    """Parse 'all' or names separated by commas; return them in the paper's order."""
    systems = names("system")
    chosen = systems if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in systems:
            raise UsageError(f"Unknown method '{name}': choose all, or some of {','.join(systems)}.")
    return tuple(name for name in systems if name in chosen)


# ---------------------------------------------------------------- plan and train


@dataclass
class CompareRow:
    """A system in progress: points by training seed, the models of them, and its record in the result."""

    points: dict[int, list[CurvePoint]]
    models: dict[tuple[int, int], Path]  # by seed and number of the point
    record: dict[str, Any]


def plan(asked: Comparison, workshop: Workshop) -> dict[str, CompareRow]:
    """Return the trainings of every system, on prepared text and with the steps that the budgets allow."""
    rows = {name: CompareRow({}, {}, {"method": name, "title": method_class(name).title}) for name in asked.methods}
    for name, row in rows.items():
        with workshop.recorded(row.record, row.record["title"]):
            points = points_of(asked, workshop, name)
            first = points[0].config.train.seed
            # Set the seed last: text, encoder and steps are the same for all seeds.
            row.points = {seed: [_seeded(p, seed) for p in points] for seed in range(first, first + asked.train_seeds)}
            row.record["config"] = to_dict(points[-1].config)
    return rows


def points_of(asked: Comparison, workshop: Workshop, name: str) -> list[CurvePoint]:
    """Return the points of one system."""
    config = for_method(asked.base, name)
    if len(asked.budgets) > 1:
        config = replace(config, train=replace(config.train, schedule="constant"))
    config = workshop.conditions(validate(override(config, asked.overrides)))
    budgets: Sequence[Budget | None] = asked.budgets or (None,)
    spent = [workshop.budgeted(config, budget) for budget in budgets]
    anew = method_class(name).has_phases or method_class(name).first_stage(config) is not None
    trained = spent if anew else [spent[-1]] * len(spent)
    texts = [budget.text if budget else "the preset's steps" for budget in budgets]
    return [CurvePoint(of, end.train.steps, text) for of, end, text in zip(trained, spent, texts, strict=True)]


def _seeded(point: CurvePoint, seed: int) -> CurvePoint:
    return replace(point, config=replace(point.config, train=replace(point.config.train, seed=seed)))


def train(rows: Mapping[str, CompareRow], workshop: Workshop, wait: bool = True) -> None:
    """Train all systems; without `wait`, skip what other processes are training."""

    def one(row: CompareRow, seed: int, config: Config) -> None:
        with workshop.recorded(row.record, row.record["title"]):
            own = [i for i, point in enumerate(row.points[seed]) if point.config == config]
            models = workshop.models(config, [row.points[seed][i].step for i in own])
            row.models |= {(seed, i): path for i, path in zip(own, models, strict=True)}

    seeds = sorted({seed for row in rows.values() for seed in row.points})
    pairs = [(row, seed) for seed in seeds for row in rows.values() if seed in row.points]
    each = [(row, seed, config) for row, seed in pairs for config in dict.fromkeys(p.config for p in row.points[seed])]
    workshop.take_turns([partial(one, *task) for task in each], wait)


def so_far(rows: Mapping[str, CompareRow], workshop: Workshop) -> dict[str, CompareRow]:
    """Return the systems that have a model by now, with their models."""
    for row in rows.values():
        points = {(seed, i): point for seed, points in row.points.items() for i, point in enumerate(points)}
        paths = {key: workshop.model_of(point.config, point.step) for key, point in points.items()}
        row.models |= on_main(lambda paths=paths: {key: path for key, path in paths.items() if path.is_dir()})
    found = {name: row for name, row in rows.items() if row.models or "error" in row.record}
    if not any(row.models for row in found.values()):
        raise UsageError("No system has been trained yet: leave --so-far out to train.")
    return found


# ---------------------------------------------------------------- score


@dataclass(frozen=True)
class ScoredTraining:
    """One training at a point."""

    seed: int
    run: str
    model: str
    training_seconds: float


@dataclass(frozen=True)
class ScoredPoint:
    """The trainings of a system after a budget."""

    budget: str
    tokens_seen: int
    scores: TrainedScores = field(metadata=INLINED)
    runs: Sequence[ScoredTraining]


def evaluate(
    asked: Comparison,
    rows: Mapping[str, CompareRow],
    workshop: Workshop,
    scorer: Callable[[], Scorer],
    request: EvaluationRequest,
) -> dict[str, Any]:
    """Score every model, time the last ones, and assemble the result."""
    if not any(row.models for row in rows.values()):  # most likely for one reason: raise it before a scorer is downloaded
        raise UsageError(f"No system could be trained: {next(iter(rows.values())).record['error']}")
    last: dict[str, Model] = {}
    with workshop.alone("compare"):  # other processes with the same command then reuse the results
        scores = Scores(Evaluation(scorer(), request, workshop.parts, workshop.console))
        for name, row in rows.items():
            with workshop.recorded(row.record, row.record["title"]):
                _score(row, workshop, scores, last, name, asked.tasks)
        speed = _timed(asked, workshop, last)
    budgets = [asdict(budget) for budget in asked.budgets]
    return scores.evaluation.conditions | {
        "version": __version__, "preset": asked.base.preset, "budgets": budgets, "train_seeds": asked.train_seeds,
        "rows": [row.record for row in rows.values()], "anchors": scores.anchors, "speed": speed,
        **({"tasks": list(asked.tasks)} if asked.tasks else {}),
    }  # fmt: skip


def _score(
    row: CompareRow, workshop: Workshop, scores: Scores, last: dict[str, Model], name: str, tasks: Sequence[str]
) -> None:
    """Add to a record the scores of its points, from the first to the last, and what its last models do in tasks."""
    if not row.models:
        return
    found: dict[int, list[tuple[EvaluationEntry, ScoredTraining]]] = {}
    done: list[dict[str, Any]] = []
    for (seed, i), path in sorted(row.models.items(), key=lambda item: item[0][::-1]):
        point = row.points[seed][i]
        model = load(path, str(workshop.ranks.device))
        heldout = workshop.blocks(Path(point.config.data.source), "heldout")
        title = f"{model.method.title}-{point.budget}-{seed}" if len(row.models) > 1 else model.method.title
        source = ModelSource(model, title, 64, heldout)
        entry = scores.entry(source, heldout)
        run = workshop.run_of(point.config)
        of = ScoredTraining(seed, run.name, path.name, training_seconds(run, point.step))
        found.setdefault(i, []).append((entry, of))
        last.setdefault(name, model)
        at_end = i == max(j for _, j in row.models)
        done += [perform(tasks, source, scores.evaluation)] if tasks and at_end else []
        if at_end and seed == min(s for s, j in row.models if j == i):
            last[name] = model
            evaluations = model.config.sampler.evaluations(model.config.data.token_len)
            row.record |= {"entry": entry, "parameters": parameter_count(model), "evaluations": evaluations}
    row.record |= {"tasks": summarized(done)} if tasks else {}
    first = next(iter(row.points.values()))
    row.record["points"] = []
    for i, scored in sorted(found.items()):
        entries, runs = zip(*scored, strict=True)
        over = over_trainings(entries, [run.training_seconds for run in runs])
        row.record["points"].append(ScoredPoint(first[i].budget, first[i].tokens, over, runs))


def _timed(asked: Comparison, workshop: Workshop, models: Mapping[str, Model]) -> dict[str, Any]:
    """Time all models in turns; those with a KV cache twice, because the paper's speeds are relative to AR without one."""
    subjects, identities = [], []
    for model in models.values():
        title, sampler = model.method.title, model.config.sampler
        sha256 = tensors_sha256(model.method.export_state())
        samplers = {title: sampler}
        if hasattr(sampler, "kv_cache"):
            samplers = {title: replace(sampler, kv_cache=False), title + CACHED: replace(sampler, kv_cache=True)}
        for title, sampler in samplers.items():
            subjects.append(Subject(title, model.method, sampler, model.config.data.token_len, model.config.preset, "trained"))
            identities.append([title, to_dict(sampler), sha256])
    depends = {
        "kind": "speed", "batch": asked.batch, "repeats": asked.repeats, "device": str(workshop.ranks.device),
        "samplers": identities,
    }  # fmt: skip
    return workshop.parts.get_or_make("speed", depends, lambda: on_main(lambda: measure(subjects, asked.batch, asked.repeats)))
