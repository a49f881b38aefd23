"""Budgets: parsing, and the steps that each method gets."""

from dataclasses import replace

import pytest

from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.studies.budget import parse_budget, parse_tokens, spend


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


@pytest.mark.parametrize(
    ("text", "said"), [("1M,x", "as in 1M,2M,4M, not '1M,x'"), ("", "Give numbers"), ("2M,1M", "must increase")]
)
def test_numbers_of_tokens_that_make_no_curve_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        parse_tokens(text)
