"""Differences of recipes, against the configs of the presets."""

from dataclasses import replace

import pytest

from jpeg_dlm.methods.registry import for_method, names
from jpeg_dlm.presets import preset
from jpeg_dlm.studies.recipes import GROUPS, differences, published, recipe_table


@pytest.mark.parametrize("name", names("system"))
def test_the_published_recipe_does_not_differ_from_itself(name):
    assert differences(published(name)) == {}


def test_what_a_small_preset_changes_is_named_with_both_values():
    elf = differences(for_method(preset("captions"), "elf"))
    assert elf["train.lr"] == (2e-3, 1e-2) and elf["objective.noise_scale"] == (2.0, 1.0)
    assert elf["sampler.grid"] == ("random", "uniform") and elf["train.batch"] == (512, 64)
    assert not {"train.steps", "train.seed", "data.token_len", "train.optimizer"} & elf.keys()
    changed = replace(published("mdlm"), train=replace(published("mdlm").train, lr=0.5, eval_every=7))
    assert differences(changed) == {"train.lr": (3e-4, 0.5)}


def test_a_row_for_each_system():
    configs = {name: for_method(preset("captions"), name) for name in names("system")}
    table = recipe_table(configs)
    assert table.columns == ("system", *GROUPS.values()) and len(table.rows) == len(configs)
    langflow = dict(zip(table.columns, table.rows[list(configs).index("langflow")], strict=True))
    assert "hidden 768 -> 192" in langflow["sizes and network"] and "proposal_rate 1.0 -> 20.0" in langflow["objective"]
