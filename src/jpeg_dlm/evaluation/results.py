"""The result of an evaluation: a record for each system and sampler, and its summary over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from jpeg_dlm.evaluation.table import INLINED, OMITTED
from jpeg_dlm.util.errors import counted


class MeanStd(TypedDict):
    """A measure over seeds, as results hold it."""

    mean: float
    sd: float | None
    values: list[float]
    kmeans_sd: NotRequired[float]  # of MAUVE: the mean deviation over its own seeds


def mean_std(values: Sequence[float]) -> MeanStd:
    """Return mean and sample deviation; one value has no deviation."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


# Quantiles 0.975 of Student's distribution by degrees of freedom; beyond the last, `student` expands around the normal one.
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL = 1.959964


def student(free: int) -> float:
    """Return the quantile 0.975 of Student's distribution, within 0.1%."""
    if free < len(STUDENT):
        return STUDENT[free]
    z = NORMAL
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)  # Cornish-Fisher


def difference(
    ours: Sequence[float], theirs: Sequence[float], groups: Sequence[Sequence[float]] = ()
) -> tuple[float, float | None]:
    """Return the difference of two means and half of its 95% interval; None: no group has two values.

    The variance within a group is taken to be common to all `groups`, or to the two alone if none are given.
    """
    middle, groups = statistics.fmean(ours) - statistics.fmean(theirs), groups or (ours, theirs)
    free = sum(len(values) - 1 for values in groups)
    if free < 1:
        return middle, None
    squares = sum((x - statistics.fmean(values)) ** 2 for values in groups for x in values)
    return middle, student(free) * math.sqrt(squares / free * (1 / len(ours) + 1 / len(theirs)))


@dataclass(frozen=True)
class LengthLimits:
    """Lengths and conventions shared by all runs of an entry; the first run fixes them to keep the figures comparable."""

    max_tokens: int  # most scored tokens of a text
    max_real_tokens: int | None  # most scored tokens of a real text, if real texts are not of the generated length
    mauve_tokens: int  # tokens of a text used for MAUVE
    entropy_over_model_ids: bool
    score_raw_ids: bool


@dataclass(frozen=True)
class ModelInfo:
    """The model and the sampler that wrote the texts of an entry."""

    method: str
    title: str
    preset: str
    config: Mapping[str, Any]
    sampler: Mapping[str, Any]
    sampler_label: str
    swept: Mapping[str, Any]  # the values of options of which the evaluation has several, in their order
    evaluations: int  # of the network, for a text
    rate: float | None
    seeds: Sequence[int]
    reconstruction: float | None


@dataclass(frozen=True)
class ScoredRun:
    """The scores of the texts of one seed, or of one file."""

    run: int
    identity: Mapping[str, Any]
    stats: TextStats
    lengths: Mapping[str, Any] | None
    mauve: Mapping[str, Any]  # `skipped` says why there is none
    throughput: Mapping[str, float] | None
    samples: Sequence[str]
    texts_sha256: str


@dataclass(frozen=True)
class SystemResult:
    """The runs of one system with one sampler, beside real and shuffled text."""

    name: str
    reference: str
    limits: LengthLimits
    model: ModelInfo | None = field(metadata=INLINED)  # None for texts of other programs
    identity: Mapping[str, Any]
    measures: Mapping[str, MeanStd]
    stats: Mapping[str, TextStats]  # of generated, real and shuffled text
    log_ppl_position: float | None
    entropy_gap: float
    degenerate: Sequence[str]
    notes: Sequence[str]
    runs: Sequence[ScoredRun]

    @property
    def label(self) -> str:
        """The system and its sampler."""
        return f"{self.name}, {self.model.sampler_label}" if self.model else self.name

    @property
    def reconstruction(self) -> float | None:
        """The share of held-out tokens that survive the codec."""
        return self.model.reconstruction if self.model else None


def of_models(entries: Sequence[SystemResult]) -> list[tuple[SystemResult, ModelInfo]]:
    """Return the entries whose texts a model wrote, each with the facts about it."""
    return [(entry, entry.model) for entry in entries if entry.model]


@dataclass(frozen=True)
class TextStats:
    """The scores of one set of texts."""

    texts: int
    skipped: int  # blank, or too short to be scored
    truncated: int  # longer than what is scored of a text
    dropped: int  # beyond the last full batch, where the protocol says so
    tokens: int  # scored
    gen_ppl: float
    gen_ppl_low: float
    gen_ppl_high: float
    entropy: float
    entropy_ids: str  # whose tokens the entropy is over
    distinct_1: float
    distinct_2: float
    distinct_3: float
    distinct_texts: float
    repetition_4: float
    degenerate_share: float
    by_text: Sequence[Sequence[float]] = field(metadata=OMITTED)  # nll, scored tokens and entropy of each, for resampling


# Assumed: differences that seeds do not explain and that a reader should look at before believing a low perplexity.
ENTROPY_BELOW = 0.5  # nats under real text
REPETITION_ABOVE = 0.1  # share of repeated 4-grams over real text's
DEGENERATE_ABOVE = 0.05  # share of texts that mostly repeat themselves, over real text's
ALIKE_BELOW = 0.2  # share of different texts under real text's
DISTINCT_BELOW = 0.25  # of real text's distinct-2, which falls with the number of texts, but not so far

SPREAD = ("gen_ppl", "entropy", "distinct_1", "distinct_2", "distinct_3", "distinct_texts", "repetition_4", "degenerate_share")


def scorer_label(result: Mapping[str, Any]) -> str:
    """Return the name of a result's scorer, and its precision if that is not fp32."""
    precision = result.get("scorer_precision", "fp32")
    return result["scorer"] + ("" if precision == "fp32" else f" in {precision}")


def measures_of(runs: Sequence[ScoredRun]) -> dict[str, MeanStd]:
    """Return the spread of each measure over runs; MAUVE, speed and overlap of lengths only where they were measured."""
    measures = {name: mean_std([getattr(run.stats, name) for run in runs]) for name in SPREAD}
    mauve = [run.mauve["mauve"] for run in runs if "mauve" in run.mauve]
    if len(mauve) == len(runs):
        kmeans_sd = statistics.fmean(run.mauve["kmeans_sd"] or 0.0 for run in runs)
        measures["mauve"] = {**mean_std(mauve), "kmeans_sd": kmeans_sd}
    if speed := [run.throughput["texts_per_second"] for run in runs if run.throughput]:
        measures["texts_per_second"] = mean_std(speed)
    if overlap := [run.lengths["overlap"] for run in runs if run.lengths and run.lengths["enough"]]:
        measures["length_overlap"] = mean_std(overlap)
    return measures


def log_ppl_position(generated: float, shuffled: float, real: float) -> float | None:
    """Return the place between shuffled (0) and real text (1) in log perplexity; None where the two are the same."""
    span = math.log(shuffled / real)
    return math.log(shuffled / generated) / span if abs(span) > 1e-9 else None


def warnings(measures: Mapping[str, MeanStd], real: TextStats) -> list[str]:
    """Signs that a perplexity is low because texts repeat themselves or each other; empty when there are none."""
    signs = []
    gap = real.entropy - measures["entropy"]["mean"]
    if gap > ENTROPY_BELOW:
        signs.append(f"entropy {gap:.2f} nats below real text")
    repeated = measures["repetition_4"]["mean"]
    if repeated > real.repetition_4 + REPETITION_ABOVE:
        signs.append(f"{100 * repeated:.0f}% of 4-grams repeated (real: {100 * real.repetition_4:.0f}%)")
    share = measures["degenerate_share"]["mean"]
    if share > real.degenerate_share + DEGENERATE_ABOVE:
        signs.append(f"{100 * share:.0f}% of texts mostly repeat themselves (real: {100 * real.degenerate_share:.0f}%)")
    different = measures["distinct_texts"]["mean"]
    if different < real.distinct_texts - ALIKE_BELOW:
        signs.append(f"only {100 * different:.0f}% of texts are different ones (real: {100 * real.distinct_texts:.0f}%)")
    distinct = measures["distinct_2"]["mean"]
    if distinct < DISTINCT_BELOW * real.distinct_2:
        signs.append(f"texts are alike: distinct-2 is {distinct:.3f} (real: {real.distinct_2:.3f})")
    return signs


def notes(runs: Sequence[ScoredRun], real: TextStats) -> list[str]:
    """Return sentences on what was passed over, cut or could not be measured."""
    counts = {name: sum(getattr(run.stats, name) for run in runs) for name in ("skipped", "truncated", "dropped")}
    sentences = {
        "skipped": "blank or too short to be scored",
        "truncated": "longer than what is scored of a text",
        "dropped": "beyond the last full batch, dropped by the protocol",
    }
    remarks = [f"texts {reason}: {counts[name]}" for name, reason in sentences.items() if counts[name]]
    if real.skipped:
        remarks.append(f"real texts blank or too short to be scored: {real.skipped}")
    if real.texts < runs[0].stats.texts:
        remarks.append(f"only {counted(real.texts, 'real text')} beside {runs[0].stats.texts} generated")
    return remarks + sorted({run.mauve["skipped"] for run in runs if "skipped" in run.mauve})
