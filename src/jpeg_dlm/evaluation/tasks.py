"""Tasks beside free writing: held-out text that is continued or filled in. Shapes: N rows, L tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm import __version__
from jpeg_dlm.api import Model
from jpeg_dlm.evaluation.brier import brier_lm
from jpeg_dlm.evaluation.evaluate import Evaluation
from jpeg_dlm.evaluation.metrics import TextScore, repetition_rate, summary
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.evaluation.texts import ModelSource, SourceTexts, batches
from jpeg_dlm.flow.guidance import keep_fixed
from jpeg_dlm.methods.base import FREE, require_capability
from jpeg_dlm.sampling.prompts import FixedTokenCounter
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.packing import RowLayout
from jpeg_dlm.util.distributed import shared
from jpeg_dlm.util.errors import DataError, counted
from jpeg_dlm.util.rng import generator

SHOWN = 8  # texts kept in the results
SHORTEST = 2  # ids of a real continuation
LONGEST_RUN = 4  # tokens that are given, or hidden, in a row (assumed)


def templates(rows_NL: Tensor, layout: RowLayout, seed: int) -> Tensor:
    """Return rows in which given runs of 1 to 4 tokens alternate with runs that are FREE; the end of a row is given."""
    fixed_NL = torch.full_like(rows_NL, FREE)
    for i, row in enumerate(rows_NL):
        g = generator(seed, "holes", i)
        place, hidden = layout.start, bool(torch.randint(2, (), generator=g))
        while place < layout.start + layout.payload:
            size = int(torch.randint(1, LONGEST_RUN + 1, (), generator=g))
            if not hidden:
                fixed_NL[i, place : place + size] = row[place : place + size]
            place, hidden = place + size, not hidden
    fixed_NL = fixed_NL.masked_fill(~is_text(rows_NL, layout), FREE)
    return torch.where(rows_NL == layout.eos_id, rows_NL, fixed_NL) if layout.packing == "padded" else fixed_NL


def is_text(rows_NL: Tensor, layout: RowLayout) -> Tensor:
    """Return True where rows hold text: not the frame, the end or padding."""
    places_L = torch.arange(layout.token_len)
    text_NL = ((places_L >= layout.start) & (places_L < layout.start + layout.payload)).expand_as(rows_NL)
    if layout.packing != "padded":
        return text_NL
    return text_NL & (rows_NL != layout.eos_id) & (rows_NL != layout.pad_id)


def infill(source: ModelSource, evaluation: Evaluation, n: int, seed: int, sampler: dict[str, Any]) -> dict[str, Any]:
    """Fill in templates of the first n held-out rows, and score them beside real rows and holes filled from other texts."""
    model, layout, heldout = source.model, source.model.layout, source.blocks
    require_capability("templates", model.parts.writer)
    rows_NL = heldout.rows(range(min(n, len(heldout))))
    fixed_NL = templates(rows_NL, layout, seed)
    about = source.about(sampler, len(rows_NL), seed=seed)

    def write() -> dict[str, Any]:
        evaluation.console.say(f"{source.name}: filling in {len(rows_NL):,} templates of seed {seed} ...")

        def fill(rows: range) -> tuple[list[list[int]], int, int]:
            options = {"seed": seed, "first": rows.start, "batch": source.batch, **sampler}
            decoded = FixedTokenCounter(fixed := fixed_NL[rows.start : rows.stop])
            return model.sample(len(rows), fixed=fixed, watch=decoded, **options).tolist(), decoded.kept, decoded.tokens

        parts, kept, tokens = zip(*shared(batches(len(rows_NL), source.batch), fill), strict=True)
        return {"tokens": [row for part in parts for row in part], "decoded": sum(kept) / max(1, sum(tokens))}

    depends = about | {"kind": "infill", "version": __version__} | source.identity(seed, sampler)
    written = evaluation.cache.get_or_compute(f"infill-{source.name}-seed{seed}", depends, write)
    filled_NL = torch.tensor(written["tokens"])
    other_NL = keep_fixed(_other(rows_NL, layout), fixed_NL)
    text_NL = is_text(rows_NL, layout)
    rows = {"filled": (filled_NL, fixed_NL), "real": (rows_NL, None), "other": (other_NL, fixed_NL)}
    texts = {name: list(model.to_text(*pair)) for name, pair in rows.items()}
    scorer = evaluation.scorer

    def score() -> dict[str, Any]:
        with evaluation.console.progress("Scoring filled-in texts", "texts") as progress:
            return {name: summary(scorer.nll(some, progress=progress)) for name, some in texts.items()}

    depends = {"kind": "infill-scores", "scorer": [scorer.hash, scorer.precision], "texts": texts}
    return about | {
        "given": int((text_NL & (fixed_NL >= 0)).sum()),
        "hidden": int((text_NL & (fixed_NL < 0)).sum()),
        "kept": _share(filled_NL == fixed_NL, fixed_NL >= 0),
        "decoded": written["decoded"] if "guides" in model.supports else None,
        "recovered": _share(filled_NL == rows_NL, text_NL & (fixed_NL < 0)),
        "scores": evaluation.cache.get_or_compute(f"infill-scores-{source.name}-seed{seed}", depends, score),
        "samples": [dict(zip(texts, some, strict=True)) for some in islice(zip(*texts.values(), strict=True), SHOWN)],
    }


def _share(right_NL: Tensor, where_NL: Tensor) -> float:
    return int((right_NL & where_NL).sum()) / max(1, int(where_NL.sum()))


def _other(rows_NL: Tensor, layout: RowLayout) -> Tensor:
    """Return rows with the text of the next row; where that is shorter, it is repeated, so that holes get text."""
    others = []
    for row in torch.roll(rows_NL, 1, 0):
        ids = row[is_text(row[None], layout)[0]].tolist() or [layout.eos_id]
        others.append(layout.beginning((ids * layout.token_len)[: layout.payload], layout.eos_id))
    return torch.where(is_text(rows_NL, layout), torch.tensor(others), rows_NL)


# ---------------------------------------------------------------- continuation


Case = tuple[list[int], list[int]]  # a held-out text in two parts: the prompt, and how it really goes on


def block_cases(blocks: Blocks, count: int, n: int) -> list[Case]:
    """Return the first n held-out rows with rows before them; up to `count` of those are the prompt."""

    def cases(number: int) -> Iterator[Case]:
        (row,), ((before,), (there,)) = blocks.rows([number]), blocks.before([number], count)
        ids = [i for i in row.tolist() if i not in (blocks.index["eos_id"], blocks.pad_id)]
        if there.any() and len(ids) >= SHORTEST:
            yield before[there].flatten().tolist(), ids

    return list(islice(chain.from_iterable(map(cases, range(len(blocks)))), n))


def row_cases(blocks: Blocks, layout: RowLayout, n: int) -> list[Case]:
    """Return the first n held-out rows cut in the middle, for models that see one row; shorter texts are left out."""
    half = layout.payload // 2
    rows = (blocks.rows([number]) for number in range(len(blocks)))
    texts = (row_1L[is_text(row_1L, layout)].tolist() for row_1L in rows)
    return list(islice(((ids[:half], ids[half:]) for ids in texts if half and len(ids) >= half + SHORTEST), n))


def completed(model: Model, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return the ids of rows that begin with these prompts, after them."""
    layout = model.layout
    fixed = torch.tensor([layout.beginning(prompt, FREE) for prompt in prompts])
    rows = model.sample(len(prompts), fixed=fixed, **options)
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
    source: ModelSource, evaluation: Evaluation, n: int, seed: int, sampler: dict[str, Any], scale: float = 1.0
) -> dict[str, Any]:
    """Continue n held-out prompts, and score the texts beside the real ones, after their own prompts and after others.

    A model with a context goes on by one block after the blocks that it sees; another one completes the second half of a row.
    """
    model, count = source.model, source.model.context_blocks
    require_capability("prompts", model.parts.writer)
    cases = block_cases(source.blocks, count, n) if count else row_cases(source.blocks, model.layout, n)
    if len(cases) < 2:
        raise DataError(f"The held-out texts of '{source.name}' are too short to be continued: give longer ones with --data.")
    about = source.about(sampler, len(cases), seed=seed) | {"scale": scale}

    def write() -> dict[str, Any]:
        evaluation.console.say(f"{source.name}: continuing {counted(len(cases), 'prompt')} with seed {seed} ...")

        def proceed(rows: range, copy: int = 0) -> list[list[int]]:
            prompts = [prompt for prompt, _ in cases[rows.start : rows.stop]]
            place = {"seed": seed, "first": copy * len(cases) + rows.start, "batch": source.batch}
            if not count:
                return completed(model, prompts, **place, **sampler)
            long = replace(model.blockwise(None, model.config.data.token_len, scale, **sampler), prompts=prompts)
            return [ids[len(prompt) :] for ids, prompt in zip(long.tokens(len(prompts), **place), prompts, strict=True)]

        parts = batches(len(cases), source.batch)
        return {
            name: [ids for part in shared(parts, partial(proceed, copy=copy)) for ids in part]
            for copy, name in enumerate(("written", "again"))
        }

    cache, scorer = evaluation.cache, evaluation.scorer
    depends = about | {"kind": "continuation", "version": __version__} | source.identity(seed, sampler)
    texts = cache.get_or_compute(f"continuation-{source.name}-seed{seed}", depends, write)
    written, brier = texts["written"], brier_lm(texts["written"], texts["again"], [[real] for _, real in cases])
    depends = about | {"kind": "continuation-scores", "scorer": [scorer.hash, scorer.precision], "written": written}
    depends |= {"mauve": evaluation.request.mauve}
    label = f"continuation-scores-{source.name}-seed{seed}"
    scores = cache.get_or_compute(label, depends, lambda: _score_continuations(source, evaluation, cases, written))
    return about | scores | {"brier": brier}


def _score_continuations(
    source: ModelSource, evaluation: Evaluation, cases: Sequence[Case], written: Sequence[list[int]]
) -> dict[str, Any]:
    decode, far = source.model.tokenizer.decode, max(1, len(cases) // 2)  # rows of one document are near to each other
    prompts, real = map(list, zip(*cases, strict=True))
    others = prompts[far:] + prompts[:far]
    pairs = {"written": (prompts, written), "real": (prompts, real)}
    pairs |= {"written_elsewhere": (others, written), "real_elsewhere": (others, real)}
    scores: dict[str, list[TextScore]] = {}
    for name, (before, after) in pairs.items():
        with evaluation.console.progress(f"Scoring {name.replace('_', ' ')} continuations", "texts"):
            wholes = [decode([*a, *b]) for a, b in zip(before, after, strict=True)]
            scores[name] = conditional(evaluation.scorer, [decode(ids) for ids in before], wholes)
    texts = {"written": [decode(ids) for ids in written], "real": [decode(ids) for ids in real]}
    length = min(evaluation.scorer.context, source.model.config.data.token_len)
    samples = zip(map(decode, prompts), texts["written"], texts["real"], strict=True)
    return {
        "scores": {name: summary(of_texts) for name, of_texts in scores.items()},
        "repetition": {name: repetition_rate([s.token_ids for s in scores[name]]) for name in ("written", "real")},
        "mauve": evaluation.mauve(SourceTexts(texts["written"]), SourceTexts(texts["real"]), length),
        "samples": [{"prompt": prompt, "written": own, "real": true} for prompt, own, true in islice(samples, SHOWN)],
    }


def task_results(task: str, source: ModelSource, evaluation: Evaluation, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return the rows of 'continue' or 'infill' for every sampler and seed of a request; `scale` is over the context."""
    request, n = evaluation.request, evaluation.request.n or evaluation.protocol.n
    run = infill if task == "infill" else partial(continuation, scale=scale)
    variants = request.variants(source.model.config.sampler)
    return [run(source, evaluation, n, seed, sampler) for sampler in variants for seed in request.seeds]
