"""Frontiers against closed forms: interpolation at the entropy of real text, and intervals over texts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from jpeg_dlm.evaluation import metrics
from jpeg_dlm.evaluation.evaluate import EvaluationRequest
from jpeg_dlm.evaluation.frontier import at_zero, curve_of, curves_of, estimate, resampled_mauve, resampled_texts
from jpeg_dlm.evaluation.protocols import PROTOCOLS
from jpeg_dlm.methods.ar import ArSampler
from jpeg_dlm.methods.jpeg_dlm_config import SamplerConfig

REAL = SimpleNamespace(entropy=2.0, gen_ppl=30.0)


def entry(by_text, mauve=None, name="system", **swept):
    """One point of a frontier, as an evaluation has it."""
    runs = [SimpleNamespace(run=0, stats=SimpleNamespace(by_text=by_text), mauve=mauve or {})]
    model = SimpleNamespace(swept=swept, title="S")
    return SimpleNamespace(name=name, model=model, stats={"real": REAL}, runs=runs)


def texts(entropy, log_ppl, n=400, tokens=7):
    """Texts of these entropies and perplexities: numbers, or one for each text."""
    return np.stack(np.broadcast_arrays(tokens * np.asarray(log_ppl), float(tokens), entropy, np.zeros(n))[:3], 1).tolist()


def test_interpolation_is_between_the_neighbors_whatever_the_order():
    x, y = np.array([[1.0], [-3.0], [-1.0], [4.0]]), np.array([[20.0], [7.0], [10.0], [0.0]])
    assert at_zero(x, y) == pytest.approx([15.0])
    assert at_zero(x + 4, y) == at_zero(x + 3, y) == pytest.approx([7.0]) and at_zero(x - 9, y) == pytest.approx([0.0])


def test_a_linear_frontier_is_known_at_real_text_however_texts_are_drawn():
    random = np.random.default_rng(0)
    points = []
    for t in (0.5, 0.8, 1.1):
        entropy = random.normal(1.0 + t, 0.3, 400)
        points.append(entry(texts(entropy, 1.0 + 0.7 * entropy), temperature=t))  # log perplexity is 1 + 0.7 entropy
    curve = curve_of("system", points, "corpus")
    assert curve.reached and curve.entropy == pytest.approx(2.0) and curve.knob == "temperature"
    assert curve.gen_ppl == pytest.approx((math.exp(2.4),) * 3)  # of every resample too
    assert curve.points[0].entropy.low < 1.5 < curve.points[0].entropy.high and 0.9 < curve.knob_value < 1.1
    assert curve.nearest == 2 and curve.mauve is None


def test_the_interval_is_that_of_a_weighted_mean_of_two_points():
    random, n, sd = np.random.default_rng(1), 1500, 0.4
    levels = {1.0: 3.0, 1.6: 3.5, 2.6: 4.5}  # entropy to log perplexity; real text lies at 0.4 between the last two
    curve = curve_of("s", [entry(texts(e, random.normal(y, sd, n), n), w=e) for e, y in levels.items()], "corpus")
    deviation = sd * math.hypot(0.6, 0.4) / math.sqrt(n)
    value, low, high = map(math.log, curve.gen_ppl)
    assert value == pytest.approx(3.9, abs=4 * deviation) and high - low == pytest.approx(2 * 1.96 * deviation, rel=0.1)
    assert curve.knob_value == pytest.approx(2.0)


def test_real_text_out_of_reach_leaves_the_nearest_end():
    curve = curve_of("s", [entry(texts(e, e), temperature=e) for e in (0.5, 1.9, 1.0)], "corpus")
    assert not curve.reached and curve.gen_ppl.value == pytest.approx(math.exp(1.9)) and curve.entropy == pytest.approx(1.9)
    alone = curve_of("file", [entry(texts(2.5, 1.0))], "corpus")
    assert not alone.reached and alone.knob is alone.knob_value is None and alone.nearest == 0


def test_the_last_swept_option_is_the_knob_and_others_make_more_frontiers():
    points = [entry(texts(2, 1), solver=solver, w=w) for solver in ("euler", "sde") for w in (1, 3)]
    curves = curves_of([*points, entry(texts(2, 1), name="file")], "corpus")
    assert [(c.name, c.knob, [p.value for p in c.points]) for c in curves] == [
        ("system, solver euler", "w", [1, 3]),
        ("system, solver sde", "w", [1, 3]),
        ("file", None, [None]),
    ]


def test_the_points_of_a_request():
    swept = EvaluationRequest(PROTOCOLS["default"], sampler={"solver": ("euler", "sde"), "steps": (4, 8)})
    assert swept.variants(SamplerConfig()) == [{"solver": s, "steps": k} for s in ("euler", "sde") for k in (4, 8)]
    assert swept.variants(ArSampler()) == [{}]
    frontier = EvaluationRequest(PROTOCOLS["default"], sampler={"w": ("1", "3"), "steps": (4,)}, frontier=True)
    assert frontier.variants(SamplerConfig()) == [{"w": w, "steps": 4} for w in ("1", "3")]
    assert frontier.variants(ArSampler()) == [{"temperature": t} for t in ArSampler.frontier["temperature"]]


@pytest.mark.parametrize("aggregate", ["corpus", "sequence"])
def test_resampled_texts_are_those_of_the_interval_of_perplexity(aggregate):
    random = np.random.default_rng(2)
    drawn = zip(random.gamma(9, 3, 60), random.integers(2, 9, 60).tolist(), strict=True)
    scores = [metrics.TextScore(nll, n, (1,) * n) for nll, n in drawn]
    entropy, log_ppl = resampled_texts(np.array([(s.nll_sum, s.n_tokens, 0.5) for s in scores]), aggregate)
    found = estimate(log_ppl, math.exp)
    assert found.value == pytest.approx(metrics.perplexity(scores, aggregate)) and set(entropy) == {0.5}
    assert found[1:] == pytest.approx(metrics.perplexity_interval(scores, aggregate), rel=1e-3)


def test_blank_texts_count_for_entropy_alone():
    rows = np.array([(10.0, 5, 1.0), (0.0, 0, 0.0), (4.0, 1, 2.0)])
    for aggregate, wanted in (("corpus", math.exp(14 / 6)), ("sequence", (math.exp(2) + math.exp(4)) / 2)):
        assert metrics.perplexity_of(*rows.T[:2], aggregate) == pytest.approx(wanted)


def test_mauve_of_histograms_is_the_packages_and_its_spread_falls_with_texts():
    pytest.importorskip("mauve")
    random = np.random.default_rng(3)
    score = metrics.mauve_score(random.normal(size=(120, 4)) + 0.4, random.normal(size=(110, 4)), seeds=(42,))
    real, generated = map(np.array, score["histograms"])
    assert metrics.mauve_of_histograms(real, generated) == pytest.approx(score["mauve"])
    few, many = (resampled_mauve(0.5, real, generated, n) for n in (100, 10_000))
    assert few[0] == 0.5 and few[1:].mean() == pytest.approx(0.5) and 5 < few[1:].std() / many[1:].std() < 20
    points = [entry(texts(e, 1), {**score, "mauve": m}, w=e) for e, m in ((1.0, 0.2), (3.0, 0.4))]
    curve = curve_of("s", points, "corpus")
    assert curve.mauve.value == pytest.approx(0.3) and curve.mauve.low < 0.3 < curve.mauve.high
