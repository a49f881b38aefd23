"""Budgets: parsing, and the steps that each method gets."""

from dataclasses import replace

import pytest

from jpeg_dlm.config_io import override
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.studies.budget import all_steps, parse_budget, parse_tokens, spend, split_rows, step_rows
from jpeg_dlm.studies.study import read_base


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("2000steps", "steps", 2000),
        ("5Mtokens", "tokens", 5e6),
        ("0.5 k steps", "steps", 500),
        ("10min", "seconds", 600),
        ("1.5h", "seconds", 5400),
        ("90-s", "seconds", 90),
    ],
)
def test_budgets_are_read(text, kind, amount):
    budget = parse_budget(text)
    assert (budget.kind, budget.amount, budget.text) == (kind, pytest.approx(amount), text)


@pytest.mark.parametrize("text", ["", "10", "steps", "ten min", "1.2.3min", "0steps", "10 parsecs", "-5min"])
def test_anything_else_is_refused(text):
    with pytest.raises(UsageError):
        parse_budget(text)


def never(config):
    raise AssertionError("no speed is needed for this budget")


def test_equal_tokens_and_equal_time():
    config = preset("smoke")  # 64 rows of 16 tokens
    assert spend(config, parse_budget("1Mtokens"), never).train.steps == round(1e6 / (64 * 16))
    assert spend(config, parse_budget("7steps"), never).train.steps == 7
    assert spend(config, parse_budget("10s"), lambda c: 0.25).train.steps == 40
    assert spend(config, None, never).train.steps == config.train.steps
    halved = replace(config, train=replace(config.train, accumulation=2))
    assert spend(halved, parse_budget("1Mtokens"), never).train.steps == round(1e6 / (2 * 64 * 16))


def test_a_method_of_two_stages_spends_half_on_each():
    config = for_method(preset("smoke"), "cosmos")
    spent = spend(config, parse_budget("2000steps"), never)
    assert (spent.train.steps, spent.objective.codec_steps) == (1000, 1000)
    timed = spend(config, parse_budget("100s"), lambda c: 0.1 if c.method == "cosmos" else 0.5)
    assert (timed.train.steps, timed.objective.codec_steps) == (500, 100)


@pytest.mark.parametrize("name", ["owt128", "lm1b"])
def test_without_a_budget_a_preset_stays_as_it_is(name):
    """COSMOS trains 200k + 500k steps in the paper's presets (COSMOS)."""
    cosmos = for_method(preset(name), "cosmos")
    spent = spend(cosmos, None, never)
    assert (spent.objective.codec_steps, spent.train.steps, all_steps(spent)) == (200_000, 500_000, 700_000)
    assert spent == cosmos and spend(preset(name), None, never) == preset(name)


@pytest.mark.parametrize(("method", "rows"), [("jpeg-dlm", 24 * 2 * 8), ("cosmos", 512), ("elf", 512)])
def test_a_step_has_its_rows_on_any_number_of_processes(method, rows):
    """Rows per step: the paper's, and those of the baselines' code."""
    config = for_method(preset("owt128"), method)
    for world in (1, 2, 4, 8, 16):
        train = split_rows(config, world).train
        assert train.batch * train.accumulation * world == rows == step_rows(split_rows(config, world))
        assert train.batch <= config.train.batch and train.devices == world
    one = split_rows(config, 1).train
    assert (one.batch, one.accumulation) == (config.train.batch, 8 * config.train.accumulation)
    assert split_rows(config, 8) == config
    with pytest.raises(UsageError, match=f"has {rows} rows, which 5 processes cannot split evenly: start another number"):
        split_rows(config, 5)


def test_tokens_count_the_rows_of_all_devices():
    config = preset("owt128")
    assert spend(config, parse_budget("100Mtokens"), never).train.steps == round(100e6 / (24 * 2 * 8 * 128))


def test_a_batch_that_is_set_is_that_of_each_process():
    for options, rows in (({}, 384), ({"train.accumulation": "3"}, 24 * 3 * 2), ({"train.batch": "5"}, 5 * 2 * 2)):
        base, shared = read_base("owt128", None, options, world=2)
        elf = override(for_method(base, "elf"), shared)
        assert step_rows(split_rows(base, 2)) == rows and split_rows(elf, 2).train.devices == 2
    assert step_rows(read_base("owt128", None, {"train.batch": "5", "train.devices": "4"}, world=2)[0]) == 5 * 2 * 4


@pytest.mark.parametrize(
    ("text", "said"), [("1M,x", "as in 1M,2M,4M, not '1M,x'"), ("", "Give numbers"), ("2M,1M", "must increase")]
)
def test_numbers_of_tokens_that_make_no_curve_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        parse_tokens(text)
