"""BrierLM: a score of language models that needs samples only (CALM, arXiv:2510.27688).

For the distribution P of a model's n tokens after a prompt and the real ones y, 2 P(y) - sum of P**2 is one minus the Brier
score and largest on average for the true distribution. Two samples a, b estimate it without bias: [a = y] + [b = y] - [a = b].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

LONGEST = 4  # tokens (CALM)

Ids = Sequence[int]


def brier_lm(first: Sequence[Ids], second: Sequence[Ids], real: Sequence[Sequence[Ids]]) -> dict[str, float]:
    """Return the scores of the first n tokens of two texts for each prompt, and 100 times their geometric mean.

    `real` has all the real texts of a prompt. An n whose estimate is negative makes the mean 0: it needs more prompts.
    """

    def score(n: int) -> float:
        triples = (
            (tuple(a[:n]), tuple(b[:n]), [tuple(y[:n]) for y in ys]) for a, b, ys in zip(first, second, real, strict=True)
        )
        return fmean(fmean((a == y) + (b == y) for y in ys) - (a == b) for a, b, ys in triples)

    scores = {f"brier_{n}": score(n) for n in range(1, LONGEST + 1)}
    return scores | {"brier_lm": 100 * math.prod(max(0.0, s) for s in scores.values()) ** (1 / LONGEST)}
