"""Run a study that trains: announce the plan, train each configuration once, score every model, assemble the result.

With several budgets, a variant is trained once per seed at a constant rate and scored with averaged weights on the way, because
a falling rate would make earlier points worse than trainings of that length. A system whose training has stages or phases
(COSMOS, Duo, LangFlow) is trained anew for each budget. If a variant fails, the others go on; finished work is reused.
Several processes that share the training make the same plan, and find the results of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from jpeg_dlm import __version__
from jpeg_dlm.api import Model, load
from jpeg_dlm.config import Config
from jpeg_dlm.cost.plan import stages
from jpeg_dlm.encoders.frozen import tensors_sha256
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.frontier import curve_of
from jpeg_dlm.evaluation.metrics import training_text
from jpeg_dlm.evaluation.pairs import pair_scores
from jpeg_dlm.evaluation.results import SystemResult, mean_std
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.table import to_json
from jpeg_dlm.evaluation.texts import BASELINES, ModelSource, Source, TextBaseline
from jpeg_dlm.evaluation.throughput import Subject, measure
from jpeg_dlm.options import to_dict
from jpeg_dlm.studies.plan import Plan, Point, all_steps
from jpeg_dlm.studies.training_cache import TrainingCache, training_seconds
from jpeg_dlm.studies.verdicts import CACHED, MEASURES, OVERLAP, PAIRS, judge
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import batch_of
from jpeg_dlm.util.distributed import on_main
from jpeg_dlm.util.errors import UsageError, minutes

SAMPLES = 4  # texts of a model kept in its record
TEXT_SECONDS = 0.3  # to score a text by the default scorer, with MAUVE, on one core (measured)


def announce(planned: Plan, cache: TrainingCache, evaluation: EvaluationRequest) -> None:
    """Say what will be trained and scored, and about how long it takes; one step of each system is timed for that."""
    left = [config for config in planned.trainings() if not cache.finished(cache.run_of(config), config)]
    speeds: dict[str, float] = {}  # seconds of a step, by method
    for config in left:
        if config.method not in speeds:
            with cache.guard({}, config.method, tell=False):  # the training will tell what fails
                seconds = sum(stage.train.steps * cache.step_seconds(stage) for stage in stages(config))
                speeds[config.method] = seconds / all_steps(config)
    training = sum(speeds.get(config.method, 0.0) * all_steps(config) for config in left)
    texts = evaluation.n or evaluation.protocol.n
    models = sum(len(evaluation.variants(point.config.sampler)) for point in planned.points)
    sets = len(evaluation.seeds) * (models + 2) + 1  # floors have as many seeds as models, real text has one
    cache.console.say(
        f"Plan: {len(left)} trainings, about {minutes(training)}; then {sets} sets of {texts} texts to score, about "
        f"{minutes(sets * texts * TEXT_SECONDS)} on one core. Fewer texts (-n) and --seeds take less."
    )


def train(planned: Plan, cache: TrainingCache, wait: bool = True) -> None:
    """Train all planned configurations; without `wait`, skip those that other processes are training."""

    def one(config: Config, points: Sequence[Point]) -> None:
        with cache.guard(planned.errors, points[0].variant.label):
            cache.train(config, steps=[point.step for point in points])

    cache.take_turns([partial(one, config, points) for config, points in planned.trainings().items()], wait)


# ---------------------------------------------------------------- score


@dataclass
class Scores:
    """Scores sources with one evaluation; floors and ceiling are scored once for each held-out text."""

    evaluation: Evaluation
    baselines: list[dict[str, Any]] = field(default_factory=list)

    def score(self, source: Source, heldout: Blocks) -> tuple[SystemResult, dict[str, Any]]:
        """Return the result of a source, and its measures: means over sampling seeds, with the values of each in `by_seed`.

        Of a frontier, it is the result whose entropy is nearest to real text's, with the quality at matched entropy.
        """
        request, curve, i = self.evaluation.request, None, 0
        variants = request.variants(source.model.config.sampler) if isinstance(source, ModelSource) else [{}]
        entries = [self.evaluation.entry(source, variant) for variant in variants]
        if request.frontier and isinstance(source, ModelSource):
            curve = curve_of(source.name, entries, request.protocol.aggregate)
            i = curve.nearest
        runs = [self._overlap(source, run, heldout, variants[i]) for run in source.runs(request.seeds)]
        overlap = {name: mean_std([run[name] for run in runs]) for name in OVERLAP}
        measures = {name: m for name, m in {**entries[i].measures, **overlap}.items() if name in MEASURES}
        means = {name: m["mean"] for name, m in measures.items()}
        by_seed = {name: m["values"] for name, m in measures.items()}
        if curve:  # what is interpolated has no values by seed
            means |= {"gen_ppl": curve.gen_ppl.value, "entropy": curve.entropy, "frontier": to_json(curve)}
            means |= {"mauve": curve.mauve.value} if curve.mauve else {}
            by_seed = {name: values for name, values in by_seed.items() if name in OVERLAP}
        return entries[i], means | {"by_seed": by_seed}

    def _overlap(self, source: Source, run: int, heldout: Blocks, sampler: dict[str, Any]) -> dict[str, float]:
        """Return the share of words that exist in the training text, of distinct word pairs, and of copied texts."""
        texts = self.evaluation.texts(source, run, sampler)

        def make() -> dict[str, float]:
            text = training_text(heldout.folder)
            rows = text.rows_of(texts.ids or [])
            stats = text.measure(rows) if rows else dict.fromkeys(OVERLAP, 0.0)
            return {name: stats[name] for name in OVERLAP}

        depends = {"kind": "written", "version": __version__, "texts": texts.sha256, "data": heldout.fingerprint}
        return self.evaluation.cache.get_or_compute(f"written-{source.name}-seed{run}", depends, make)

    def score_baselines(self, source: ModelSource, heldout: Blocks) -> None:
        """Score the floors and the ceiling of a held-out text, beside the first model that is compared with it."""
        if any(record["heldout"] == heldout.fingerprint for record in self.baselines):
            return
        for kind, label in BASELINES.items():
            baseline = TextBaseline(kind, source)
            result, measures = self.score(baseline, heldout)
            if kind == "real" and not baseline.enough(result.runs[0].stats.texts):
                measures.pop("mauve", None)  # it would compare the texts with themselves
            self.baselines.append({"label": label, "kind": kind, "heldout": heldout.fingerprint, **measures})


def evaluate(
    planned: Plan, cache: TrainingCache, scorer: Callable[[], Scorer], evaluation: EvaluationRequest, batch: int, repeats: int
) -> dict[str, Any]:
    """Score every model, time the last ones of systems, and assemble the result."""
    request = planned.request
    points = [point for point in planned.points if cache.has_model(point.config, point.step)]
    if not points:  # most likely for one reason: raise it before a scorer is downloaded
        raise UsageError(f"No variant could be trained: {next(iter(planned.errors.values()), 'nothing is trained yet')}")
    records: list[dict[str, Any]] = []
    last: dict[str, tuple[Model, Blocks]] = {}
    with cache.alone(request.name):  # other processes with the same command then reuse the results
        scores = Scores(Evaluation(scorer(), evaluation, cache.parts, cache.console))
        for point in points:
            with cache.guard(planned.errors, point.variant.label):
                model = load(cache.model_of(point.config, point.step), str(cache.ranks.device))
                records.append(_record(point, model, cache, scores))
                if request.study.x == "speed" and point.config.train.seed == points[0].config.train.seed:
                    last[point.variant.label] = model, cache.blocks(Path(point.config.data.source), "heldout")
        speed = {"speed": _timed(last, cache, batch, repeats)} if last else {}
    return scores.evaluation.conditions | {
        "study": request.name,
        "title": request.study.title,
        "preset": request.base.preset,
        "budgets": [asdict(budget) for budget in request.budgets],
        "texts": evaluation.n or evaluation.protocol.n,
        "seeds": len(evaluation.seeds),
        "train_seeds": request.train_seeds,
        "frontier": evaluation.frontier,
        "left_out": planned.expanded.left_out,
        "errors": planned.errors,
        "paper": {variant.label: dict(variant.paper) for variant in planned.expanded.variants},
        "configs": {point.variant.label: to_dict(point.config) for point in points},
        "records": records,
        "baselines": scores.baselines,
        "verdicts": judge(planned.expanded.claims, records),
        **speed,
    }


def _record(point: Point, model: Model, cache: TrainingCache, scores: Scores) -> dict[str, Any]:
    """Return one flat record: labels, changed options, seed, tokens, seconds, and the measures of a model."""
    config, run = point.config, cache.run_of(point.config)
    heldout = cache.blocks(Path(config.data.source), "heldout")
    source = ModelSource(model, f"{point.variant.label}-{point.budget}-{config.train.seed}", 64, heldout)
    result, measures = scores.score(source, heldout)
    scores.score_baselines(source, heldout)
    if heldout.source_len:
        request = scores.evaluation.request
        n, seeds = request.n or request.protocol.n, request.seeds
        pairs = pair_scores(source, scores.evaluation.cache, cache.console, n, seeds, {})
        measures |= {name: pairs[name] for name in PAIRS}
    return {
        "label": point.variant.label,
        "method": config.method,
        "system": model.method.title,
        "rate": 1.0 if config.rate is None else config.rate,
        "width": getattr(config.model, "latent_dim", None),
        "budget": point.budget,
        "seed": config.train.seed,
        "options": cache.options(config),
        "run": run.name,
        "step": point.step,
        "tokens": point.tokens,
        "seconds": training_seconds(run, point.step),
        "encoder_seconds": cache.encoder_seconds(config),
        "parameters": parameter_count(model),
        "evaluations": config.sampler.evaluations(config.data.token_len),
        "reconstruction": result.reconstruction,
        **measures,
        "degenerate": list(result.degenerate),
        "notes": list(result.notes),
        "samples": list(result.runs[0].samples[:SAMPLES]),
    }


def parameter_count(model: Model) -> int:
    """Count the trained parameters that sampling needs, without the frozen text encoder and target networks."""
    parameters = {p.data_ptr() for p in model.method.parameters()}
    return sum(t.numel() for t in model.method.export_state().values() if t.data_ptr() in parameters)  # names may differ


def _timed(models: Mapping[str, tuple[Model, Blocks]], cache: TrainingCache, batch: int, repeats: int) -> dict[str, Any]:
    """Time all models in turns; those with a KV cache twice, because the paper's speeds are relative to AR without one."""
    subjects, identities = [], []
    for label, (model, heldout) in models.items():
        sampler, data = model.config.sampler, model.config.data
        sha256 = tensors_sha256(model.method.export_state())
        samplers = {label: sampler}
        if hasattr(sampler, "kv_cache"):
            samplers = {label: replace(sampler, kv_cache=False), label + CACHED: replace(sampler, kv_cache=True)}
        source = None
        if data.source_len:
            source = batch_of(heldout, [i % len(heldout) for i in range(batch)], model.complete_method().device).source
        for name, options in samplers.items():
            subjects.append(Subject(name, model.method, replace(model.config, sampler=options), "trained", source))
            identities.append([name, to_dict(options), sha256])
    device = str(cache.ranks.device)
    depends = {"kind": "speed", "batch": batch, "repeats": repeats, "device": device, "samplers": identities}
    return cache.parts.get_or_compute("speed", depends, lambda: on_main(lambda: measure(subjects, batch, repeats)))
