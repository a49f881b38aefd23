"""Differences between the recipe of each system in a comparison and its published one, read from the configs themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpeg_dlm.config import Config
from jpeg_dlm.config_io import flatten, to_dict
from jpeg_dlm.methods.registry import for_method, method_class
from jpeg_dlm.presets import preset
from jpeg_dlm.results.table import Table

GROUPS = {"model.": "sizes and network", "objective.": "objective", "train.": "optimization", "sampler.": "sampling"}
# Options that say where and how long a run trains and what it reports, not what it learns.
NOT_RECIPE = frozenset(
    f"train.{name}"
    for name in (
        "steps", "epochs", "devices", "accumulation", "precision", "compile", "checkpoint_layers", "sharding", "timeout_s",
        "seed", "nonfinite", "log", "log_every", "eval_every", "diagnose", "save_every", "keep", "encoder_steps", "encoder_lr",
        "spike_alarm", "collapse_alarm",
    )
) | {"objective.ce_chunk"}  # fmt: skip


def published(method: str, paper_set: str = "lm1b") -> Config:
    """Return the config of a system in the paper's comparison: its authors' recipe at the published size."""
    return for_method(preset(paper_set), method)


def differences(config: Config, paper_set: str = "lm1b") -> dict[str, tuple[Any, Any]]:
    """Return the options of a recipe that differ from the published one, as (published, here); `train.batch` is in rows."""
    before, now = (_options(c) for c in (published(config.method, paper_set), config))
    return {name: (before.get(name), value) for name, value in now.items() if value != before.get(name)}


def _options(config: Config) -> dict[str, Any]:
    values = {name: value for name, value in flatten(to_dict(config)).items() if name.startswith(tuple(GROUPS))}
    t = config.train
    values["train.batch"] = t.batch * t.accumulation * t.devices  # rows of a step
    return {name: value for name, value in values.items() if name not in NOT_RECIPE}


def recipe_table(configs: Mapping[str, Config], paper_set: str = "lm1b") -> Table:
    """Return a row per system with every option that differs from its published recipe."""
    rows = []
    for method, config in configs.items():
        found = differences(config, paper_set)
        parts = [
            [(name.removeprefix(group), *pair) for name, pair in found.items() if name.startswith(group)] for group in GROUPS
        ]
        rows.append([method_class(method).title, *(", ".join(f"{n} {a} -> {b}" for n, a, b in part) for part in parts)])
    head = (
        f"Options that differ from the published recipe of each system ({paper_set}; text, tokenizer and length of training "
        "aside), as published -> here. Nothing else was changed for this size."
    )
    return Table.of(head, ("system", *GROUPS.values()), rows)
