"""Global structure (Figure 4b): correlation between latent positions across texts.

Shapes: S sequences, N latents, D latent width, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from jpeg_dlm.errors import DataError, UsageError
from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.results.pictures import INK, dress, new_figure, save_png
from jpeg_dlm.results.table import Table
from jpeg_dlm.rng import derive_seed
from jpeg_dlm.studies.latents import about, check_sources, clean_latents, heldout_of, identity, label
from jpeg_dlm.studies.study import Asked, StudyOutcome
from jpeg_dlm.text.blocks import EpochOrder

SEED = 20260919  # for the choice of sequences (paper)
RESAMPLES = 200  # (assumed)
PRODUCTS_AT_ONCE = 1 << 25  # numbers in a block of position products, 134 MB


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Compute the correlations of every model on its own held-out text."""
    check_sources(sources, rows=2)
    rows = [about(source) | _correlations(source, asked) for source in sources]
    result = {"study": "correlation", "seed": SEED, "resamples": RESAMPLES, "rows": rows}
    return StudyOutcome(result, [table(result)], lambda path: draw(result, path))


def _correlations(source: ModelSource, asked: Asked) -> dict[str, Any]:
    """Return the Gram matrix and its mean off the diagonal."""

    def make() -> dict[str, Any]:
        z_SND = clean_latents(source, distinct_rows(source, asked.n), asked.console)
        if z_SND.shape[1] < 2:
            raise UsageError(f"'{source.name}' has one latent position: a correlation needs at least two.")
        gram_NN = position_gram(z_SND)
        off = off_diagonal(gram_NN)
        low, high = np.quantile(bootstrap_means(z_SND, RESAMPLES), [0.025, 0.975])
        return {
            "sequences": len(z_SND), "latents": len(gram_NN), "mean": float(off.mean()), "low": float(low), "high": float(high),
            "mean_absolute": float(off.abs().mean()), "gram": [[round(x, 5) for x in row] for row in gram_NN.tolist()],
        }  # fmt: skip

    depends = identity(source) | {"kind": "correlation", "n": asked.n, "seed": SEED, "resamples": RESAMPLES}
    return asked.parts.get_or_make(f"correlation-{source.name}", depends, make)


def distinct_rows(source: ModelSource, n: int) -> list[int]:
    """Return the numbers of n held-out rows in random order, without duplicate texts."""
    heldout = heldout_of(source)
    order = EpochOrder(SEED, len(heldout)).order(0).tolist()
    first: dict[bytes, int] = {}
    for row in order:
        first.setdefault(heldout.rows([row]).numpy().tobytes(), row)
        if len(first) == n:
            break
    if len(first) < 2:
        raise DataError(f"A correlation needs at least two different rows of held-out text for '{source.name}': raise -n.")
    return list(first.values())


def position_gram(z_SND: Tensor) -> Tensor:
    """Return the Gram matrix (N, N) of the positions' unit vectors over sequences and channels, after subtracting the mean."""
    x_NK = (z_SND.double() - z_SND.double().mean(0)).transpose(0, 1).flatten(1)
    x_NK = F.normalize(x_NK, dim=1)
    return x_NK @ x_NK.T


def off_diagonal(gram_NN: Tensor) -> Tensor:
    """Return the entries off the diagonal as a vector."""
    return gram_NN[~torch.eye(len(gram_NN), dtype=torch.bool, device=gram_NN.device)]


def bootstrap_means(z_SND: Tensor, resamples: int, seed: int = 0) -> np.ndarray:
    """Return the mean off-diagonal entry of `position_gram` for each bootstrap resample of the sequences.

    With counts c, sum_s c_s z_s z_s' - S m m' is the Gram matrix before normalization: products are computed once.
    """
    total, latents, _ = z_SND.shape
    random = np.random.default_rng(derive_seed(seed, "bootstrap"))
    drawn_RS = random.multinomial(total, [1 / total] * total, size=resamples)
    counts_RS = torch.from_numpy(drawn_RS).to(z_SND)
    z_SND = z_SND - z_SND.mean(0)  # reduces rounding errors only
    mean_RND = torch.einsum("rs,snd->rnd", counts_RS, z_SND) / total
    length_RN = (counts_RS @ z_SND.square().sum(2) - total * mean_RND.square().sum(2)).clamp_min(1e-12).sqrt()
    sum_R = torch.zeros(resamples, dtype=z_SND.dtype, device=z_SND.device)
    for block in torch.arange(latents).split(max(1, PRODUCTS_AT_ONCE // (total * latents))):
        products_SAN = torch.einsum("sad,snd->san", z_SND[:, block], z_SND)
        gram_RAN = torch.einsum("rs,san->ran", counts_RS, products_SAN)
        gram_RAN -= total * torch.einsum("rad,rnd->ran", mean_RND[:, block], mean_RND)
        sum_R += (gram_RAN / length_RN[:, block, None] / length_RN[:, None, :]).sum((1, 2))
    return ((sum_R - latents) / (latents * (latents - 1))).cpu().numpy()  # subtracts the ones on the diagonal


def table(result: Mapping[str, Any]) -> Table:
    """Return a table with a row per model."""
    paper = paper_tables()["latent_correlation"]
    heading = (
        "model", "latents", "sequences", "mean correlation", "95% interval", "mean of absolute values",
        "paper (OWT-128, r = 0.5)",
    )  # fmt: skip
    rows = [
        [
            label(row), str(row["latents"]), str(row["sequences"]), f"{row['mean']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}", f"{row['mean_absolute']:.4f}",
            f"{paper[row['title']]:g}" if row["title"] in paper else "",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    head = (
        "Correlation between latent positions: mean of the signed entries off the diagonal of their Gram matrix, as the "
        "paper's wording has it, with a bootstrap interval over sequences."
    )
    return Table.of(head, heading, rows)


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw the off-diagonal entries of every model on one color scale."""
    grams = [np.array(row["gram"]) for row in result["rows"]]
    for gram in grams:
        np.fill_diagonal(gram, np.nan)
    most = max(np.nanmax(np.abs(gram)) for gram in grams)
    figure, panels = new_figure(len(grams), "correlation between latent positions")
    norm, colors = Normalize(-most, most), colormaps["RdBu_r"].with_extremes(bad="0.6")
    for axes, row, gram in zip(panels, result["rows"], grams, strict=True):
        axes.imshow(gram, cmap=colors, norm=norm, interpolation="nearest")
        heading = f"{label(row)}\nmean {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        dress(axes, heading, "latent position", "latent position")
        axes.grid(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=panels, shrink=0.9)
    bar.set_label("correlation (diagonal left out)", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
    return save_png(figure, path)
