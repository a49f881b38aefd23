"""Plans: variants beside the words of the paper (Tables 2, 8, 10, Figures 3, 4), and the steps that a budget gives them."""

from itertools import pairwise

import pytest

from jpeg_dlm.config import validate
from jpeg_dlm.methods.registry import for_method, names
from jpeg_dlm.options import flatten, option_names, override, to_dict
from jpeg_dlm.presets import preset
from jpeg_dlm.studies.catalog import STUDIES, comparison
from jpeg_dlm.studies.plan import all_steps, check_options, expand, parse_budget, parse_tokens, read_base, spend, titles
from jpeg_dlm.studies.training_cache import split_rows, step_rows
from jpeg_dlm.util.errors import UsageError

BASE = preset("owt128")  # the paper's for its studies


def variants(study, base=BASE):
    return expand(STUDIES[study], base)


def changes(config):
    """Options in which a config differs from the paper's."""
    before, now = (flatten(to_dict(of)) for of in (BASE, config))
    return {name: now[name] for name in before if now[name] != before[name]}


def paper(variant):
    return tuple(variant.paper.get(name) for name in ("gen_ppl", "entropy", "mauve"))


def test_ablations_are_the_eight_rows_of_table_2():
    expanded = {v.label: (changes(v.config), paper(v)) for v in variants("ablations").variants}
    assert expanded == {
        "Base": ({}, (48.0, 4.064, 0.912)),
        "sep. nets": ({"model.shared": False}, (92.45, 4.117, 0.786)),
        "w/o jep": ({"objective.jep_weight": 0}, (51.65, 4.016, 0.849)),
        "w/o jep + sep. nets": ({"model.shared": False, "objective.jep_weight": 0}, (131.94, 4.188, 0.632)),
        "w/o feat": ({"objective.feat_weight": 0}, (51.57, 4.069, 0.825)),
        "sigma=0.5": ({"objective.sigma": 0.5}, (61.43, 3.993, 0.817)),
        "sigma=1.5": ({"objective.sigma": 1.5}, (92.78, 4.046, 0.545)),
        "ce at t in [0.5,1]": ({"objective.ce_time_min": 0.5}, (146.8, 4.14, 0.645)),
    }
    # Of another preset: the same rows, around the paper's sigma and the preset's own weights.
    small = override(preset("tiny"), {"objective.jep_weight": "0.7"})
    labels = variants("ablations", small).variants
    assert [v.config.objective.sigma for v in labels] == [1, 1, 1, 1, 1, 0.5, 1.5, 1]
    assert [v.config.objective.jep_weight for v in labels] == [0.7, 0.7, 0, 0, 0.7, 0.7, 0.7, 0.7]


def test_regularizers_are_the_four_rows_of_the_appendix():
    no_sigreg, no_vicreg = {"objective.sigreg_weight": 0}, {"objective.var_weight": 0, "objective.cov_weight": 0}
    expanded = {v.label: (changes(v.config), paper(v)) for v in variants("regularizers").variants}
    assert expanded == {
        "no regularizer": (no_sigreg | no_vicreg, (63.11, 4.09, 0.856)),
        "SIGReg": (no_vicreg, (48.6, 4.062, 0.865)),
        "variance + covariance": (no_sigreg, (40.77, 3.965, 0.868)),
        "SIGReg and variance + covariance": ({}, (48.0, 4.064, 0.912)),
    }


def test_rates_and_widths_are_those_of_figure_3():
    rates, widths = variants("rates"), variants("widths").variants
    assert not rates.left_out and [v.label for v in rates.variants] == ["r = 1", "r = 0.5", "r = 0.25", "r = 0.125"]
    assert {v.config.model.latent_len: v.config.rate for v in rates.variants} == {128: 1, 64: 0.5, 32: 0.25, 16: 0.125}
    assert [v.config.model.latent_dim for v in widths] == [256, 512, 768, 1024] and widths[1].config == BASE
    for expanded in (rates.variants, widths):
        assert [paper(v)[0] for v in expanded] == [None, 48.0, None, None]  # the others are only in a picture


def test_lengths_that_do_not_divide_are_told_and_rates_without_a_latent_left_out():
    expanded = variants("rates", override(preset("smoke"), {"data.token_len": 12}))
    labels = [v.label for v in expanded.variants]
    assert labels == ["r = 1", "r = 0.5", "r = 0.25", "r = 2/12"]
    assert {(c.label, c.against) for c in expanded.claims} == set(pairwise(labels))
    expanded = variants("rates", override(preset("smoke"), {"data.token_len": 4}))
    assert [v.config.model.latent_len for v in expanded.variants] == [4, 2, 1]
    assert expanded.left_out == ["r = 0.125 is left out: 4 tokens leave less than one latent."]


@pytest.mark.parametrize(
    ("width", "heads", "expected"), [(128, 4, [64, 128, 192, 256]), (20, 2, [8, 20, 32, 40]), (4, 2, [4, 8])]
)
def test_widths_of_another_preset_keep_the_proportion(width, heads, expected):
    base = override(preset("smoke"), {"model.latent_dim": width, "model.codec_heads": heads})
    expanded = variants("widths", base).variants
    assert [v.config.model.latent_dim for v in expanded] == expected
    assert [v.config.model.latent_dim for v in expanded if v.paper] == [width]  # the paper's 512 is the preset's own
    for v in expanded:
        validate(v.config)


def test_joint_and_two_stage_at_each_rate():
    expanded = variants("joint-vs-two-stage").variants
    pairs = [(method, rate) for method in ("jpeg-dlm", "cosmos") for rate in (1, 0.5, 0.25, 0.125)]
    assert [(v.config.method, v.config.rate) for v in expanded] == [*pairs, ("elf", None)]
    assert {v.label: paper(v) for v in expanded if v.paper} == {
        "JPEG-DLM, r = 0.5": (48.0, 4.064, 0.912),
        "COSMOS, r = 1": (240.811, 3.9033, 0.1167),
        "COSMOS, r = 0.5": (122.46, None, 0.358),
    }
    assert [v.config.sampler.steps for v in expanded] == [64] * 4 + [200] * 4 + [64]  # (paper)
    assert expanded[8].config == for_method(BASE, "elf") and expanded[1].config == BASE


def test_encoder_layers_are_those_of_the_appendix_as_far_as_they_exist():
    expanded = variants("encoder-layers").variants
    assert [(v.config.method, v.config.rate, v.config.encoder.layer, paper(v)) for v in expanded] == [
        ("cosmos", 1, -1, (240.811, 3.9033, 0.1167)),
        ("cosmos", 1, -2, (154.551, 3.9736, 0.3009)),
        ("cosmos", 1, -3, (163.196, 3.9717, 0.2677)),
    ]
    tiny = preset("tiny")  # two layers: -3 are the embeddings
    assert [v.label for v in variants("encoder-layers", tiny).variants] == ["layer -1", "layer -2", "layer -3"]
    shallow = variants("encoder-layers", override(tiny, {"encoder.depth": 1}))
    assert [v.label for v in shallow.variants] == ["layer -1", "layer -2"] and len(shallow.left_out) == 1
    assert shallow.left_out[0].startswith("layer -3 is left out")


@pytest.mark.parametrize("name", ["owt128", "tiny", "smoke"])
def test_every_variant_can_be_trained_and_no_two_are_the_same(name):
    for study in STUDIES.values():
        if study.variants:
            expanded = expand(study, preset(name))
            configs = [validate(v.config) for v in expanded.variants]
            assert len(set(configs)) == len(configs) and study.sets <= set(option_names())
            labels = {v.label for v in expanded.variants}
            assert {label for claim in expanded.claims for label in (claim.label, claim.against)} <= labels


def test_what_a_study_sets_itself_cannot_be_given():
    for study, option in (("encoder-layers", "encoder.layer"), ("rates", "model.latent-len"), ("ablations", "objective.sigma")):
        with pytest.raises(UsageError, match=option):
            check_options(study, STUDIES[study], {option: "1"})
    check_options("ablations", STUDIES["ablations"], {"objective.jep_weight": "0.7"})
    check_options("widths", STUDIES["widths"], {"model.latent_dim": "64"})  # the widths are in proportion to it


def test_only_some_variants():
    assert [v.label for v in expand(STUDIES["rates"], BASE, "0.5").variants] == ["r = 0.5"]
    with pytest.raises(UsageError, match="r = 0.25"):
        expand(STUDIES["rates"], BASE, "nothing")


def test_a_comparison_has_every_system_beside_the_papers_figures():
    for name, gen_ppl in (("tiny", 96.76), ("owt1024", 34.52)):
        expanded = expand(comparison(titles(names("system"))), preset(name))
        ours = next(v for v in expanded.variants if v.label == "JPEG-DLM")
        assert ours.paper["gen_ppl"] == gen_ppl and {v.config.method for v in expanded.variants} == set(names("system"))
        assert len(expanded.claims) == 2 * (len(expanded.variants) - 1)
    assert comparison({"ar": "AR"}).claims == ()


# ---------------------------------------------------------------- budgets


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
def test_other_budgets_are_refused(text):
    with pytest.raises(UsageError):
        parse_budget(text)
    with pytest.raises(UsageError):  # numbers of tokens must be some, and increase
        parse_tokens(f"20,{text}")


def never(config):
    raise AssertionError("no speed is needed for this budget")


def test_equal_tokens_and_equal_time():
    config = preset("smoke")  # 64 rows of 16 tokens
    assert spend(config, parse_budget("1Mtokens"), never).train.steps == round(1e6 / (64 * 16))
    assert spend(config, parse_budget("7steps"), never).train.steps == 7
    assert spend(config, parse_budget("10s"), lambda c: 0.25).train.steps == 40
    assert spend(config, None, never).train.steps == config.train.steps
    halved = override(config, {"train.accumulation": 2})
    assert spend(halved, parse_budget("1Mtokens"), never).train.steps == round(1e6 / (2 * 64 * 16))
    # 8 devices with 2 x 24 rows of 128 tokens
    assert spend(BASE, parse_budget("100Mtokens"), never).train.steps == round(100e6 / (24 * 2 * 8 * 128))


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
    config = for_method(BASE, method)
    for world in (1, 2, 4, 8, 16):
        train = split_rows(config, world).train
        assert train.batch * train.accumulation * world == rows == step_rows(split_rows(config, world))
        assert train.batch <= config.train.batch and train.devices == world
    one = split_rows(config, 1).train
    assert (one.batch, one.accumulation) == (config.train.batch, 8 * config.train.accumulation)
    assert split_rows(config, 8) == config
    with pytest.raises(UsageError, match="--train.batch"):
        split_rows(config, 5)


def test_a_batch_that_is_set_is_that_of_each_process():
    for options, rows in (({}, 384), ({"train.accumulation": "3"}, 24 * 3 * 2), ({"train.batch": "5"}, 5 * 2 * 2)):
        base, shared = read_base("owt128", None, options, world=2)
        elf = override(for_method(base, "elf"), shared)
        assert step_rows(split_rows(base, 2)) == rows and split_rows(elf, 2).train.devices == 2
    assert step_rows(read_base("owt128", None, {"train.batch": "5", "train.devices": "4"}, world=2)[0]) == 5 * 2 * 4
