"""The lists of variants beside the paper's own words: its Tables 2, 8 and 10, and the sets of its Figures 3 and 4."""

from dataclasses import replace

import pytest

from jpeg_dlm.config import validate
from jpeg_dlm.config_io import option_names, override
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.studies.catalog import STUDIES
from jpeg_dlm.studies.small_budgets import recipes
from jpeg_dlm.studies.variant_report import diagnosis_table
from jpeg_dlm.studies.variants import TRAINING, ablations, encoder_layers, joint_vs_two_stage, rates, regularizers, widths


def value(config, dotted):
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def changes(config, base):
    """Options in which a config differs from another of the same method."""
    assert config.method == base.method
    return {name: value(config, name) for name in option_names(base) if value(config, name) != value(base, name)}


def paper(variant):
    return tuple(variant.paper.get(name) for name in ("gen_ppl", "entropy", "mauve"))


def test_ablations_are_the_eight_rows_of_table_2():
    base = preset("owt128")
    found = {v.label: (changes(v.config, base), paper(v)) for v in ablations(base).variants}
    assert found == {
        "Base": ({}, (48.0, 4.064, 0.912)),
        "sep. nets": ({"model.shared": False}, (92.45, 4.117, 0.786)),
        "w/o jep": ({"objective.jep_weight": 0}, (51.65, 4.016, 0.849)),
        "w/o jep + sep. nets": ({"model.shared": False, "objective.jep_weight": 0}, (131.94, 4.188, 0.632)),
        "w/o feat": ({"objective.feat_weight": 0}, (51.57, 4.069, 0.825)),
        "sigma=0.5": ({"objective.sigma": 0.5}, (61.43, 3.993, 0.817)),
        "sigma=1.5": ({"objective.sigma": 1.5}, (92.78, 4.046, 0.545)),
        "ce at t in [0.5,1]": ({"objective.ce_time_min": 0.5, "objective.ce_time_mean": "late"}, (146.8, 4.14, 0.645)),
    }
    # Of another preset: the same rows, around the paper's sigma and the preset's own weights.
    small = override(preset("tiny"), {"objective.jep_weight": "0.7"})
    labels = ablations(small).variants
    assert [v.config.objective.sigma for v in labels] == [1, 1, 1, 1, 1, 0.5, 1.5, 1]
    assert [v.config.objective.jep_weight for v in labels] == [0.7, 0.7, 0, 0, 0.7, 0.7, 0.7, 0.7]


def test_regularizers_are_the_four_rows_of_the_appendix():
    base = preset("owt128")
    no_sigreg, no_vicreg = {"objective.sigreg_weight": 0}, {"objective.var_weight": 0, "objective.cov_weight": 0}
    found = {v.label: (changes(v.config, base), paper(v)) for v in regularizers(base).variants}
    assert found == {
        "no regularizer": (no_sigreg | no_vicreg, (63.11, 4.09, 0.856)),
        "SIGReg": (no_vicreg, (48.6, 4.062, 0.865)),
        "variance + covariance": (no_sigreg, (40.77, 3.965, 0.868)),
        "SIGReg and variance + covariance": ({}, (48.0, 4.064, 0.912)),
    }


def test_rates_and_widths_are_those_of_figure_3():
    base = preset("owt128")
    found = rates(base)
    assert not found.left_out
    assert [(v.config.model.latent_len, v.facts["rate"]) for v in found.variants] == [
        (128, 1),
        (64, 0.5),
        (32, 0.25),
        (16, 0.125),
    ]
    assert [v.label for v in found.variants] == ["r = 1", "r = 0.5", "r = 0.25", "r = 0.125"]
    assert [paper(v)[0] for v in found.variants] == [None, 48.0, None, None]  # the others are only in a picture
    found = widths(base)
    assert [v.config.model.latent_dim for v in found.variants] == [256, 512, 768, 1024]
    assert [paper(v)[0] for v in found.variants] == [None, 48.0, None, None]
    assert found.variants[1].config == base


def test_lengths_that_do_not_divide_are_told_and_rates_without_a_latent_left_out():
    base = preset("smoke")
    twelve = replace(base, data=replace(base.data, token_len=12))
    assert [v.label for v in rates(twelve).variants] == ["r = 1", "r = 0.5", "r = 0.25", "r = 2/12"]
    four = replace(base, data=replace(base.data, token_len=4))
    found = rates(four)
    assert [v.config.model.latent_len for v in found.variants] == [4, 2, 1]
    assert found.left_out == ["r = 0.125 is left out: 4 tokens leave less than one latent."]


@pytest.mark.parametrize(
    ("width", "heads", "expected"), [(128, 4, [64, 128, 192, 256]), (20, 2, [8, 20, 32, 40]), (4, 2, [4, 8])]
)
def test_widths_of_another_preset_keep_the_proportion(width, heads, expected):
    base = override(preset("smoke"), {"model.latent_dim": width, "model.codec_heads": heads})
    found = widths(base).variants
    assert [v.config.model.latent_dim for v in found] == expected
    assert [v.config.model.latent_dim for v in found if v.paper] == [width]  # the paper's 512 is the preset's own
    for v in found:
        validate(v.config)


def test_joint_and_two_stage_at_each_rate():
    base = preset("owt128")
    found = joint_vs_two_stage(base).variants
    assert [(v.config.method, v.facts["rate"], v.config.rate) for v in found] == [
        *(("jpeg-dlm", rate, rate) for rate in (1, 0.5, 0.25, 0.125)),
        *(("cosmos", rate, rate) for rate in (1, 0.5, 0.25, 0.125)),
        ("elf", 1, None),
    ]
    assert {v.label: paper(v) for v in found if v.paper} == {
        "JPEG-DLM, r = 0.5": (48.0, 4.064, 0.912),
        "COSMOS, r = 1": (240.811, 3.9033, 0.1167),
        "COSMOS, r = 0.5": (122.46, None, 0.358),
    }
    assert [v.config.sampler.steps for v in found] == [64] * 4 + [200] * 4 + [64]  # (paper)
    assert found[8].config == for_method(base, "elf") and found[1].config == base


def test_encoder_layers_are_those_of_the_appendix_as_far_as_they_exist():
    found = encoder_layers(preset("owt128")).variants
    assert [(v.config.method, v.config.rate, v.config.encoder.layer, paper(v)) for v in found] == [
        ("cosmos", 1, -1, (240.811, 3.9033, 0.1167)),
        ("cosmos", 1, -2, (154.551, 3.9736, 0.3009)),
        ("cosmos", 1, -3, (163.196, 3.9717, 0.2677)),
    ]
    tiny = preset("tiny")  # two layers: -3 are the embeddings
    assert [v.label for v in encoder_layers(tiny).variants] == ["layer -1", "layer -2", "layer -3"]
    shallow = encoder_layers(replace(tiny, encoder=replace(tiny.encoder, depth=1)))
    assert [v.label for v in shallow.variants] == ["layer -1", "layer -2"] and len(shallow.left_out) == 1
    assert shallow.left_out[0].startswith("Layer -3 is left out")


@pytest.mark.parametrize("name", ["owt128", "tiny", "smoke"])
def test_every_variant_can_be_trained_and_no_two_are_the_same(name):
    for study in TRAINING.values():
        configs = [validate(v.config) for v in study.variants(preset(name)).variants]
        assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
        assert set(study.sets) <= set(option_names())


def test_every_training_study_has_its_list():
    assert set(TRAINING) == {name for name, info in STUDIES.items() if info.takes == "training"}


def test_recipes_change_one_option_each_and_then_all_of_the_papers():
    base = preset("captions")
    found = {v.label: changes(v.config, base) for v in recipes(base).variants}
    assert found.pop("the preset") == {}
    assert found["no skip in the denoise head"] == {"model.denoise_skip": False}
    assert found["latents twice as wide"] == {"model.latent_dim": 256}
    together = found.pop("all of the first seven")
    paper = preset("lm1b")
    shared = [name for name in together if name != "train.codec_lr"]
    assert {name: value(paper, name) for name in shared} == {name: together[name] for name in shared}
    assert len(found) == 15 and all(found.values())  # a row that changes nothing would be trained for nothing
    for variant in recipes(base).variants:
        validate(variant.config)
    labels = [v.label for v in recipes(preset("tiny")).variants]  # has no skip, one draw and the paper's times already
    assert "no skip in the denoise head" not in labels and "one noise draw per row" not in labels


def test_the_diagnosis_of_runs_is_a_table_of_their_means():
    runs = [{"diagnosis": {"ratio_0.3": 0.5, "rank": 10.0}}, {"diagnosis": {"ratio_0.3": 0.7, "rank": 12.0}}]
    rows = [{"label": "diagnosed", "runs": runs}, {"label": "not", "runs": [{"diagnosis": {}}]}, {"label": "failed"}]
    [table] = diagnosis_table({"rows": rows})
    assert table.columns == ("variant", "error / linear, t = 0.3", "rank of a latent")  # columns without a value are left out
    assert table.rows == (("diagnosed", "0.60 ± 0.14", "11 ± 1"),)
    assert diagnosis_table({"rows": rows[1:]}) == []
