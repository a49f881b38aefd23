"""The plan of a study that trains: an equal budget, its variants as configs beside the paper's figures, the models to score."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from jpeg_dlm.config import Config, validate
from jpeg_dlm.cost.plan import stages
from jpeg_dlm.evaluation.paper import QUALITY, paper_tables
from jpeg_dlm.methods.registry import for_method, method_class, names
from jpeg_dlm.options import flatten, override, to_dict
from jpeg_dlm.presets import preset
from jpeg_dlm.studies.catalog import Claim, Study, Variant
from jpeg_dlm.studies.training_cache import TrainingCache, step_rows
from jpeg_dlm.util.errors import UsageError, counted

EVERY_METHOD = ("data.", "encoder.", "train.")  # groups of options that all methods have

# ---------------------------------------------------------------- budgets

Kind = Literal["steps", "tokens", "seconds"]
_UNITS: dict[str, tuple[Kind, float]] = {
    "steps": ("steps", 1),
    "tokens": ("tokens", 1),
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
}
_FACTORS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class Budget:
    """Training budget of every method; `text` is the form in which it was given."""

    kind: Kind
    amount: float
    text: str


def parse_budget(text: str) -> Budget:
    """Parse '2000steps', '5Mtokens' or '10min', with or without a space or dash before the unit."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kMB]?)[\s-]*(steps|tokens|s|min|h)", text.strip())
    kind, factor = _UNITS[match[3]] if match else ("steps", 0)
    amount = float(match[1]) * _FACTORS[match[2]] * factor if match else 0
    if amount <= 0:
        raise UsageError(f"A budget is a positive number and a unit such as 2000steps, 5Mtokens or 10min, not '{text}'.")
    return Budget(kind, amount, text)


def parse_tokens(text: str) -> tuple[Budget, ...]:
    """Parse increasing numbers of tokens, such as '1M,2M,4M'."""
    budgets = tuple(parse_budget(f"{part.strip()}tokens") for part in text.split(","))
    if any(a.amount >= b.amount for a, b in pairwise(budgets)):
        raise UsageError(f"Numbers of tokens must increase, as in 1M,2M,4M, not '{text}'.")
    return budgets


def all_steps(config: Config) -> int:
    """Optimizer steps of a method and of the stages before it."""
    return sum(stage.train.steps for stage in stages(config))


def spend(config: Config, budget: Budget | None, seconds_per_step: Callable[[Config], float]) -> Config:
    """Set the steps that the budget allows; a method with two stages spends half of it on each. None changes nothing."""
    if budget is None:
        return config
    *before, _ = stages(config)

    def steps(stage: Config) -> int:
        if budget.kind == "steps":
            cost = 1.0
        elif budget.kind == "tokens":
            cost = step_rows(stage) * stage.data.token_len
        else:
            cost = seconds_per_step(stage)
        return max(1, round(budget.amount / (1 + len(before)) / cost))

    for stage in before:
        config = method_class(config.method).with_stage_steps(config, steps(stage))
    total = steps(config)
    half, quarter = -(-total // 2), -(-total // 4)  # rounded up: the last evaluation and save are at the end
    return replace(config, train=replace(config.train, steps=total, eval_every=half, save_every=quarter))


# ---------------------------------------------------------------- variants


@dataclass(frozen=True)
class TrainedVariant:
    """A variant as a config, beside the paper's figures."""

    label: str
    config: Config
    paper: Mapping[str, Any]


@dataclass(frozen=True)
class Expanded:
    """The variants of a study for a base config, claims about their labels, and a sentence for each that is left out."""

    variants: list[TrainedVariant]
    claims: list[Claim]
    left_out: list[str]


def read_base(name: str, source: str | None, options: Mapping[str, Any], world: int = 1) -> tuple[Config, dict[str, Any]]:
    """Return a preset of JPEG-DLM with options, and those options to apply again to every config derived from it.

    A step has the rows that the preset is meant for on any number of processes; a batch that was set is that of each process.
    """
    options = dict(options) | ({"data.source": source} if source else {})
    if options.keys() & {"train.batch", "train.accumulation"}:
        options = {"train.devices": world} | options
    return override(preset(name), options), {key: value for key, value in options.items() if key.startswith(EVERY_METHOD)}


def check_options(name: str, study: Study, options: Mapping[str, Any]) -> None:
    """Refuse options that every variant of a study sets itself."""
    for option in options:
        if option.replace("-", "_") in study.sets:
            raise UsageError(f"The study '{name}' sets {option} itself: leave --{option} out.")


def titles(systems: Collection[str]) -> dict[str, str]:
    """Return the titles of systems by name, in the paper's order."""
    return {name: method_class(name).title for name in names("system") if name in systems}


def expand(study: Study, base: Config, only: str = "") -> Expanded:
    """Return the variants with `only` in their label; of two that are equal, the one with the paper's figures."""
    variants: dict[Config, TrainedVariant] = {}
    labels, left_out = {}, []
    for variant in study.variants:
        if reason := _missing(variant, base):
            left_out.append(f"{variant.label} is left out: {reason}.")
            continue
        config = _config(variant, base)
        labels[variant.label] = label = _label(variant, config)
        if config not in variants or variant.paper:
            variants[config] = TrainedVariant(label, config, _paper(variant, base.preset))
    chosen = [variant for variant in variants.values() if only in variant.label]
    if not chosen:
        known = ", ".join(f"'{variant.label}'" for variant in variants.values())
        raise UsageError(f"No variant has '{only}' in its name: choose from {known}.")
    claims = [
        replace(claim, label=labels[claim.label], against=labels[claim.against])
        for claim in study.claims
        if claim.label in labels and claim.against in labels
    ]
    return Expanded(chosen, claims, left_out)


def _missing(variant: Variant, base: Config) -> str:
    """Return the reason if a preset has too few tokens for the rate or too few encoder layers for a variant."""
    tokens, e = base.data.token_len, base.encoder
    if variant.rate and variant.rate * tokens < 1:
        return f"{tokens} tokens leave less than one latent"
    if e.kind in ("small", "random") and e.depth + 1 + variant.changes.get("encoder.layer", -1) < 0:
        return f"the text encoder has {e.depth} layers above its embeddings"
    return ""


def _config(variant: Variant, base: Config) -> Config:
    config = base
    if variant.rate:
        config = replace(base, model=replace(base.model, latent_len=round(variant.rate * base.data.token_len)))
    changes = {name: value(base) if callable(value) else value for name, value in variant.changes.items()}
    return override(for_method(config, variant.method), changes)


def _label(variant: Variant, config: Config) -> str:
    """Return the label with the config's values, and with the exact rate N / L if it is not the nominal one."""
    options = flatten(to_dict(config))
    label = re.sub(r"\{([a-z_.]+)\}", lambda match: str(options[match[1]]), variant.label)
    if variant.rate and config.rate != variant.rate:
        label = label.replace(f"r = {variant.rate:g}", f"r = {config.model.latent_len}/{config.data.token_len}")
    return label


def _paper(variant: Variant, preset_name: str) -> dict[str, Any]:
    """Return the paper's figures for a variant; a system's are of OWT-1024 for that preset, else of LM1B."""
    if variant.paper is None:
        return {}
    table, key = variant.paper
    tables = paper_tables()[table]
    if table == "main":
        rows = tables["owt1024" if preset_name == "owt1024" else "lm1b"]
        row = next((row for row in rows if row["method"] == key), {})
    else:
        row = tables["rows"][key] if isinstance(key, int) else tables[key]
    return {name: row[name] for name in QUALITY if name in row}


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class StudyRequest:
    """A study with the conditions that its variants share."""

    name: str
    study: Study
    base: Config  # of JPEG-DLM; every variant derives from it
    shared: Mapping[str, Any] = field(default_factory=dict)  # options applied to every variant
    budgets: tuple[Budget, ...] = ()  # increasing; none is the preset's steps
    train_seeds: int = 1
    only: str = ""  # a text that labels of variants must contain


@dataclass(frozen=True)
class Point:
    """A model to score: a training of a variant, and a step of it."""

    variant: TrainedVariant
    config: Config
    step: int
    budget: str

    @property
    def tokens(self) -> int:
        """Tokens that the model has seen, in all stages."""
        steps = all_steps(self.config) - self.config.train.steps + self.step
        return steps * step_rows(self.config) * self.config.data.token_len


@dataclass
class Plan:
    """The models of a study, from the first budget to the last, and the variants that failed, by label."""

    request: StudyRequest
    expanded: Expanded
    points: list[Point]
    errors: dict[str, str]

    def trainings(self) -> dict[Config, list[Point]]:
        """Return the points of each configuration; all variants have their first seed before the second."""
        groups: dict[Config, list[Point]] = {}
        for point in sorted(self.points, key=lambda point: point.config.train.seed):
            groups.setdefault(point.config, []).append(point)
        return groups


def plan(request: StudyRequest, cache: TrainingCache) -> Plan:
    """Return every model of a study, on prepared text and with the steps that the budgets allow."""
    expanded = expand(request.study, request.base, request.only)
    planned = Plan(request, expanded, [], {})
    for variant in expanded.variants:
        with cache.guard(planned.errors, variant.label):
            points = _points(variant, request, cache)
            first = points[0].config.train.seed
            # Set the seed last: text, encoder and steps are the same for all seeds of a variant.
            for seed in range(first, first + request.train_seeds):
                planned.points += [
                    replace(p, config=replace(p.config, train=replace(p.config.train, seed=seed))) for p in points
                ]
    return planned


def _points(variant: TrainedVariant, request: StudyRequest, cache: TrainingCache) -> list[Point]:
    """Return the models of one training of a variant, or of one training for each budget."""
    config = override(variant.config, request.shared)
    if len(request.budgets) > 1:
        config = replace(config, train=replace(config.train, schedule="constant"))
    config = cache.conditions(validate(config))
    budgets: Sequence[Budget | None] = request.budgets or (None,)
    spent = [spend(config, budget, cache.step_seconds) for budget in budgets]
    for each, budget in zip(spent, budgets, strict=True):
        if budget and each.train.steps <= each.train.warmup and cache.ranks.is_main:
            cache.console.warn(
                f"{variant.label}: {budget.text} are {counted(each.train.steps, 'step')}, which end inside the warm-up of "
                f"{each.train.warmup}: give more, or set --train.warmup."
            )
    anew = method_class(config.method).has_phases or len(stages(config)) > 1
    trained = spent if anew else [spent[-1]] * len(spent)
    texts = [budget.text if budget else "the preset's steps" for budget in budgets]
    return [Point(variant, of, end.train.steps, text) for of, end, text in zip(trained, spent, texts, strict=True)]
