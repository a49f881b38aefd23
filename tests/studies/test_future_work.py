"""The studies of the paper's future work: their variants, and verdicts that an interval decides."""

import math
import statistics

import pytest
from test_variants import changes

from jpeg_dlm.config import validate
from jpeg_dlm.errors import UsageError
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.results.spread import STUDENT, difference, student
from jpeg_dlm.results.table import markdown
from jpeg_dlm.studies.conjectures import Conjecture, conjecture_table, judge
from jpeg_dlm.studies.future_work import CODECS, DECODERS, PAPER, at_each_rate, codecs, objectives, remedies
from jpeg_dlm.studies.trained import Question, plan
from jpeg_dlm.studies.variants import TRAINING


def test_objectives_at_every_rate():
    base = preset("captions")
    found = objectives(base).variants
    assert len(found) == 15 and len({v.label for v in found}) == 15
    assert [v.config.model.latent_len for v in found] == [8] * 5 + [4] * 5 + [2] * 5
    quarter = {v.facts["option"]: changes(v.config, base) for v in found if v.facts["rate"] == 0.25}
    on = {"objective.flow_to_compressor": 1.0}
    assert quarter[PAPER] == {} and quarter["flow gradient"] == on
    assert quarter["flow gradient, LDLM's remedies"] == on | {
        "objective.flow_to_compressor_warmup": 0.5, "objective.ce_to_codec": False, "objective.decoder_noise": 0.5,
        "objective.time_adaptive": True,
    }  # fmt: skip
    assert quarter["no encoder"] == {"encoder.kind": "none"}
    assert quarter["mean of the last layers"] == {"encoder.layers": (-3, -2, -1)}


def test_single_remedies_at_the_rate_of_the_base():
    base = preset("captions")
    found = {v.facts["option"]: changes(v.config, base) for v in remedies(base).variants}
    on = {"objective.flow_to_compressor": 1.0}
    assert len(found) == 9 and found[PAPER] == {} and found["flow gradient"] == on
    assert found["flow gradient, batch statistics"] == on | {"objective.flow_to_compressor_norm": "batch"}
    assert {v.facts["rate"] for v in remedies(base).variants} == {0.25}


@pytest.mark.parametrize("study", TRAINING)
def test_variants_of_every_preset_are_valid(study):
    for name in PRESETS:
        for variant in TRAINING[study].variants(preset(name)).variants:
            validate(variant.config)


def test_codecs_and_decoders_by_the_names_of_their_options():
    causal = {"encoder.causal": True}
    assert list(CODECS.values()) == [{}, causal, causal | {"model.codec": "causal"}]
    pretrained = codecs(preset("owt128"))  # its encoder sees later tokens
    assert [v.facts["option"] for v in pretrained.variants] == [PAPER] * 3 and "left out" in pretrained.left_out[0]
    assert list(DECODERS.values()) == [{}, {"model.decoder": "autoregressive"}, {"model.decoder": "two_pass"}]
    found = at_each_rate(preset("tiny"), {PAPER: {}, "other": {"objective.sigma": 0.5}}).variants
    assert [(v.label, v.config.model.latent_len, v.config.objective.sigma) for v in found] == [
        ("as in the paper, r = 0.5", 16, 0.8), ("other, r = 0.5", 16, 0.5),
        ("as in the paper, r = 0.25", 8, 0.8), ("other, r = 0.25", 8, 0.5),
        ("as in the paper, r = 0.125", 4, 0.8), ("other, r = 0.125", 4, 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize("study", [name for name, study in TRAINING.items() if study.conjectures])
def test_conjectures_are_about_variants_of_the_study(study):
    found = {v.facts.get("option", v.label) for v in TRAINING[study].variants(preset("tiny")).variants}
    found |= {v.label for v in TRAINING[study].variants(preset("tiny")).variants}
    assert {name for c in TRAINING[study].conjectures for name in (c.option, c.against)} <= found


def test_only_a_part_of_the_variants():
    with pytest.raises(UsageError, match="has 'r = 3' in its name: choose from 'as in the paper, r = 0.5'"):
        plan(Question("objectives", preset("tiny"), only="r = 3"), None)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- verdicts


def test_the_interval_is_that_of_students_test():
    ours, theirs = [5.0, 7.0, 6.0], [1.0, 2.0, 3.0]
    middle, half = difference(ours, theirs)
    assert middle == 4.0 and half == pytest.approx(STUDENT[4] * math.sqrt(1.0 * 2 / 3))
    assert difference([1.0], [3.0]) == (-2.0, None)
    # With the variance of other groups: two values at distance 2 have the variance 2, here with two degrees of freedom.
    middle, half = difference([1.0], [3.0], [[1.0], [3.0], [0.0, 2.0], [5.0, 7.0]])
    assert middle == -2.0 and half == pytest.approx(STUDENT[2] * math.sqrt(2.0 * 2))
    assert [student(free) for free in (11, 15, 30)] == pytest.approx([2.201, 2.131, 2.042], rel=1e-3)  # of printed tables
    # The quantiles of 2 and 4 degrees of freedom have closed forms.
    p = 0.975
    a = 4 * p * (1 - p)
    q = math.cos(math.acos(math.sqrt(a)) / 3) / math.sqrt(a)
    assert STUDENT[2] == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), abs=1e-3)
    assert STUDENT[4] == pytest.approx(2 * math.sqrt(q - 1), abs=1e-3)


def test_variants_go_by_their_labels_and_share_one_variance():
    rows = [
        {"label": label, "facts": {"rate": rate}, "runs": row("", kept, [1.0] * len(kept))["runs"], "degenerate": bad}
        for label, rate, kept, bad in [
            ("r = 1", 1.0, [0.9], []), ("r = 0.5", 0.5, [0.5], []),
            ("other", 0.1, [0.1, 0.2], []), ("bad", 0.1, [0.0, 1.0], ["no variety"]),
        ]
    ]  # fmt: skip
    (found,) = judge([Conjecture("weaker is better", "r = 1", "r = 0.5", "reconstruction", True)], rows)
    half = STUDENT[1] * math.sqrt(0.005 * 2)  # the degenerate row, with its large variance, does not count
    assert found["interval"] == pytest.approx([0.4 - half, 0.4 + half]) and found["trainings"] == [1, 1]
    assert "| weaker is better | r = 1 | r = 0.5 |" in markdown([conjecture_table([found])])


def row(option, kept, ppl, rate=0.25, degenerate=()):
    runs = [
        {"reconstruction": k, "latents": {"latent_text": k}, "measures": {"gen_ppl": {"mean": g}}}
        for k, g in zip(kept, ppl, strict=True)
    ]
    return {"facts": {"option": option, "rate": rate}, "runs": runs, "degenerate": list(degenerate)}


def verdicts(ours, theirs, degenerate=()):
    conjectures = [Conjecture("it keeps more", "new", PAPER, "reconstruction", True)]
    conjectures += [Conjecture("it writes better", "new", PAPER, "gen_ppl", False)]
    found = judge(conjectures, [row("new", *ours, degenerate=degenerate), row(PAPER, *theirs), {"facts": {}, "error": "no"}])
    return {f["measure"]: f for f in found}


def test_a_verdict_needs_an_interval_without_zero():
    theirs = ([0.5, 0.52], [100.0, 110.0])
    clear = verdicts(([0.8, 0.82], [20.0, 21.0]), theirs)
    assert [f["verdict"] for f in clear.values()] == ["holds", "holds"]
    low, high = clear["reconstruction"]["interval"]
    assert clear["reconstruction"]["difference"] == pytest.approx(0.3) and low < 0.3 < high and low > 0
    logs = [statistics.fmean(map(math.log, values)) for values in ([20.0, 21.0], [100.0, 110.0])]
    assert clear["gen_ppl"]["difference"] == pytest.approx(math.exp(logs[0] - logs[1]))  # a ratio
    worse = verdicts(([0.2, 0.22], [400.0, 410.0]), theirs)
    assert [f["verdict"] for f in worse.values()] == ["does not hold", "does not hold"]
    wide = verdicts(([0.4, 0.9], [20.0, 400.0]), theirs)
    assert [f["verdict"] for f in wide.values()] == ["cannot be told", "cannot be told"]
    alone = verdicts(([0.8], [20.0]), ([0.5], [100.0]))
    assert [(f["verdict"], f["interval"]) for f in alone.values()] == [("cannot be told", None)] * 2
    repeated = verdicts(([0.8, 0.82], [20.0, 21.0]), theirs, ["most texts repeat themselves"])
    assert [f["verdict"] for f in repeated.values()] == ["holds", "cannot be told"]
    text = markdown([conjecture_table(list(clear.values()) + list(alone.values()))])
    assert "| it keeps more | 0.25 | new | as in the paper | tokens reconstructed | 0.810 | 0.510 | 0.300 |" in text
    assert "| one training |" in text
