"""BrierLM against the Brier score of a known distribution."""

from itertools import product

import pytest

from jpeg_dlm.evaluation.brier import brier_lm

P = {(0, 0): 0.4, (0, 1): 0.1, (1, 0): 0.2, (2, 2): 0.3}  # of texts of two tokens
REAL = {(0, 0): 0.5, (1, 0): 0.3, (2, 1): 0.2}


def first_token(law):
    return {i: sum(p for text, p in law.items() if text[0] == i) for i in range(3)}


def test_its_mean_over_all_samples_is_the_brier_score():
    """Every triple of two samples and a real text is given as often as it occurs in a thousand."""
    triples = [(a, b, y) for a, b, y in product(P, P, REAL) for _ in range(round(1000 * P[a] * P[b] * REAL[y]))]
    first, second, real = zip(*triples, strict=True)
    found = brier_lm(first, second, [[y] for y in real])
    for n, (model, truth) in enumerate([(first_token(P), first_token(REAL)), (P, REAL)], 1):
        want = 2 * sum(truth[y] * model.get(y, 0) for y in truth) - sum(p * p for p in model.values())
        # 1 - the Brier score, sum over outcomes of (P - [outcome])**2
        score = sum(q * sum((model.get(x, 0) - (x == y)) ** 2 for x in {*model, *truth}) for y, q in truth.items())
        assert found[f"brier_{n}"] == pytest.approx(want) == pytest.approx(1 - score)
    assert found["brier_3"] == found["brier_4"] == found["brier_2"]  # texts that have ended are equal
    assert found["brier_lm"] == pytest.approx(100 * (found["brier_1"] * found["brier_2"] ** 3) ** 0.25)


def test_a_model_that_is_certain_and_right_has_100_and_one_that_is_wrong_has_0():
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert brier_lm(texts, texts, [[text] for text in texts])["brier_lm"] == 100
    assert brier_lm(texts, texts, [[text[::-1]] for text in texts])["brier_lm"] == 0
    two = brier_lm(texts, texts, [[text, text[::-1]] for text in texts])  # each reference is as likely
    assert two["brier_1"] == 0
