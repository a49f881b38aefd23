"""Reliable decoding (Figure 5): Gen-PPL of texts decoded between the latents of two texts, without and with noise.

With noise, the generative model first predicts clean latents once; the decode branch is not used (paper, appendix).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from torch import Tensor

from jpeg_dlm import __version__
from jpeg_dlm.evaluation.protocols import Protocol
from jpeg_dlm.evaluation.sources import ModelSource, SourceTexts
from jpeg_dlm.flow.vp import TanSchedule
from jpeg_dlm.methods.base import LatentView, linear_time
from jpeg_dlm.results.pictures import LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import Table
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.studies.latents import (
    about,
    batches_of,
    check_sources,
    heldout_of,
    identity,
    label,
    tan_ratio,
    unit_rms,
    view_of,
)
from jpeg_dlm.studies.steps import common_protocol
from jpeg_dlm.studies.study import Asked, StudyOutcome
from jpeg_dlm.text.blocks import EpochOrder
from jpeg_dlm.text.text_metrics import perplexity, perplexity_interval, unigram_entropy

LAMBDAS = (0.0, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0)  # (paper)
TIMES = (0.0, 0.1, 0.2, 0.3)  # forward times of COSMOS with d = 5 (paper); 0 is no noise
PAIR_SEED = 20260920  # (paper)
NOISE_SEED = 0  # (paper)
RESAMPLES = 2000  # (paper)
SHOWN = 2  # texts per point kept in the results


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Score every model at every noise level and lambda."""
    check_sources(sources, rows=2)
    scorer, protocol = asked.scorer(), common_protocol(sources)
    levels = [level(t) for t in TIMES]
    rows = [about(s) | {"levels": [_scored_path(s, one, scorer, protocol, asked) for one in levels]} for s in sources]
    result = {
        "study": "interpolation", "version": __version__, "scorer": scorer.name, "scorer_hash": scorer.hash,
        "protocol": protocol.name, "pairs": asked.n, "pair_seed": PAIR_SEED, "noise_seed": NOISE_SEED,
        "lambdas": list(LAMBDAS), "levels": levels, "rows": rows,
    }  # fmt: skip
    return StudyOutcome(result, tables(result), lambda path: draw(result, path))


def level(t: float) -> dict[str, float]:
    """Return the noise level at a time of COSMOS: sigma / alpha, and the time of the linear path with the same ratio."""
    ratio = tan_ratio(t, TanSchedule())
    return {"t": t, "ratio": ratio, "linear_t": linear_time(ratio)}


# ---------------------------------------------------------------- from pairs to texts


def draw_pairs(rows: int, n: int) -> np.ndarray:
    """Draw n pairs (n, 2) of different row numbers; each row is in one pair before any is in a second."""
    order, per_epoch = EpochOrder(PAIR_SEED, rows), rows // 2
    epochs = [order.order(epoch)[: 2 * per_epoch].reshape(-1, 2) for epoch in range(-(-n // per_epoch))]
    return np.concatenate(epochs)[:n]


def mixed(z_a: Tensor, z_b: Tensor, share: float) -> Tensor:
    """Return z_lambda = (1 - lambda) z_a + lambda z_b."""
    return (1 - share) * z_a + share * z_b


def seen_by_decoder(view: LatentView, z: Tensor, eps: Tensor, ratio: float) -> Tensor:
    """Return the latents themselves, or with noise a single prediction of the generative model."""
    return view.predict(view.noisy(z, eps, ratio), ratio) if ratio else z


def shared_noise(pairs: Sequence[int], like: Tensor) -> Tensor:
    """Return noise of unit RMS for each pair, the same for every lambda, level and model of this latent shape."""
    return unit_rms(RowNoise(NOISE_SEED, pairs, 0, like.device).normal("interpolation", *like.shape[1:]))


@torch.no_grad()
def path_texts(source: ModelSource, ratio: float, asked: Asked) -> list[list[str]]:
    """Return the texts of all pairs for each lambda."""
    pairs = draw_pairs(len(heldout_of(source)), asked.n)
    view = view_of(source.model.complete_method())
    texts: list[list[str]] = [[] for _ in LAMBDAS]
    ends = [batches_of(source, pairs[:, side].tolist()) for side in (0, 1)]
    with asked.console.progress(f"{source.name}: texts between texts", "pairs") as progress:
        for (places, batch_a), (_, batch_b) in zip(*ends, strict=True):
            z_a, z_b = view.encode(batch_a), view.encode(batch_b)
            eps = shared_noise(places, z_a)
            for found, share in zip(texts, LAMBDAS, strict=True):
                tokens_BL = view.decode(seen_by_decoder(view, mixed(z_a, z_b, share), eps, ratio))
                found += source.model.to_text(tokens_BL)
            progress(places.stop, len(pairs))
    return texts


# ---------------------------------------------------------------- from texts to figures


def _scored_path(
    source: ModelSource, at: Mapping[str, float], scorer: Scorer, protocol: Protocol, asked: Asked
) -> list[dict[str, Any]]:
    """Return the points of one noise level, in the order of lambda."""
    depends = identity(source) | {
        "kind": "interpolation-texts", "pairs": asked.n, "ratio": at["ratio"], "lambdas": LAMBDAS,
        "seeds": [PAIR_SEED, NOISE_SEED],
    }  # fmt: skip
    name = f"{source.name}-t{at['t']:g}"
    texts = asked.parts.get_or_make(
        f"between-{name}", depends, lambda: {"texts": path_texts(source, at["ratio"], asked)}
    )["texts"]  # fmt: skip
    points = []
    with asked.console.progress(f"Scoring {name}", "texts") as progress:
        for share, found in zip(LAMBDAS, texts, strict=True):
            points.append({"lambda": share} | _scored(f"{name}-{share:g}", found, scorer, protocol, asked.parts))
            progress(len(points) * len(found), len(LAMBDAS) * len(found))
    return points


def _scored(name: str, texts: list[str], scorer: Scorer, protocol: Protocol, parts: Parts) -> dict[str, Any]:
    """Return Gen-PPL with its interval over pairs, and entropy; None if the decoded texts are all blank."""

    def make() -> dict[str, Any]:
        scores = scorer.nll(texts, protocol.max_tokens, protocol.bos and scorer.bos_id is not None)
        kept = [score for score in scores if not score.skipped]
        found: dict[str, Any] = {"skipped": len(scores) - len(kept), "samples": texts[:SHOWN]}
        if not kept:
            return found | dict.fromkeys(("gen_ppl", "gen_ppl_low", "gen_ppl_high", "entropy"))
        low, high = perplexity_interval(kept, resamples=RESAMPLES)
        entropy = unigram_entropy(score.token_ids for score in kept)
        return found | {"gen_ppl": perplexity(kept), "gen_ppl_low": low, "gen_ppl_high": high, "entropy": entropy}

    depends = {
        "kind": "interpolation-scores", "version": __version__, "texts_sha256": SourceTexts(texts).sha256,
        "scorer": scorer.name, "scorer_hash": scorer.hash, "bf16": scorer.bf16, "protocol": protocol.name,
        "resamples": RESAMPLES,
    }  # fmt: skip
    return parts.get_or_make(f"scores-{name}", depends, make)


# ---------------------------------------------------------------- table and picture


def level_name(at: Mapping[str, float]) -> str:
    """Return the name of a level in tables and pictures."""
    return f"t = {at['t']:g}, SNR {at['ratio'] ** -2:.2f}" if at["ratio"] else "no noise"


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table per model, lambda against noise level."""
    head = (
        f"Gen-PPL by {result['scorer']}, protocol {result['protocol']}, over {result['pairs']} pairs of held-out texts, with "
        "its 95% interval and behind it the entropy in nats; t is COSMOS's time, other models have the same SNR."
    )
    found = [Table(head)]
    for row in result["rows"]:
        points = zip(*row["levels"], strict=True)
        cells = [[f"{one[0]['lambda']:g}", *map(_cell, one)] for one in points]
        found.append(Table.of(f"{label(row)}:", ("lambda", *map(level_name, result["levels"])), cells))
    return found


def _cell(point: Mapping[str, Any]) -> str:
    if point["gen_ppl"] is None:
        return "no text"
    return f"{point['gen_ppl']:.1f} ({point['gen_ppl_low']:.1f} to {point['gen_ppl_high']:.1f}), {point['entropy']:.2f}"


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw a panel per noise level, all on one scale."""
    figure, panels = new_figure(len(result["levels"]), "Gen-PPL between two texts")
    for k, (axes, at) in enumerate(zip(panels, result["levels"], strict=True)):
        for i, row in enumerate(result["rows"]):
            points = [point for point in row["levels"][k] if point["gen_ppl"] is not None]
            if points:
                _draw_path(axes, points, LINE_COLORS[i % len(LINE_COLORS)], label(row))
        dress(axes, level_name(at), f"Gen-PPL ({result['scorer']})", "λ, share of the second text")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
        if k:
            axes.sharey(panels[0])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return save_png(figure, path)


def _draw_path(axes: Axes, points: Sequence[Mapping[str, Any]], color: str, name: str) -> None:
    x = np.array([point["lambda"] for point in points])
    y, low, high = (np.array([point[key] for point in points]) for key in ("gen_ppl", "gen_ppl_low", "gen_ppl_high"))
    fine = np.linspace(x[0], x[-1], 201)
    axes.plot(fine, monotone_cubic(x, y, fine), color=color, lw=1.3)
    bars = np.maximum(0.0, [y - low, high - y])
    axes.errorbar(x, y, bars, fmt="o", ms=3.5, capsize=2, lw=1.0, color=color, label=name)


def monotone_cubic(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Evaluate the monotone cubic Hermite interpolant, which never overshoots (Fritsch and Butland)."""
    if len(x) < 3:
        return np.interp(at, x, y)
    h, slope = np.diff(x), np.diff(y) / np.diff(x)
    inner = np.zeros(len(x) - 2)
    same = slope[:-1] * slope[1:] > 0  # at extrema and next to flat segments, the slope is 0
    left, right = (2 * h[1:] + h[:-1])[same], (h[1:] + 2 * h[:-1])[same]
    inner[same] = (left + right) / (left / slope[:-1][same] + right / slope[1:][same])
    d = np.concatenate([[_end_slope(h, slope)], inner, [_end_slope(h[::-1], slope[::-1])]])

    k = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(h) - 1)
    s = (at - x[k]) / h[k]
    rise = s**2 * (3 - 2 * s)
    return (1 - rise) * y[k] + rise * y[k + 1] + h[k] * (s * (1 - s) ** 2 * d[k] - s**2 * (1 - s) * d[k + 1])


def _end_slope(h: np.ndarray, slope: np.ndarray) -> float:
    """Return the parabola's slope at an end, limited to keep the curve monotone."""
    d = ((2 * h[0] + h[1]) * slope[0] - h[0] * slope[1]) / (h[0] + h[1])
    if d * slope[0] <= 0:
        return 0.0
    return 3 * slope[0] if slope[0] * slope[1] <= 0 and abs(d) > abs(3 * slope[0]) else float(d)
