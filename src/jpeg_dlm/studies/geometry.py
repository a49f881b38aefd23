"""Geometry of the latent space: spectrum, effective rank, isotropy, distance from N(0, I), also over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.methods.common.latent_geometry import covariance, effective_rank, isotropy, measure, spectrum
from jpeg_dlm.results.pictures import INK, LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import Table
from jpeg_dlm.studies.latents import about, check_sources, clean_latents, heldout_of, identity, label, log_of
from jpeg_dlm.studies.study import Asked, StudyOutcome
from jpeg_dlm.training.alarms import collapse
from jpeg_dlm.training.metrics import read_metrics

GROUPS = 8  # groups of texts for the jackknife (assumed)
OVER_TRAINING = {"latent_rank": "effective rank / D", "latent_isotropy": "isotropy"}


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Measure the geometry of every model on its own held-out text."""
    check_sources(sources, rows=GROUPS)
    rows = [about(source) | _geometry(source, asked) | {"over_training": over_training(source.path)} for source in sources]
    result = {"study": "geometry", "groups": GROUPS, "rows": rows}
    return StudyOutcome(result, [table(result)], lambda path: draw(result, path))


def _geometry(source: ModelSource, asked: Asked) -> dict[str, Any]:
    """Return the result of `measure`, the deviations of two of its measures, and signs of collapse."""

    def make() -> dict[str, Any]:
        z_BND = clean_latents(source, range(min(asked.n, len(heldout_of(source)))), asked.console)
        found = asdict(measure(z_BND))
        return {"texts": len(z_BND), "latents": z_BND.shape[1], "width": z_BND.shape[2], **found, **deviations(z_BND)}

    depends = identity(source) | {"kind": "geometry", "n": asked.n, "groups": GROUPS}
    found = asked.parts.get_or_make(f"geometry-{source.name}", depends, make)
    measures = {f"latent_{name}": found[name] for name in ("rank", "text", "sigreg")}
    wrong = collapse(measures, source.model.config.train.collapse_alarm)
    return found | {"collapsed": [alarm.text for alarm in wrong]}


def deviations(z_BND: Tensor) -> dict[str, float]:
    """Return jackknife deviations over groups of texts; unlike texts, the vectors of a text are not independent."""
    groups = min(GROUPS, len(z_BND))
    member = torch.arange(len(z_BND)) % groups
    spectra = [spectrum(covariance(z_BND[(member != g).to(z_BND.device)].flatten(0, 1))) for g in range(groups)]

    def deviation(values: list[float]) -> float:
        return float(np.std(values) * (groups - 1) ** 0.5)

    return {
        "effective_rank_sd": deviation([effective_rank(e) for e in spectra]),
        "isotropy_sd": deviation([isotropy(e) for e in spectra]),
    }


def over_training(path: Path | None) -> dict[str, list[float]]:
    """Return the steps and measures that a run logged; an empty dict if the model is not a run or logged none."""
    log = log_of(path)
    rows = [row for row in read_metrics(log) if all(name in row for name in OVER_TRAINING)] if log else []
    return {name: [row[name] for row in rows] for name in ("step", *OVER_TRAINING)} if rows else {}


def table(result: Mapping[str, Any]) -> Table:
    """Return a table with a row per model, and a sentence about each."""
    heading = (
        "model", "vectors", "D", "effective rank", "share", "participation ratio", "isotropy", "channel std, least",
        "median", "variance due to text", "SIGReg distance",
    )  # fmt: skip
    rows = [
        [
            label(row), f"{row['vectors']:,}", str(row["width"]),
            f"{row['effective_rank']:.1f} ± {row['effective_rank_sd']:.1f}", f"{row['rank']:.3f}",
            f"{row['participation_ratio']:.1f}", f"{row['isotropy']:.3f} ± {row['isotropy_sd']:.3f}",
            f"{row['std_min']:.3f}", f"{row['std_median']:.3f}", f"{row['text']:.3f}", f"{row['sigreg']:.4f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    head = (
        "Geometry of the standardized latents of held-out text. N(0, I) has a share, isotropy, deviations and variance of 1 "
        f"and a distance of 0; ± is a jackknife deviation over {result['groups']} groups of texts."
    )
    return Table.of(head, heading, rows, map(sentence, result["rows"]))


def sentence(row: Mapping[str, Any]) -> str:
    """Return a sentence that says if the latent space looks collapsed."""
    wrong = "; ".join(row["collapsed"])
    return f"{label(row)}: {f'looks collapsed: {wrong}' if wrong else 'does not look collapsed'}."


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw spectra on a common axis, and rank and isotropy over training if a run logged them."""
    runs = any(row["over_training"] for row in result["rows"])
    figure, panels = new_figure(3 if runs else 1, "geometry of the latent space")
    for i, row in enumerate(result["rows"]):
        color, values = LINE_COLORS[i % len(LINE_COLORS)], np.array(row["eigenvalues"])
        place = np.arange(1, len(values) + 1) / len(values)
        seen = values > 1e-9 * values.sum()  # smaller values are rounding errors and would stretch the axis
        panels[0].plot(place[seen], values[seen] / values.mean(), color=color, lw=1.6, label=label(row))
        history = row["over_training"]
        for axes, name in zip(panels[1:], OVER_TRAINING if history else (), strict=False):
            axes.plot(history["step"], history[name], "o-", color=color, ms=3, lw=1.4)
    panels[0].axhline(1, color=INK, ls="--", lw=1.0, label="isotropic")
    panels[0].set_yscale("log")
    dress(panels[0], "spectrum", "eigenvalue / mean eigenvalue", "direction, as a share of D")
    for axes, text in zip(panels[1:], OVER_TRAINING.values(), strict=False):
        dress(axes, f"{text} over training", text, "optimizer step")
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    panels[0].legend(fontsize=7.5, frameon=False, labelcolor=INK)
    return save_png(figure, path)
