"""Frontiers: a system's texts along the option that trades fluency for diversity, and its figures at the entropy of real text.

One point of perplexity and entropy can be had at will by sampling more or less sharply, so systems are compared where their
entropy is that of real text: between the two neighboring points of a frontier, linear in the logarithm of the perplexity.
Shapes: P points, N texts, R resamples of the texts; index 0 of R is the estimate from the texts themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jpeg_dlm.evaluation import metrics
from jpeg_dlm.evaluation.results import ScoredRun, SystemResult
from jpeg_dlm.util.rng import derive_seed

MAUVE_RESAMPLES = 200  # each takes a millisecond (measured)


class Estimate(NamedTuple):
    """A figure and its 95% bootstrap interval over texts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class FrontierPoint:
    """The figures of one value of the knob; `gap` is the entropy minus that of real text."""

    value: Any
    gap: float
    entropy: Estimate
    gen_ppl: Estimate
    mauve: Estimate | None


@dataclass(frozen=True)
class Curve:
    """The frontier of a system and its figures at the entropy of real text, or at the end that is nearest to it."""

    name: str
    title: str | None
    knob: str | None  # None: the system has one point only
    real_entropy: float
    real_gen_ppl: float
    points: Sequence[FrontierPoint]
    reached: bool  # whether the entropy of real text lies between those of two points
    gen_ppl: Estimate
    mauve: Estimate | None
    knob_value: float | None
    entropy: float  # of real text, or of the nearest end

    @property
    def nearest(self) -> int:
        """The index of the point whose entropy is nearest to real text's."""
        return min(range(len(self.points)), key=lambda i: abs(self.points[i].gap))


# ---------------------------------------------------------------- pure functions


def at_zero(x_PR: np.ndarray, y_PR: np.ndarray) -> np.ndarray:
    """Return y (R) where x is 0, linear between the neighbors of 0 among the points; beyond the last one, y of that."""
    order_PR = x_PR.argsort(0, kind="stable")
    x_PR, y_PR = (np.take_along_axis(values, order_PR, 0) for values in (x_PR, y_PR))
    return np.array([np.interp(0.0, x_P, y_P) for x_P, y_P in zip(x_PR.T, y_PR.T, strict=True)])


def estimate(values_R: np.ndarray, back: Callable[[float], float] = float) -> Estimate:
    """Return the first value and the interval of the others, each mapped by an increasing function."""
    low, high = np.quantile(values_R[1:], [0.025, 0.975]) if len(values_R) > 1 else values_R[[0, 0]]
    return Estimate(*(back(float(x)) for x in (values_R[0], low, high)))


def resampled_texts(by_text_N3: np.ndarray, aggregate: metrics.Aggregate, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the entropy and the log perplexity (R) of texts and of resamples of them, from nll, tokens and entropy of each."""
    n = len(by_text_N3)
    rows_RN = np.concatenate([np.arange(n)[None], metrics.bootstrap_rows(n, seed)])
    nll_RN, tokens_RN, entropy_RN = by_text_N3[rows_RN].transpose(2, 0, 1)
    return entropy_RN.mean(1), np.log(metrics.perplexity_of(nll_RN, tokens_RN, aggregate))


def resampled_mauve(mauve: float, real_K: np.ndarray, generated_K: np.ndarray, texts: int, seed: int = 0) -> np.ndarray:
    """Return MAUVE (R) and what resampled texts in the same clusters K make of it.

    Noise lowers MAUVE, and resamples have it twice, so only their deviations from their mean are used.
    """
    random = np.random.default_rng(derive_seed(seed, "bootstrap-mauve"))
    counts_RK = random.multinomial(texts, generated_K / generated_K.sum(), size=MAUVE_RESAMPLES)
    values_R = np.array([metrics.mauve_of_histograms(real_K, counts_K / texts) for counts_K in counts_RK])
    return np.concatenate([[mauve], np.clip(mauve + values_R - values_R.mean(), 0.0, 1.0)])


# ---------------------------------------------------------------- of an evaluation


def curves_of(entries: Sequence[SystemResult], aggregate: metrics.Aggregate) -> list[Curve]:
    """Return the frontier of each system: its last swept option is the knob, and others separate its frontiers."""

    def key(entry: SystemResult) -> str:
        others = list(entry.model.swept.items())[:-1] if entry.model else []
        return ", ".join([entry.name, *(f"{name} {value}" for name, value in others)])

    return [curve_of(name, list(group), aggregate) for name, group in itertools.groupby(entries, key)]


def curve_of(name: str, entries: Sequence[SystemResult], aggregate: metrics.Aggregate) -> Curve:
    """Return the frontier through the entries of one system."""
    swept = [list(entry.model.swept.items())[-1:] if entry.model else [] for entry in entries]
    knob, values = (swept[0][0][0], [point[0][1] for point in swept]) if swept[0] else (None, [None])
    entropy_PR, log_ppl_PR = (np.stack(x) for x in zip(*(_over_runs(entry.runs, aggregate) for entry in entries), strict=True))
    gap_PR = entropy_PR - np.array([[entry.stats["real"].entropy] for entry in entries])
    mauves = [mauve_R for entry in entries if (mauve_R := _mauve_over_runs(entry.runs)) is not None]
    mauve_PR = np.stack(mauves) if len(mauves) == len(entries) else None
    numbers = values if all(isinstance(value, int | float) for value in values) else None
    points = [
        FrontierPoint(
            value=value,
            gap=float(gap_PR[i, 0]),
            entropy=estimate(entropy_PR[i]),
            gen_ppl=estimate(log_ppl_PR[i], math.exp),
            mauve=None if mauve_PR is None else estimate(mauve_PR[i]),
        )
        for i, value in enumerate(values)
    ]
    model, real = entries[0].model, entries[0].stats["real"]
    return Curve(
        name=name,
        title=model.title if model else None,
        knob=knob,
        real_entropy=real.entropy,
        real_gen_ppl=real.gen_ppl,
        points=points,
        reached=bool(gap_PR[:, 0].min() <= 0 <= gap_PR[:, 0].max()),
        gen_ppl=estimate(at_zero(gap_PR, log_ppl_PR), math.exp),
        mauve=None if mauve_PR is None else estimate(at_zero(gap_PR[:, : mauve_PR.shape[1]], mauve_PR)),
        knob_value=float(at_zero(gap_PR[:, :1], np.array(numbers, float)[:, None])[0]) if numbers else None,
        entropy=float(at_zero(gap_PR[:, :1], entropy_PR[:, :1])[0]),
    )


def _over_runs(runs: Sequence[ScoredRun], aggregate: metrics.Aggregate) -> tuple[np.ndarray, np.ndarray]:
    """Return the means over runs of entropy and log perplexity (R)."""
    resampled = [resampled_texts(np.array(run.stats.by_text, float), aggregate, run.run) for run in runs]
    entropy_R, log_ppl_R = (np.mean(x, axis=0) for x in zip(*resampled, strict=True))
    return entropy_R, log_ppl_R


def _mauve_over_runs(runs: Sequence[ScoredRun]) -> np.ndarray | None:
    """Return the mean over runs of MAUVE (R); None if a run has none."""
    if not all("histograms" in run.mauve for run in runs):
        return None
    by_run = []
    for run in runs:
        real_K, generated_K = map(np.array, run.mauve["histograms"])
        by_run.append(resampled_mauve(run.mauve["mauve"], real_K, generated_K, run.mauve["texts"][0], run.run))
    return np.mean(by_run, axis=0)
