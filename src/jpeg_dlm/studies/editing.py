"""Editing: share of tokens that texts keep when their latents get noise and are written anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jpeg_dlm.evaluation.noisy_tokens import real_tokens, right_tokens
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.results.pictures import LINE_COLORS, dress, new_figure, save_png
from jpeg_dlm.results.table import Table
from jpeg_dlm.studies.latents import about, check_sources, heldout_of, identity, label
from jpeg_dlm.studies.study import Asked, StudyOutcome

NOISES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SHOWN = 4  # texts whose variations are kept in the results


def analyze(sources: Sequence[ModelSource], asked: Asked) -> StudyOutcome:
    """Rewrite held-out texts of every model at each share of noise, and count the tokens in their old places."""
    check_sources(sources, rows=2)
    rows = [about(source) | _edited(source, asked) for source in sources]
    result = {"study": "editing", "noises": list(NOISES), "seeds": list(asked.seeds), "rows": rows}
    return StudyOutcome(result, [table(result)], lambda path: draw(result, path))


def _edited(source: ModelSource, asked: Asked) -> dict[str, Any]:
    def make() -> dict[str, Any]:
        return edited(source, min(asked.n, len(heldout_of(source))), asked)

    depends = identity(source) | {"kind": "editing", "n": asked.n, "seeds": asked.seeds, "noises": NOISES}
    return asked.parts.get_or_make(f"editing-{source.name}", depends, make)


def edited(source: ModelSource, n: int, asked: Asked) -> dict[str, Any]:
    """Return the share of kept tokens at each noise, chance, and some texts.

    Chance is the share of tokens that a text has in common with the text that another one became at full noise.
    """
    heldout, model = heldout_of(source), source.model
    tokens = heldout.rows(list(range(n)))
    batch = Batch(tokens, heldout.mask(tokens))
    shares, texts, written = [], [], tokens
    with asked.console.progress(f"{source.name}: writing texts anew", "levels") as progress:
        for i, noise in enumerate(NOISES):
            right = 0
            for seed in asked.seeds:
                written = model.rewritten(tokens, noise, seed=seed, batch=source.batch)
                right += int(right_tokens(written, batch).sum())
                if seed == asked.seeds[0]:
                    texts.append(list(model.to_text(written[:SHOWN])))
            shares.append(right / (len(asked.seeds) * int(real_tokens(batch).sum())))
            progress(i + 1, len(NOISES))
    chance = int(right_tokens(torch.roll(written, 1, 0), batch).sum()) / int(real_tokens(batch).sum())
    return {"texts": n, "kept": shares, "chance": chance, "original": list(model.to_text(tokens[:SHOWN])), "edited": texts}


def table(result: Mapping[str, Any]) -> Table:
    """Return a row per model with the share of kept tokens at each noise."""
    rows = [
        [label(row), *(f"{100 * share:.1f}%" for share in row["kept"]), f"{100 * row['chance']:.1f}%"] for row in result["rows"]
    ]
    head = f"Share of tokens in their old places after texts ({result['rows'][0]['texts']:,}) got noise and were written anew."
    return Table.of(head, ("model", *(f"noise {noise:g}" for noise in result["noises"]), "chance"), rows)


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw the share of kept tokens against the time at which writing begins."""
    figure, (axes,) = new_figure(1, "what an edit keeps of a text")
    for i, row in enumerate(result["rows"]):
        color = LINE_COLORS[i % len(LINE_COLORS)]
        times = [1 - noise for noise in result["noises"]]
        axes.plot(times, [100 * share for share in row["kept"]], "o-", ms=3, lw=1.3, color=color, label=label(row))
        axes.axhline(100 * row["chance"], color=color, ls=":", lw=1.0)
    dress(axes, "tokens in their old places (dotted: chance)", "kept tokens (%)", "t at which writing begins (noise is 1 - t)")
    axes.set_ylim(0, 103)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return save_png(figure, path)
