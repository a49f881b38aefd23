"""Studies of trained models: correlation between latent positions (Figure 4b), decoding between two texts (Figure 5), steps.

Shapes: S sequences, N latents, D latent width, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from torch import Tensor

from jpeg_dlm import __version__
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.metrics import MauveMode, perplexity, perplexity_interval, unigram_entropy
from jpeg_dlm.evaluation.paper import paper_tables
from jpeg_dlm.evaluation.plots import draw_sweep, scale_log
from jpeg_dlm.evaluation.protocols import PROTOCOLS, Protocol
from jpeg_dlm.evaluation.results import SystemResult, scorer_label
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.table import Cell, Column, Table, to_json, write_result
from jpeg_dlm.evaluation.tables import texts_table
from jpeg_dlm.evaluation.texts import ModelSource, batches
from jpeg_dlm.methods.base import Batch, LatentModel, linear_time
from jpeg_dlm.methods.cosmos import alpha_sigma_at
from jpeg_dlm.options import to_dict
from jpeg_dlm.text.blocks import EpochOrder
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.errors import DataError, UsageError
from jpeg_dlm.util.pictures import LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.util.rng import RowNoise, derive_seed


@dataclass(frozen=True)
class AnalysisRequest:
    """Settings of a study of trained models."""

    n: int  # texts
    seeds: tuple[int, ...]
    scorer: Callable[[], Scorer]  # loaded when first needed
    parts: DiskCache
    console: Console
    mauve: MauveMode = "auto"


@dataclass(frozen=True)
class StudyOutcome:
    """`result` holds everything that the tables and the picture show."""

    result: dict[str, Any]
    tables: Sequence[Table]
    draw: Callable[[Path], Path | None]

    def write(self, stem: Path) -> list[Path]:
        """Write `STEM.json`, `.md` and `.png`; return their paths."""
        written = write_result(stem, self.result, self.tables)
        return [*written, *filter(None, [self.draw(stem.with_suffix(".png"))])]


def common_protocol(sources: Sequence[ModelSource]) -> Protocol:
    """Return the paper's protocol if all models share one of its setups, else the default."""
    presets = {source.model.config.preset for source in sources}
    return PROTOCOLS.get(presets.pop() if len(presets) == 1 else "", PROTOCOLS["default"])


# ---------------------------------------------------------------- latents of held-out text


def view_of(source: ModelSource) -> LatentModel:
    """Return the latents of a model, whose encoder is built if it is missing."""
    method = source.model.complete_method()
    if view := method.latent_model():
        return view
    raise UsageError(f"{method.title} has no latents to look at: name checkpoints of a system with latents.")


def check_sources(sources: Sequence[ModelSource]) -> None:
    """Raise an error early for models without latents or encoder, and for too little text."""
    for source in sources:
        view_of(source)
        if len(source.blocks) < 2:
            raise DataError(f"'{source.name}' has fewer than two rows of held-out text: name more with --data.")


def batches_of(source: ModelSource, rows: Sequence[int]) -> Iterator[tuple[range, Batch]]:
    """Yield batches of (places in `rows`, the held-out rows there) on the model's device."""
    for places in batches(len(rows), source.batch):
        tokens_BL = source.blocks.rows([rows[i] for i in places]).to(source.model.method.device)
        yield places, Batch(tokens_BL, source.blocks.mask(tokens_BL))


def identity(source: ModelSource) -> dict[str, Any]:
    """Return everything that the latents of a model's held-out text depend on."""
    return {
        "version": __version__,
        "checkpoint_sha256": source.sha256,
        "tokenizer": source.model.tokenizer.fingerprint,
        "encoder": to_dict(source.model.config.encoder),
        "heldout": source.blocks.fingerprint,
        "device": source.model.method.device.type,
    }


def about(source: ModelSource) -> dict[str, Any]:
    """Return the description of a model for tables; a method with one latent per token has rate 1."""
    config = source.model.config
    rate = 1.0 if config.rate is None else config.rate
    facts = {"name": source.name, "title": source.model.method.title, "preset": config.preset, "rate": rate}
    facts["label"] = f"{source.name} ({facts['title']}, r = {rate:g})"
    return facts | {"checkpoint_sha256": source.sha256, "heldout": source.blocks.fingerprint}


# ---------------------------------------------------------------- correlation between positions

SEQUENCE_SEED = 20260919  # for the choice of sequences (paper)
SEQUENCE_RESAMPLES = 200  # (assumed)


def correlate(sources: Sequence[ModelSource], request: AnalysisRequest) -> StudyOutcome:
    """Compute the correlations of every model on its own held-out text."""
    check_sources(sources)
    rows = [about(source) | _correlations(source, request) for source in sources]
    result = {"study": "correlation", "seed": SEQUENCE_SEED, "resamples": SEQUENCE_RESAMPLES, "rows": rows}
    return StudyOutcome(result, [correlation_table(rows)], lambda path: draw_grams(rows, path))


def _correlations(source: ModelSource, request: AnalysisRequest) -> dict[str, Any]:
    """Return the Gram matrix and its mean off the diagonal."""

    def make() -> dict[str, Any]:
        z_SND = clean_latents(source, distinct_rows(source, request.n), request.console)
        if z_SND.shape[1] < 2:
            raise UsageError(f"'{source.name}' has one latent position: a correlation needs at least two.")
        gram_NN = position_gram(z_SND)
        off = off_diagonal(gram_NN)
        low, high = np.quantile(bootstrap_means(z_SND), [0.025, 0.975]).tolist()
        rounded = [[round(x, 5) for x in row] for row in gram_NN.tolist()]
        values = {"mean": float(off.mean()), "low": low, "high": high, "mean_absolute": float(off.abs().mean())}
        return {"sequences": len(z_SND), "latents": len(gram_NN), **values, "gram": rounded}

    depends = identity(source) | {"kind": "correlation", "n": request.n}
    depends |= {"seed": SEQUENCE_SEED, "resamples": SEQUENCE_RESAMPLES}
    return request.parts.get_or_compute(f"correlation-{source.name}", depends, make)


@torch.no_grad()
def clean_latents(source: ModelSource, rows: Sequence[int], console: Console) -> Tensor:
    """Return standardized clean latents (S, N, D) of held-out rows."""
    view, parts = view_of(source), []
    with console.progress(f"Encoding text with {source.name}", "rows") as progress:
        for places, batch in batches_of(source, rows):
            parts.append(view.encode(batch).float())
            progress(places.stop, len(rows))
    return torch.cat(parts)


def distinct_rows(source: ModelSource, n: int) -> list[int]:
    """Return the numbers of n held-out rows in random order, without duplicate texts."""
    heldout = source.blocks
    first: dict[bytes, int] = {}
    for row in EpochOrder(SEQUENCE_SEED, len(heldout)).order(0).tolist():
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


def bootstrap_means(z_SND: Tensor) -> list[float]:
    """Return the mean off-diagonal entry of `position_gram` for each bootstrap resample of the sequences."""
    total, random = len(z_SND), np.random.default_rng(derive_seed(0, "bootstrap"))
    counts_RS = random.multinomial(total, [1 / total] * total, size=SEQUENCE_RESAMPLES)
    drawn = (z_SND[np.repeat(np.arange(total), counts_S)] for counts_S in counts_RS)
    return [float(off_diagonal(position_gram(some_SND)).mean()) for some_SND in drawn]


def correlation_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row per model."""
    paper = paper_tables()["latent_correlation"]
    numbers = [Column(name, 4) for name in ("mean correlation", "95% interval", "mean of absolute values")]
    cells = [
        [row["label"], row["latents"], row["sequences"], row["mean"], (row["low"], row["high"]), row["mean_absolute"]]
        + [paper.get(row["title"])]
        for row in rows
    ]
    head = (
        "Correlation between latent positions: mean of the signed entries off the diagonal of their Gram matrix, as the "
        "paper's wording has it, with a bootstrap interval over sequences."
    )
    return Table.of(head, ("model", "latents", "sequences", *numbers, "paper (OWT-128, r = 0.5)"), cells)


def draw_grams(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the off-diagonal entries of every model on one color scale."""
    grams = [np.array(row["gram"]) for row in rows]
    for gram in grams:
        np.fill_diagonal(gram, np.nan)
    most = max(np.nanmax(np.abs(gram)) for gram in grams)
    figure, panels = new_figure(len(grams), "correlation between latent positions")
    colors = colormaps["RdBu_r"].with_extremes(bad="0.6")
    for axes, row, gram in zip(panels, rows, grams, strict=True):
        image = axes.imshow(gram, cmap=colors, vmin=-most, vmax=most, interpolation="nearest")
        heading = f"{row['label']}\nmean {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        dress(axes, heading, "latent position", "latent position")
        axes.grid(False)
    figure.colorbar(image, ax=panels, shrink=0.9, label="correlation (diagonal left out)")
    return save_png(figure, path)


# ---------------------------------------------------------------- texts between two texts
#
# With noise, the generative model first predicts clean latents once; the decode branch is not used (paper, appendix).

LAMBDAS = (0.0, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0)  # (paper)
TIMES = (0.0, 0.1, 0.2, 0.3)  # forward times of COSMOS with d = 5 (paper); 0 is no noise
PAIR_SEED = 20260920  # (paper)
NOISE_SEED = 0  # (paper)
RESAMPLES = 2000  # (paper)
SAMPLES = 2  # texts of a point kept in the results


def interpolate(sources: Sequence[ModelSource], request: AnalysisRequest) -> StudyOutcome:
    """Score every model at every noise level and lambda."""
    check_sources(sources)
    scorer, protocol, levels = request.scorer(), common_protocol(sources), [level(t) for t in TIMES]
    records = [record for s in sources for at in levels for record in _scored_path(s, at, scorer, protocol, request)]
    result = {
        "study": "interpolation",
        "version": __version__,
        "scorer": scorer.name,
        "scorer_hash": scorer.hash,
        "scorer_precision": scorer.precision,
        "protocol": protocol.name,
        "pairs": request.n,
        "levels": levels,
        "models": [about(source) for source in sources],
        "records": records,
    }
    return StudyOutcome(result, [path_table(result)], lambda path: draw_paths(result, path))


def level(t: float) -> dict[str, Any]:
    """Return the noise level at a time of COSMOS: sigma / alpha, and the time of the linear path with the same ratio."""
    alpha, sigma = alpha_sigma_at(t)
    ratio = sigma / alpha
    name = f"t = {t:g}, SNR {ratio**-2:.2f}" if ratio else "no noise"
    return {"name": name, "t": t, "ratio": ratio, "linear_t": linear_time(ratio)}


def draw_pairs(rows: int, n: int) -> np.ndarray:
    """Draw n pairs (n, 2) of different row numbers; each row is in one pair before any is in a second."""
    order, per_epoch = EpochOrder(PAIR_SEED, rows), rows // 2
    epochs = [order.order(epoch)[: 2 * per_epoch].reshape(-1, 2) for epoch in range(-(-n // per_epoch))]
    return np.concatenate(epochs)[:n]


def shared_noise(pairs: Sequence[int], like: Tensor) -> Tensor:
    """Return noise of unit RMS for each pair, the same for every lambda, level and model of this latent shape."""
    eps = RowNoise(NOISE_SEED, pairs, 0, like.device).normal("interpolation", *like.shape[1:])
    return eps / eps.square().mean((1, 2), keepdim=True).sqrt()


@torch.no_grad()
def path_texts(source: ModelSource, ratio: float, request: AnalysisRequest) -> list[list[str]]:
    """Return the texts of all pairs for each lambda."""
    pairs = draw_pairs(len(source.blocks), request.n)
    view = view_of(source)
    texts: list[list[str]] = [[] for _ in LAMBDAS]
    ends = [batches_of(source, pairs[:, side].tolist()) for side in (0, 1)]
    with request.console.progress(f"{source.name}: texts between texts", "pairs") as progress:
        for (places, batch_a), (_, batch_b) in zip(*ends, strict=True):
            z_a, z_b = view.encode(batch_a), view.encode(batch_b)
            eps = shared_noise(places, z_a)
            for between, share in zip(texts, LAMBDAS, strict=True):
                z = (1 - share) * z_a + share * z_b
                if ratio:  # with noise, the decoder sees a single prediction of the generative model
                    z = view.predict(view.noisy(z, eps, ratio), ratio)
                between += source.model.to_text(view.decode(z))
            progress(places.stop, len(pairs))
    return texts


def _scored_path(
    source: ModelSource, at: Mapping[str, Any], scorer: Scorer, protocol: Protocol, request: AnalysisRequest
) -> list[dict[str, Any]]:
    """Return the records of one noise level, in the order of lambda."""

    def make() -> dict[str, Any]:
        texts = path_texts(source, at["ratio"], request)
        request.console.say(f"Scoring {source.name}, {at['name']} ...")
        return {"scores": [score_texts(some, scorer, protocol) for some in texts]}

    depends = identity(source) | {"kind": "interpolation", "pairs": request.n, "ratio": at["ratio"]}
    depends |= {"lambdas": LAMBDAS, "seeds": [PAIR_SEED, NOISE_SEED], "protocol": protocol.name, "resamples": RESAMPLES}
    depends |= {"scorer": scorer.name, "scorer_hash": scorer.hash, "bf16": scorer.precision == "bf16"}
    scores = request.parts.get_or_compute(f"between-{source.name}-t{at['t']:g}", depends, make)["scores"]
    place = {"label": about(source)["label"], "t": at["t"]}
    return [place | {"lambda": share} | values for share, values in zip(LAMBDAS, scores, strict=True)]


def score_texts(texts: list[str], scorer: Scorer, protocol: Protocol) -> dict[str, Any]:
    """Return Gen-PPL with its interval over pairs, and entropy; None if the decoded texts are all blank."""
    scores = scorer.nll(texts, protocol.max_tokens, protocol.bos and scorer.bos_id is not None)
    kept = [score for score in scores if score.n_tokens]
    values: dict[str, Any] = {"skipped": len(scores) - len(kept), "samples": texts[:SAMPLES]}
    if not kept:
        return values | dict.fromkeys(("gen_ppl", "gen_ppl_low", "gen_ppl_high", "entropy"))
    low, high = perplexity_interval(kept, resamples=RESAMPLES)
    entropy = unigram_entropy(score.token_ids for score in kept)
    return values | {"gen_ppl": perplexity(kept), "gen_ppl_low": low, "gen_ppl_high": high, "entropy": entropy}


def path_table(result: Mapping[str, Any]) -> Table:
    """Return a row for each model and lambda, with Gen-PPL and entropy at every noise level."""
    rows: dict[tuple[str, float], list[Cell]] = {}
    for record in result["records"]:
        row = rows.setdefault((record["label"], record["lambda"]), [record["label"], f"{record['lambda']:g}"])
        row += ["no text", None] if record["gen_ppl"] is None else [record["gen_ppl"], record["entropy"]]
    columns = [c for at in result["levels"] for c in (Column(at["name"], 1), Column("entropy (nats)", 2))]
    head = (
        f"Gen-PPL by {scorer_label(result)}, protocol {result['protocol']}, over {result['pairs']} pairs of held-out texts, "
        "between two of them (lambda) with noise; t is COSMOS's time, other models have the same SNR."
    )
    return Table.of(head, ("model", "lambda", *columns), rows.values())


def draw_paths(result: Mapping[str, Any], path: Path) -> Path:
    """Draw a panel per noise level with 95% intervals over pairs, all on one scale."""
    figure, panels = new_figure(len(result["levels"]), "Gen-PPL between two texts")
    for axes, at in zip(panels, result["levels"], strict=True):
        for color, model in zip(cycle(LINE_COLORS), result["models"], strict=False):
            of_level = [r for r in result["records"] if r["label"] == model["label"] and r["t"] == at["t"]]
            records = [r for r in of_level if r["gen_ppl"]]
            y, low, high = (np.array([r[key] for r in records]) for key in ("gen_ppl", "gen_ppl_low", "gen_ppl_high"))
            look = {"fmt": "o-", "ms": 3.5, "capsize": 2, "lw": 1.2, "color": color, "label": model["label"]}
            axes.errorbar([r["lambda"] for r in records], y, np.maximum(0.0, [y - low, high - y]), **look)
        dress(axes, at["name"], f"Gen-PPL ({result['scorer']})", "λ, share of the second text")
        scale_log(axes, "y", (1, 1.5, 2, 3, 5, 7))
        if axes is not panels[0]:
            axes.sharey(panels[0])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return save_png(figure, path)


# ---------------------------------------------------------------- quality against solver steps

PAPER_PRESET = "lm1b"  # of the paper's sweep over steps
DEFAULT_STEPS = (4, 8, 16, 32, 64, 128)  # for other models (assumed)


def sweep_of(preset: str, own: int) -> tuple[int, ...]:
    """Return the paper's steps for its own setup, else powers of two, and always the model's own number."""
    paper = tuple(row["steps"] for row in paper_tables()["lm1b_steps"]["rows"])
    return tuple(sorted({*(paper if preset == PAPER_PRESET else DEFAULT_STEPS), own}))


def sweep_steps(sources: Sequence[ModelSource], request: AnalysisRequest) -> StudyOutcome:
    """Evaluate every model at every number of steps; a model without steps, such as AR, is one point."""
    settings = EvaluationRequest(common_protocol(sources), request.seeds, request.n, mauve=request.mauve)
    evaluation = Evaluation(request.scorer(), settings, request.parts, request.console)
    entries: list[SystemResult] = []
    for source in sources:
        config = source.model.config
        steps = sweep_of(config.preset, config.sampler.steps) if hasattr(config.sampler, "steps") else ()
        entries += [evaluation.entry(source, {"steps": k}) for k in steps] or [evaluation.entry(source, {})]
    result = evaluation.result(entries)
    values = to_json(result) | {"study": "steps", "paper": paper_tables()["lm1b_steps"]}
    tables = [texts_table(result), _paper_steps()]
    return StudyOutcome(values, tables, lambda path: draw_sweep(entries, evaluation.scorer.name, path))


def _paper_steps() -> Table:
    """Return the paper's sweep, which is of LM1B and of its own scorer."""
    paper = paper_tables()["lm1b_steps"]
    rows = [[row[name] for name in ("steps", "gen_ppl", "entropy", "mauve")] for row in paper["rows"]]
    head = f"The paper's sweep: LM1B, r = {paper['rate']:g}, {paper_tables()['scorer']}, {paper['seeds']} seeds."
    return Table.of(head, ("steps", Column("Gen-PPL", 2), Column("entropy (nats)", 3), Column("MAUVE", 3)), rows)


ANALYSES = {"steps": sweep_steps, "correlation": correlate, "interpolation": interpolate}  # by the name of their study
