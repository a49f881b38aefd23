"""Scores equal to transformers called one text at a time; metrics by hand."""

import math

import pytest
import torch

from jpeg_dlm.evaluation.metrics import TextScore, distinct_n, perplexity, perplexity_interval, repetition_rate, unigram_entropy
from jpeg_dlm.evaluation.results import scorer_label
from jpeg_dlm.evaluation.scorer import Scorer, build_scorer
from jpeg_dlm.util.errors import AssetError, DataError, UsageError

pytest_plugins = ["tiny_evaluation"]  # fixtures

TEXTS = ["ab cab abba", "", "c", "   \n", "a b c a b c a b c", "cabcabcab acb", "ba", "b a c " * 12]


def test_requests_that_cannot_work_are_refused(byte_gpt2, tmp_path):
    for spec in ("gpt2-large", "hf:", "gguf:", ""):
        with pytest.raises(UsageError, match="smollm2"):
            build_scorer(spec)
    with pytest.raises(AssetError, match="smollm2") as caught:
        build_scorer(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)
    with pytest.raises(AssetError):
        build_scorer(f"gguf:{tmp_path / 'none.gguf'}")
    scorer = Scorer(str(byte_gpt2))
    scorer.bos_id = None
    with pytest.raises(UsageError, match="beginning"):
        scorer.nll(["a b"], bos=True)


# ---------------------------------------------------------------- metrics


def test_entropy_by_hand():
    assert unigram_entropy([[5, 5, 5]]) == 0
    assert unigram_entropy([[1, 2, 3, 4]]) == pytest.approx(math.log(4))
    # (3/4, 1/4) and a uniform pair, averaged over texts; blank texts do not count.
    want = (-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) + math.log(2)) / 2
    assert unigram_entropy([[7, 7, 7, 1], [], [0, 9]]) == pytest.approx(want)
    with pytest.raises(DataError):
        unigram_entropy([[]])


def test_distinct_and_repetition_by_hand():
    texts = [[1, 2, 1, 2], [1, 2, 3]]
    assert distinct_n(texts, 1) == pytest.approx(3 / 7)
    assert distinct_n(texts, 2) == pytest.approx(3 / 5)  # 12 21 23 of 12 21 12 12 23
    assert distinct_n(texts, 9) == 0
    assert repetition_rate(texts, 2) == pytest.approx((1 / 3 + 0) / 2)
    assert repetition_rate([[4] * 10], 4) == pytest.approx(6 / 7)
    assert repetition_rate([[1]], 4) == 0


def test_bootstrap_interval_covers_a_mean():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    scores = [TextScore(value, 1, (0,)) for value in values.tolist()]
    low, high = perplexity_interval(scores, resamples=400)
    mean, half = values.mean().item(), 1.96 * values.std().item() / 20
    assert math.log(low) == pytest.approx(mean - half, abs=0.02) and math.log(high) == pytest.approx(mean + half, abs=0.02)
    assert (low, high) == perplexity_interval(scores, resamples=400)
    for figure in (perplexity, perplexity_interval):
        with pytest.raises(DataError):
            figure([])


def test_bf16_scores_are_near_those_of_fp32_and_named(byte_gpt2):
    plain, half = (build_scorer(f"hf:{byte_gpt2}", precision=precision) for precision in ("auto", "bf16"))
    assert (plain.precision, half.precision.split()[0]) == ("fp32", "bf16")
    for a, b in zip(plain.nll(TEXTS), half.nll(TEXTS), strict=True):
        assert a.n_tokens == b.n_tokens and b.nll_sum == pytest.approx(a.nll_sum, rel=0.02)
    assert any(a.nll_sum != b.nll_sum for a, b in zip(plain.nll(TEXTS), half.nll(TEXTS), strict=True) if a.n_tokens)
    assert torch.equal(half.features(TEXTS, 16), plain.features(TEXTS, 16))  # fp32 in any precision, as mauve-text has them
    result = {"scorer": "gpt2", "scorer_precision": half.precision}
    assert scorer_label(result).startswith("gpt2 in bf16") and scorer_label({"scorer": "gpt2"}) == "gpt2"
