"""Table 1: every system on the same text with an equal budget, scored alike and timed in turns.

A method that fails is a row that says so; the others are not lost. Everything finished is found again, so the same command
goes on after a stop.
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
from jpeg_dlm.encoders.base import tensors_sha256
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.evaluate import Evaluation, Request
from jpeg_dlm.evaluation.scoring import Scorer
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.evaluation.throughput import Subject, measure
from jpeg_dlm.methods.registry import METHODS, STAGES, for_method, method_class
from jpeg_dlm.studies.budget import Budget
from jpeg_dlm.studies.workshop import Workshop, parameter_count, training_seconds

# The paper's order; COSMOS is in its Figure 4 instead of Table 1.
ORDER = ("ar", "mdlm", "sedd", "duo", "flm", "langflow", "elf", "cosmos", "jpeg-dlm")
UNCACHED, CACHED = "AR", "AR, KV cache"  # the first is what the paper's speeds are relative to


@dataclass(frozen=True)
class Comparison:
    """What is compared under which conditions."""

    base: Config  # a preset of JPEG-DLM; every method derives its own config from it
    methods: tuple[str, ...]
    budget: Budget | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)  # options that every method gets
    batch: int = 16  # texts at once, when timed
    repeats: int = 5


def method_names(text: str) -> tuple[str, ...]:
    """'all', or names separated by commas, in the paper's order."""
    names = list(ORDER) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METHODS or name in STAGES:
            raise UsageError(f"Unknown method '{name}': choose all, or some of {','.join(ORDER)}.")
    return tuple([name for name in ORDER if name in names] + [name for name in names if name not in ORDER])


def compare(asked: Comparison, workshop: Workshop, scorer: Callable[[], Scorer], request: Request) -> dict[str, Any]:
    """Train, write, score and time; everything `compare.json` holds."""
    rows = {name: {"method": name, "title": method_class(name).title} for name in asked.methods}
    models: dict[str, Model] = {}

    def train(name: str) -> None:
        with workshop.recorded(rows[name], rows[name]["title"]):
            models[name] = _trained(asked, workshop, name, rows[name])

    workshop.take_turns([partial(train, name) for name in rows])
    if not models:  # one cause, most likely: told before a scorer is fetched
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
    """The trained model of a method; what is known of its training goes into `row`."""
    config = validate(override(for_method(asked.base, name), asked.overrides))
    config = workshop.budgeted(workshop.conditions(config), asked.budget)
    run = workshop.train(config)
    model = load(run, str(workshop.ranks.device))
    train = config.train
    steps = train.steps + getattr(config.objective, "codec_steps", 0)
    row |= {
        "run": run.name, "data": config.data.source, "parameters": parameter_count(model), "steps": steps,
        "tokens_seen": steps * train.batch * train.accumulation * workshop.ranks.world * config.data.token_len,
        "training_seconds": training_seconds(run),
    }  # fmt: skip
    return model


def _timed(asked: Comparison, workshop: Workshop, models: Mapping[str, Model]) -> dict[str, Any]:
    """All models in turns; AR twice, because speeds are relative to the one without KV cache."""
    subjects, identities = [], []
    for name, model in models.items():
        sha256 = tensors_sha256(model.method.export_state())
        samplers = {model.method.title: model.config.sampler}
        if name == "ar":
            samplers = {title: replace(model.config.sampler, kv_cache=title == CACHED) for title in (UNCACHED, CACHED)}
        for title, sampler in samplers.items():
            subjects.append(Subject(title, model.method, sampler, model.config.data.token_len, model.config.preset, "trained"))
            identities.append([title, to_dict(sampler), sha256])
    depends = {
        "kind": "speed", "batch": asked.batch, "repeats": asked.repeats, "device": str(workshop.ranks.device),
        "samplers": identities,
    }  # fmt: skip
    return workshop.parts.get_or_make("speed", depends, lambda: measure(subjects, asked.batch, asked.repeats))
