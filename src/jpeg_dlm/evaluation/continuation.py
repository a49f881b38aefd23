"""Continuation of held-out text by a model, scored by a language model beside the real continuation and after other prompts.

A model with a context goes on by one block after the blocks that it sees; another one completes the second half of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from jpeg_dlm import __version__
from jpeg_dlm.api import Model
from jpeg_dlm.continuing import LongTexts, context_blocks
from jpeg_dlm.errors import DataError
from jpeg_dlm.evaluation.figures import mauve_or_reason
from jpeg_dlm.evaluation.infill import is_text
from jpeg_dlm.evaluation.sources import ModelSource, batches
from jpeg_dlm.machine.collectives import shared
from jpeg_dlm.machine.console import Console
from jpeg_dlm.methods.base import FREE, require
from jpeg_dlm.results.resumable import Parts
from jpeg_dlm.results.table import Table
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.rows import Layout
from jpeg_dlm.text.text_metrics import TextScore, repetition_rate, summary
from jpeg_dlm.wording import counted

SHOWN = 8  # texts kept in the results
SHORTEST = 2  # ids of a real continuation
COLUMNS = ("text", "perplexity given its prompt", "95% interval", "given another prompt", "MAUVE", "repeated 4-grams")


@dataclass(frozen=True)
class Case:
    """A held-out text in two parts: the prompt, and how it really goes on."""

    prompt: list[int]
    real: list[int]


def block_cases(blocks: Blocks, count: int, n: int) -> list[Case]:
    """Return the first n held-out rows with rows before them; up to `count` of those are the prompt."""

    def cases(number: int) -> Iterator[Case]:
        (row,), ((before,), (there,)) = blocks.rows([number]), blocks.before([number], count)
        ids = [i for i in row.tolist() if i not in (blocks.index["eos_id"], blocks.pad_id)]
        if there.any() and len(ids) >= SHORTEST:
            yield Case(before[there].flatten().tolist(), ids)

    return list(islice(chain.from_iterable(map(cases, range(len(blocks)))), n))


def row_cases(blocks: Blocks, layout: Layout, n: int) -> list[Case]:
    """Return the first n held-out rows cut in the middle, for models that see one row; shorter texts are left out."""
    half = layout.payload // 2
    rows = (blocks.rows([number]) for number in range(len(blocks)))
    texts = (row_1L[is_text(row_1L, layout)].tolist() for row_1L in rows)
    return list(islice((Case(ids[:half], ids[half:]) for ids in texts if half and len(ids) >= half + SHORTEST), n))


def completed(model: Model, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return the ids of rows that begin with these prompts, after them."""
    layout = model.layout
    given = torch.tensor([layout.beginning(prompt, FREE) for prompt in prompts])
    rows = model.sample(len(prompts), given=given, **options)
    texts = is_text(rows, layout)
    return [row[text].tolist()[len(prompt) :] for row, text, prompt in zip(rows, texts, prompts, strict=True)]


def conditional(scorer: Scorer, prompts: Sequence[str], wholes: Sequence[str]) -> list[TextScore]:
    """Score the texts after their prompts: the score of the whole without that of the ids which it shares with its prompt."""
    limit, pairs = scorer.context, []
    for prompt, whole in zip(prompts, wholes, strict=True):
        ids, head = scorer.encode(whole, limit), scorer.encode(prompt, limit)
        shared = next((i for i, (a, b) in enumerate(zip(ids, head, strict=False)) if a != b), min(len(ids), len(head)))
        pairs.append((ids, ids[:shared]))
    of_all, of_heads = (scorer.nll(wholes, limit, ids=list(rows)) for rows in zip(*pairs, strict=True))
    return [
        TextScore(a.nll_sum - b.nll_sum, a.n_tokens - b.n_tokens, tuple(ids[len(head) :]))
        for a, b, (ids, head) in zip(of_all, of_heads, pairs, strict=True)
    ]


def continuation(
    source: ModelSource, scorer: Scorer, n: int, seed: int, sampler: Mapping[str, Any], parts: Parts, console: Console,
    mauve: str = "auto", scale: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Continue n held-out prompts and measure the result."""
    model, count = source.model, context_blocks(source.model)
    require("prompts", model.writer)
    cases = block_cases(source.blocks, count, n) if count else row_cases(source.blocks, model.layout, n)
    if len(cases) < 2:
        raise DataError(f"The held-out texts of '{source.name}' are too short to be continued: give longer ones with --data.")
    prompts = [case.prompt for case in cases]
    about = {
        "name": source.name, "title": model.method.title, "heldout": source.blocks.fingerprint, "n": len(cases),
        "scale": scale, "seed": seed,
    }  # fmt: skip

    def write() -> dict[str, Any]:
        console.say(f"{source.name}: continuing {counted(len(cases), 'prompt')} with seed {seed} ...")

        def proceed(rows: range) -> list[list[int]]:
            own = prompts[rows.start : rows.stop]
            options = {"seed": seed, "first": rows.start, "batch": source.batch, **sampler}
            if not count:
                return completed(model, own, **options)
            found = LongTexts(model, own, model.config.data.token_len, scale).tokens(len(own), **options)
            return [row[len(prompt) :] for row, prompt in zip(found, own, strict=True)]

        return {"written": [ids for part in shared(batches(len(cases), source.batch), proceed) for ids in part]}

    depends = about | {"kind": "continuation", "version": __version__} | source.identity(seed, dict(sampler))
    written = parts.get_or_make(f"continuation-{source.name}-seed{seed}", depends, write)["written"]
    scored_by = [scorer.hash, scorer.precision]
    depends = {"kind": "continuation-scores", "scorer": scored_by, "mauve": mauve, "written": written} | about
    found = parts.get_or_make(
        f"continuation-scores-{source.name}-seed{seed}",
        depends,
        lambda: measured(source, scorer, cases, written, mauve, console),
    )
    return about | found


def measured(
    source: ModelSource, scorer: Scorer, cases: Sequence[Case], written: Sequence[list[int]], mauve: str, console: Console
) -> dict[str, Any]:
    """Return the scores of written and real continuations, after their own prompts and after others."""
    decode, far = source.model.tokenizer.decode, max(1, len(cases) // 2)  # rows of one document are near to each other
    prompts, real = [case.prompt for case in cases], [case.real for case in cases]
    others = prompts[far:] + prompts[:far]
    pairs = {"written": (prompts, written), "real": (prompts, real)}
    pairs |= {"written_elsewhere": (others, written), "real_elsewhere": (others, real)}
    scores: dict[str, list[TextScore]] = {}
    for name, (before, after) in pairs.items():
        with console.progress(f"Scoring {name.replace('_', ' ')} continuations", "texts"):
            wholes = [decode([*a, *b]) for a, b in zip(before, after, strict=True)]
            scores[name] = conditional(scorer, [decode(ids) for ids in before], wholes)
    texts = {"written": [decode(ids) for ids in written], "real": [decode(ids) for ids in real]}
    budget = max(1, min(scorer.context, source.model.config.data.token_len))
    counts = {name: sum(bool(text.strip()) for text in said) for name, said in texts.items()}

    def features() -> tuple[np.ndarray, np.ndarray]:
        return scorer.features(texts["written"], budget).numpy(), scorer.features(texts["real"], budget).numpy()

    return {
        "scores": {name: summary(found) for name, found in scores.items()},
        "repetition": {name: repetition_rate([s.token_ids for s in scores[name]]) for name in ("written", "real")},
        "mauve": mauve_or_reason(mauve, counts["written"], counts["real"], features),
        "samples": [
            {"prompt": decode(case.prompt), "written": texts["written"][i], "real": texts["real"][i]}
            for i, case in enumerate(cases[:SHOWN])
        ],
    }  # fmt: skip


def continuation_table(rows: Sequence[Mapping[str, Any]], scorer: str) -> Table:
    """Return a row for each model, and rows for real text where it changes."""
    cells: list[list[str]] = []
    for i, row in enumerate(rows):
        score, mauve = row["scores"], row["mauve"].get("mauve")
        name = f"{row['name']} ({row['title']}, {counted(row['n'], 'prompt')}, seed {row['seed']})"
        said = "" if mauve is None else f"{mauve:.3f}"
        cells.append([name, *_cells(score["written"], score["written_elsewhere"]), said, f"{row['repetition']['written']:.3f}"])
        if i + 1 == len(rows) or rows[i + 1]["scores"]["real"] != score["real"]:
            cells.append(["real text", *_cells(score["real"], score["real_elsewhere"]), "", f"{row['repetition']['real']:.3f}"])
    return Table.of(f"Continuation of held-out text, scored by {scorer}.", COLUMNS, cells)


def _cells(own: Mapping[str, float], elsewhere: Mapping[str, float]) -> list[str]:
    return [f"{own['perplexity']:.1f}", f"{own['low']:.1f} to {own['high']:.1f}", f"{elsewhere['perplexity']:.1f}"]
