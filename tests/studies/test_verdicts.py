"""Verdicts on claims: Student's intervals with one variance, Holm's correction, degenerate texts, and one training."""

import math

import numpy as np
import pytest

from jpeg_dlm.evaluation.results import student
from jpeg_dlm.studies.catalog import better_text
from jpeg_dlm.studies.tables import verdict_table
from jpeg_dlm.studies.verdicts import holm, judge, p_value


def records(label, ppl, mauve, degenerate=()):
    return [
        {"label": label, "budget": "b", "seed": i, "gen_ppl": p, "mauve": m, "degenerate": list(degenerate)}
        for i, (p, m) in enumerate(zip(ppl, mauve, strict=True))
    ]


NEAR = records("MDLM", [100.0, 101.0], [0.50, 0.52])
FAR = records("AR", [200.0, 202.0], [0.80, 0.82])
OURS = records("JPEG-DLM", [100.0, 102.0], [0.50, 0.52])
CLAIMS = better_text("better", ("JPEG-DLM", "MDLM"), ("JPEG-DLM", "AR"))


def verdicts(claims, rows):
    return {(v["against"], v["measure"]): v["verdict"] for v in judge(claims, rows)}


def test_verdicts_are_over_trainings_with_one_variance():
    judged = judge(CLAIMS, NEAR + FAR + OURS)
    assert {(v["against"], v["measure"]): v["verdict"] for v in judged} == {
        ("MDLM", "gen_ppl"): "cannot be told",
        ("MDLM", "mauve"): "cannot be told",
        ("AR", "gen_ppl"): "holds",
        ("AR", "mauve"): "does not hold",
    }
    # One variance for all: each of three groups of two has squares 0.0002, so t(3) * sqrt(0.0002 * (1/2 + 1/2)).
    half = 3.182 * 0.0002**0.5
    assert judged[3]["interval"] == pytest.approx([-0.3 - half, -0.3 + half])
    table = verdict_table(judged)
    assert "4 verdicts over 2 trainings" in table.title and "Holm" in table.title
    one = judge(CLAIMS, FAR[:1] + OURS[:1])  # one training decides nothing
    assert [v["verdict"] for v in one] == ["cannot be told"] * 2 and one[0]["interval"] is None
    assert judge(CLAIMS, FAR) == [] and "one training" in str(verdict_table(one).rows)


@pytest.mark.parametrize("which", ["ours", "theirs"])
def test_gen_ppl_decides_nothing_where_either_side_is_degenerate(which):
    """Degenerate text has a low perplexity: it neither proves a claim nor refutes one."""
    ours = records("JPEG-DLM", [300.0, 302.0], [0.5, 0.51], ["repeats"] if which == "ours" else ())
    theirs = records("AR", [100.0, 101.0], [0.1, 0.11], ["repeats"] if which == "theirs" else ())
    judged = verdicts(better_text("better", ("JPEG-DLM", "AR")), ours + theirs + NEAR)
    assert judged == {("AR", "gen_ppl"): "cannot be told", ("AR", "mauve"): "holds"}


def test_p_values_are_those_of_students_distribution():
    for free in (1, 2, 5, 9, 30):
        assert p_value(student(free), free) == pytest.approx(0.05, rel=2e-3)
    assert p_value(1.0, 1) == pytest.approx(0.5, abs=1e-6)  # Cauchy: 1 - 2 atan(1) / pi
    t = 2.0
    assert p_value(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t**2), abs=1e-6)  # closed form


def test_holm_multiplies_the_smallest_by_their_number_and_never_decreases():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_false_verdicts_of_a_table_are_rare():
    """With no difference at all, a table of ten claims has some verdict in at most 5% of cases."""
    rng, wrong, claims = np.random.default_rng(0), 0, better_text("", *(("a", str(i)) for i in range(10)))[1::2]
    for _ in range(200):
        rows = [r for label in ("a", *map(str, range(10))) for r in records(label, [1, 1, 1], rng.normal(size=3))]
        wrong += any(v["verdict"] != "cannot be told" for v in judge(claims, rows))
    assert wrong <= 20
