"""Table 1: every system on the same text with an equal budget, scored by the same protocol and timed in turns.

If a method fails, its row holds the error and the others go on. Finished work is reused, so repeating the command continues
after a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.evaluation.throughput import Subject, measure
from jpeg_dlm.methods.registry import for_method, method_class, names
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.studies.budget import Budget, all_steps
from jpeg_dlm.studies.workshop import Workshop, parameter_count, training_seconds

CACHED = ", KV cache"  # after the title of a system that is timed with its cache too


@dataclass(frozen=True)
class Comparison:
    """Methods to compare and the conditions they share."""

    base: Config  # of JPEG-DLM; every method derives its own config from it
    methods: tuple[str, ...]
    budget: Budget | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)  # options applied to every method
    batch: int = 16  # for timing
    repeats: int = 5


def method_names(text: str) -> tuple[str, ...]:
    """Parse 'all' or names separated by commas; return them in the paper's order."""
    systems = names("system")
    chosen = systems if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in systems:
            raise UsageError(f"Unknown method '{name}': choose all, or some of {','.join(systems)}.")
    return tuple(name for name in systems if name in chosen)


def compare(asked: Comparison, workshop: Workshop, scorer: Callable[[], Scorer], request: EvaluationRequest) -> dict[str, Any]:
    """Train, sample, score and time all methods; return the content of `compare.json`."""
    rows = {name: {"method": name, "title": method_class(name).title} for name in asked.methods}
    models: dict[str, Model] = {}

    def train(name: str) -> None:
        with workshop.recorded(rows[name], rows[name]["title"]):
            models[name] = _trained(asked, workshop, name, rows[name])

    workshop.take_turns([partial(train, name) for name in rows])
    if not models:  # most likely for one reason: raise it before a scorer is downloaded
        raise UsageError(f"No system could be trained: {next(iter(rows.values()))['error']}")
    evaluation = Evaluation(scorer(), request, workshop.parts, workshop.console)
    models = {name: models[name] for name in rows if name in models}  # another process may have changed the order
    for name, model in models.items():
        with workshop.recorded(rows[name], model.method.title):
            heldout = workshop.blocks(Path(rows[name]["data"]), "heldout")
            [rows[name]["entry"]] = evaluation.run([ModelSource(model, model.method.title, 64, heldout)])["entries"]
    return evaluation.conditions | {
        "version": __version__, "preset": asked.base.preset, "budget": asdict(asked.budget) if asked.budget else None,
        "rows": list(rows.values()), "speed": _timed(asked, workshop, models),
    }  # fmt: skip


def _trained(asked: Comparison, workshop: Workshop, name: str, row: dict[str, Any]) -> Model:
    """Train a method, add facts about the training to `row`, and return the model."""
    config = validate(override(for_method(asked.base, name), asked.overrides))
    config = workshop.budgeted(workshop.conditions(config), asked.budget)
    run = workshop.train(config)
    model = load(run, str(workshop.ranks.device))
    train = config.train
    steps = all_steps(config)
    row |= {
        "run": run.name, "data": config.data.source, "parameters": parameter_count(model), "steps": steps,
        "tokens_seen": steps * train.batch * train.accumulation * workshop.ranks.world * config.data.token_len,
        "training_seconds": training_seconds(run),
    }  # fmt: skip
    return model


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
    return workshop.parts.get_or_make("speed", depends, lambda: measure(subjects, asked.batch, asked.repeats))
