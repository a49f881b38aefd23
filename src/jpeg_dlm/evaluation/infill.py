"""Infilling of held-out text by a model, scored as a whole beside real texts and holes filled from other texts.

Shapes: N rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm import __version__
from jpeg_dlm.evaluation.sources import ModelSource, batches
from jpeg_dlm.flow.control import keep_given
from jpeg_dlm.machine.collectives import shared
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.base import FREE, require
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import Table
from jpeg_dlm.rng import generator
from jpeg_dlm.sampling.given import Decoded
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.text.rows import Layout
from jpeg_dlm.text.text_metrics import summary

LONGEST_RUN = 4  # tokens that are given, or hidden, in a row (assumed)
SHOWN = 8  # texts kept in the results
COLUMNS = ("model", "given tokens kept", "decoded by the latents", "hidden tokens recovered", "perplexity", "95% interval")


def templates(rows_NL: Tensor, layout: Layout, seed: int) -> Tensor:
    """Return rows in which given runs of 1 to 4 tokens alternate with runs that are FREE; the end of a row is given."""
    given_NL = torch.full_like(rows_NL, FREE)
    for i, row in enumerate(rows_NL):
        g = generator(seed, "holes", i)
        place, hidden = layout.start, bool(torch.randint(2, (), generator=g))
        while place < layout.start + layout.payload:
            size = int(torch.randint(1, LONGEST_RUN + 1, (), generator=g))
            if not hidden:
                given_NL[i, place : place + size] = row[place : place + size]
            place, hidden = place + size, not hidden
    given_NL = given_NL.masked_fill(~is_text(rows_NL, layout), FREE)
    return torch.where(rows_NL == layout.eos_id, rows_NL, given_NL) if layout.packing == "padded" else given_NL


def is_text(rows_NL: Tensor, layout: Layout) -> Tensor:
    """Return True where rows hold text: not the frame, the end or padding."""
    places_L = torch.arange(layout.token_len)
    text_NL = ((places_L >= layout.start) & (places_L < layout.start + layout.payload)).expand_as(rows_NL)
    if layout.packing != "padded":
        return text_NL
    return text_NL & (rows_NL != layout.eos_id) & (rows_NL != layout.pad_id)


def infill(
    source: ModelSource, scorer: Scorer, n: int, seed: int, sampler: Mapping[str, Any], parts: Parts, console: Console
) -> dict[str, Any]:
    """Fill in templates of the first n held-out rows and measure the result."""
    model, layout = source.model, source.model.layout
    require("templates", model.writer)
    heldout = source.blocks
    rows_NL = heldout.rows(range(min(n, len(heldout))))
    given_NL = templates(rows_NL, layout, seed)
    about = {"name": source.name, "title": model.method.title, "heldout": heldout.fingerprint, "n": len(rows_NL)}

    def write() -> dict[str, Any]:
        console.say(f"{source.name}: filling in {len(rows_NL):,} templates of seed {seed} ...")

        def fill(rows: range) -> tuple[list[list[int]], int, int]:
            options = {"seed": seed, "first": rows.start, "batch": source.batch, **sampler}
            decoded = Decoded(given := given_NL[rows.start : rows.stop])
            return model.sample(len(rows), given=given, watch=decoded, **options).tolist(), decoded.kept, decoded.tokens

        parts, kept, tokens = zip(*shared(batches(len(rows_NL), source.batch), fill), strict=True)
        return {"tokens": [row for part in parts for row in part], "decoded": sum(kept) / max(1, sum(tokens))}

    depends = about | {"kind": "infill", "version": __version__} | source.identity(seed, dict(sampler))
    written = parts.get_or_make(f"infill-{source.name}-seed{seed}", depends, write)
    filled_NL = torch.tensor(written["tokens"])
    other_NL = keep_given(_other(rows_NL, layout), given_NL)
    hidden_NL = is_text(rows_NL, layout) & (given_NL < 0)
    rows = {"filled": (filled_NL, given_NL), "real": (rows_NL, None), "other": (other_NL, given_NL)}
    texts = {name: list(model.to_text(*pair)) for name, pair in rows.items()}
    depends = {"kind": "infill-scores", "scorer": [scorer.hash, scorer.precision], "texts": texts}
    scores = parts.get_or_make(
        f"infill-scores-{source.name}-seed{seed}", depends,
        lambda: {name: _scores(scorer, said, f"{name} texts", console) for name, said in texts.items()},
    )  # fmt: skip
    return about | {
        "seed": seed,
        "given": int((is_text(rows_NL, layout) & (given_NL >= 0)).sum()),
        "hidden": int(hidden_NL.sum()),
        "kept": _share(filled_NL == given_NL, given_NL >= 0),
        "decoded": written["decoded"] if "guides" in model.writer.supports else None,
        "recovered": _share(filled_NL == rows_NL, hidden_NL),
        "scores": scores,
        "samples": [{name: said[i] for name, said in texts.items()} for i in range(min(SHOWN, len(rows_NL)))],
    }


def _share(right_NL: Tensor, where_NL: Tensor) -> float:
    return int((right_NL & where_NL).sum()) / max(1, int(where_NL.sum()))


def _other(rows_NL: Tensor, layout: Layout) -> Tensor:
    """Return rows with the text of the next row; where that is shorter, it is repeated, so that holes get text."""
    found = []
    for row in torch.roll(rows_NL, 1, 0):
        ids = row[is_text(row[None], layout)[0]].tolist() or [layout.eos_id]
        found.append(layout.beginning((ids * layout.token_len)[: layout.payload], layout.eos_id))
    own_NL = is_text(rows_NL, layout)
    return torch.where(own_NL, torch.tensor(found), rows_NL)


def _scores(scorer: Scorer, texts: list[str], title: str, console: Console) -> dict[str, float]:
    with console.progress(f"Scoring {title}", "texts") as progress:
        return summary(scorer.nll(texts, progress=progress))


def infill_table(rows: Sequence[Mapping[str, Any]], scorer: str) -> Table:
    """Return a row for each model, and rows for real text and for holes filled from other texts where these change."""
    cells: list[list[str]] = []
    for i, row in enumerate(rows):
        decoded = "" if row["decoded"] is None else f"{100 * row['decoded']:.1f}%"
        cells.append([
            f"{row['name']} ({row['title']}, {row['n']:,} texts)", f"{100 * row['kept']:g}%", decoded,
            f"{100 * row['recovered']:.1f}%", *_perplexity_cells(row["scores"]["filled"]),
        ])  # fmt: skip
        if i + 1 == len(rows) or rows[i + 1]["scores"]["real"] != row["scores"]["real"]:
            cells.append(["real text", "", "", "", *_perplexity_cells(row["scores"]["real"])])
            cells.append(["holes filled from other texts", "", "", "", *_perplexity_cells(row["scores"]["other"])])
    share = sum(row["given"] for row in rows) / sum(row["given"] + row["hidden"] for row in rows)
    head = f"Infilling of held-out text, of which {100 * share:.0f}% is given; perplexity of whole texts by {scorer}."
    return Table.of(head, COLUMNS, cells)


def _perplexity_cells(score: Mapping[str, float]) -> list[str]:
    return [f"{score['perplexity']:.1f}", f"{score['low']:.1f} to {score['high']:.1f}"]
