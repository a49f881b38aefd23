"""Several runs as one: mean and sample deviation over seeds, the place between shuffled and real text, and warnings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jpeg_dlm.evaluation.entry import ScoredRun
from jpeg_dlm.evaluation.figures import TextFigures
from jpeg_dlm.results.spread import Spread, spread
from jpeg_dlm.wording import counted

# Assumed: differences that seeds do not explain and that a reader should look at before believing a low perplexity.
ENTROPY_BELOW = 0.5  # nats under real text
REPETITION_ABOVE = 0.1  # share of repeated 4-grams over real text's
DEGENERATE_ABOVE = 0.05  # share of texts that mostly repeat themselves, over real text's

SPREAD = ("gen_ppl", "entropy", "distinct_1", "distinct_2", "distinct_3", "repetition_4", "degenerate_share")


def scorer_said(result: Mapping[str, Any]) -> str:
    """Return the name of a result's scorer, and its precision if that is not fp32."""
    precision = result.get("scorer_precision", "fp32")
    return result["scorer"] + ("" if precision == "fp32" else f" in {precision}")


def measures_of(runs: Sequence[ScoredRun]) -> dict[str, Spread]:
    """Return the spread of each measure over runs; MAUVE, speed and overlap of lengths only where they were measured."""
    measures = {name: spread([getattr(run.figures, name) for run in runs]) for name in SPREAD}
    mauve = [run.mauve["mauve"] for run in runs if "mauve" in run.mauve]
    if len(mauve) == len(runs):
        kmeans_sd = statistics.fmean(run.mauve["kmeans_sd"] or 0.0 for run in runs)
        measures["mauve"] = {**spread(mauve), "kmeans_sd": kmeans_sd}
    if speed := [run.throughput["texts_per_second"] for run in runs if run.throughput]:
        measures["texts_per_second"] = spread(speed)
    if overlap := [run.lengths["overlap"] for run in runs if run.lengths and run.lengths["enough"]]:
        measures["length_overlap"] = spread(overlap)
    return measures


def way(generated: float, shuffled: float, real: float) -> float | None:
    """Return the place between shuffled (0) and real text (1) in log perplexity; None where the two are the same."""
    span = math.log(shuffled / real)
    return math.log(shuffled / generated) / span if abs(span) > 1e-9 else None


def warnings(measures: Mapping[str, Spread], real: TextFigures) -> list[str]:
    """Signs that a perplexity is low because the text is degenerate; empty when there are none."""
    found = []
    gap = real.entropy - measures["entropy"]["mean"]
    if gap > ENTROPY_BELOW:
        found.append(f"entropy {gap:.2f} nats below real text")
    repeated = measures["repetition_4"]["mean"]
    if repeated > real.repetition_4 + REPETITION_ABOVE:
        found.append(f"{100 * repeated:.0f}% of 4-grams repeated (real: {100 * real.repetition_4:.0f}%)")
    share = measures["degenerate_share"]["mean"]
    if share > real.degenerate_share + DEGENERATE_ABOVE:
        found.append(f"{100 * share:.0f}% of texts mostly repeat themselves (real: {100 * real.degenerate_share:.0f}%)")
    return found


def notes(runs: Sequence[ScoredRun], real: TextFigures) -> list[str]:
    """Return sentences on what was passed over, cut or could not be measured."""
    counts = {name: sum(getattr(run.figures, name) for run in runs) for name in ("skipped", "truncated", "dropped")}
    counts["cut"] = sum(run.cut_lines for run in runs)
    sentences = {
        "skipped": "blank or too short to be scored",
        "truncated": "longer than what is scored of a text",
        "dropped": "beyond the last full batch, dropped by the protocol",
        "cut": "cut off in the middle of a line, left out",
    }
    found = [f"texts {said}: {counts[name]}" for name, said in sentences.items() if counts[name]]
    if real.skipped:
        found.append(f"real texts blank or too short to be scored: {real.skipped}")
    if real.texts < runs[0].figures.texts:
        found.append(f"only {counted(real.texts, 'real text')} beside {runs[0].figures.texts} generated")
    found += sorted({run.mauve["skipped"] for run in runs if "skipped" in run.mauve})
    return found
