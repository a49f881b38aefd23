"""Diagnosis of trained models (beyond the paper): the measures of `training.diagnosis` on more text, one row per model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.results.pictures import LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import Table, emphasis
from jpeg_dlm.studies.latents import about, heldout_of, identity, log_of
from jpeg_dlm.studies.study import Asked, StudyOutcome
from jpeg_dlm.studies.workshop import training_seconds
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.diagnosis import Diagnosis
from jpeg_dlm.training.diagnosis_plot import diagnoses, draw_level, draw_over_steps, draw_over_times, readable_log

FIT_ROWS = 8192  # training rows for the linear denoiser: within 0.5% of using all rows for the bundled model (measured)
HELDOUT_ROWS = 512
RATIOS = (0.2, 0.3, 0.5, 0.7)  # shown in the table; the others are in the picture
OVER_STEPS = 0.3
DECODER = ("nll", "nll_other", "gap", "changed", "confidence", "confidence_generated")


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Diagnose every model; for runs, include the history."""
    rows = [_diagnosed(source, asked) for source in sources]
    result = {"study": "diagnose", "n": asked.n, "seeds": list(asked.seeds), "rows": rows}
    return StudyOutcome(result, [table(result), *decoder_tables(result)], lambda path: draw(result, path))


def _diagnosed(source: ModelSource, asked: Asked) -> dict[str, Any]:
    depends = identity(source) | {
        "kind": "diagnose", "n": asked.n, "seeds": asked.seeds, "fit": FIT_ROWS, "heldout_rows": HELDOUT_ROWS,
        "sampler": source.identity(0, {})["sampler"],
    }  # fmt: skip
    found = asked.parts.get_or_make(f"diagnose-{source.name}", depends, lambda: measure(source, asked))
    log = log_of(source.path)
    history = diagnoses(log) if log else {}
    return about(source) | {
        "minutes": training_seconds(log.parent) / 60 if log else None, "measures": found, "way": way(found),
        "over_training": {str(step): values for step, values in history.items()},
    }  # fmt: skip


def measure(source: ModelSource, asked: Asked) -> dict[str, float | None]:
    """Apply `Diagnosis` with more rows to the texts of all seeds, and measure the reconstruction by the codec."""
    method, heldout = source.model.complete_method(), heldout_of(source)
    train = Blocks(heldout.folder, "train")
    stream = BatchStream(train, source.model.config.train, method.device)
    diagnosis = Diagnosis(stream, heldout, source.model.tokenizer, FIT_ROWS, HELDOUT_ROWS)
    with asked.console.progress(f"Diagnosing {source.name}", "parts") as progress:
        found: dict[str, float | None] = dict(diagnosis.latents(method))
        progress(1, 2)
        rows_BL = np.concatenate([source.model.sample(asked.n, seed=seed).numpy() for seed in asked.seeds])
        found |= diagnosis.texts(rows_BL)
        progress(2, 2)
    return found | {"reconstruction": source.reconstruction(HELDOUT_ROWS)}


def way(found: Mapping[str, Any]) -> float | None:
    """Return the position of the samples between shuffled (0) and real text (1), in log trigram perplexity."""
    own, real, shuffled = (found.get(name) for name in ("trigram", "trigram_real", "trigram_shuffled"))
    if own is None or real is None or shuffled is None or real == shuffled:
        return None
    return math.log(shuffled / own) / math.log(shuffled / real)


def table(result: Mapping[str, Any]) -> Table:
    """Return a table with a row per model; measures that a model lacks stay empty."""
    heading = (
        "model", "minutes", *(f"ratio at {t:g}" for t in RATIOS), "accuracy at 0.5", "reconstruction", "rank", "joint rank",
        "words that exist", "distinct-2", "trigram perplexity", "way to real", "copied",
    )  # fmt: skip
    rows = []
    for row in result["rows"]:
        m = row["measures"]
        rows.append([
            f"{row['name']} ({row['title']})", _cell(row["minutes"], 1), *(_cell(m.get(f"ratio_{t:g}"), 2) for t in RATIOS),
            _cell(m.get("accuracy_0.5"), 2), _cell(m["reconstruction"], 3), _cell(m.get("rank"), 0),
            _cell(m.get("rank_joint"), 0), _cell(m["words"], 3), _cell(m["distinct"], 2), _cell(m["trigram"], 0),
            _cell(row["way"], 2), _cell(m["copied"], 3),
        ])  # fmt: skip
    for row in {row["heldout"]: row for row in result["rows"]}.values():
        m = row["measures"]
        real = [_cell(m.get(f"{name}_real"), digits) for name, digits in (("words", 3), ("distinct", 2), ("trigram", 0))]
        copied = _cell(m.get("copied_real"), 3)
        rows.append([emphasis(f"real text of {row['name']}"), *[""] * (5 + len(RATIOS)), *real, "1", copied])
        rows.append([emphasis("its tokens shuffled"), *[""] * (7 + len(RATIOS)), _cell(m.get("trigram_shuffled"), 0), "0", ""])
    head = (
        "Error of one prediction over that of the best linear denoiser, on held-out text (below 1 it knows more than means and "
        f"covariances); samples, {len(result['seeds'])} x {result['n']}, by what the training text has. Minutes are of "
        "optimizer steps, without the encoder's."
    )
    return Table.of(head, heading, rows)


def decoder_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table of the models with a contextual token decoder, if any."""
    rows = [
        [row["name"], *(_cell(row["measures"][f"decoder_{name}"], 3) for name in DECODER)]
        for row in result["rows"] if "decoder_gap" in row["measures"]
    ]  # fmt: skip
    head = (
        "Contextual token decoders on held-out text: nats per token given the text's own latents and another text's, the share "
        "of most probable tokens that change, and mean log p of the decoder's own tokens on given and generated latents."
    )
    heading = ("model", "nats", "with other latents", "gap", "changed", "log p, given latents", "log p, generated latents")
    return [Table.of(head, heading, rows)] if rows else []


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw ratio and accuracy over t, and measures over training if runs logged them; each model is a line."""
    histories = [{int(step): values for step, values in row["over_training"].items()} for row in result["rows"]]
    trained = any(histories)
    figure, panels = new_figure(4 if trained else 2, "one prediction of clean latents, and samples", columns=4)
    for i, (row, history) in enumerate(zip(result["rows"], histories, strict=True)):
        color = LINE_COLORS[i % len(LINE_COLORS)]
        draw_over_times(panels[0], row["measures"], "ratio", color, row["name"])
        draw_over_times(panels[1], row["measures"], "accuracy", color, row["name"])
        for axes, name in zip(panels[2:], (f"ratio_{OVER_STEPS:g}", "trigram"), strict=False):
            draw_over_steps(axes, history, {name: row["name"]}, (color,))
    draw_level(panels[0], 1.0, "--", "no better than a matrix")
    dress(panels[0], "error against the best linear denoiser", "error / linear error", "t (1 is clean)")
    dress(panels[1], "tokens of the decoded prediction", "share that is right", "t (1 is clean)")
    panels[1].set_ylim(-0.03, 1.03)
    if trained:
        dress(panels[2], f"at t = {OVER_STEPS:g}, over training", "error / linear error", "optimizer step")
        dress(panels[3], "trigram perplexity of samples", "perplexity", "optimizer step")
        for key, style in (("trigram_real", "--"), ("trigram_shuffled", ":")):
            draw_level(panels[3], result["rows"][0]["measures"].get(key), style, "")
        readable_log(panels[2])
        readable_log(panels[3])
    if panels[0].has_data():
        readable_log(panels[0])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return save_png(figure, path)
