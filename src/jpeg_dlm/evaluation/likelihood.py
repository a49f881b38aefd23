"""Likelihood of text under a model itself: of held-out rows, or of all of any text. Shapes: B rows, L tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jpeg_dlm import __version__
from jpeg_dlm.api import Model
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.metrics import TextScore, perplexity, perplexity_interval
from jpeg_dlm.evaluation.texts import ModelSource, batches, is_prepared, prepared_blocks
from jpeg_dlm.methods.base import Batch, Method
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.packing import RowLayout, layout_of, pack_document
from jpeg_dlm.text.sources import ZERO_SHOT, budgeted, open_corpus
from jpeg_dlm.training.data import batch_of
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import shared
from jpeg_dlm.util.errors import DataError, UsageError
from jpeg_dlm.util.rng import RowNoise

HELDOUT = "held-out text"  # of the model's own corpus
DRAWS = 8  # random times per row
CHARACTERS = 1 << 18  # tokenized at once
ROWS_PER_CHUNK = 4096  # rows whose tokens are counted at once

Progress = Callable[[int, int | None], None]


def has_likelihood(method: Method) -> bool:
    """Return True if a method implements `likelihood`."""
    return type(method).likelihood is not Method.likelihood


@dataclass(frozen=True)
class ScoredRow:
    """A row of ids, of which those from `first` to before `end` count; what is before them is given."""

    ids: list[int]
    first: int
    end: int


@dataclass(frozen=True)
class TextRows:
    """Rows that hold every token of some text once, and how many documents it has, how many of them do not fit in a row."""

    rows: Sequence[ScoredRow]
    documents: int = 0
    cut: int = 0

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([astuple(row) for row in self.rows]).encode()).hexdigest()

    def parts(self, size: int) -> list[list[int]]:
        """Return the numbers of rows in batches of one length and as many given tokens."""
        key = lambda i: (self.rows[i].first, len(self.rows[i].ids))  # noqa: E731
        groups = [list(group) for _, group in itertools.groupby(sorted(range(len(self.rows)), key=key), key)]
        return [group[part.start : part.stop] for group in groups for part in batches(len(group), size)]

    def batch(self, numbers: Sequence[int], method: Method) -> Batch:
        """Return rows as a batch; a model of token rows is told what is given, another one has it in its code alone."""
        rows = [self.rows[i] for i in numbers]
        tokens_BL = torch.tensor([row.ids for row in rows])
        places_L = torch.arange(tokens_BL.shape[1])
        real_BL = torch.stack([(places_L >= row.first) & (places_L < row.end) for row in rows])
        first = rows[0].first if method.sources == "before" else 0
        return Batch(tokens_BL.to(method.device), real_BL.to(method.device), source_len=first)


def last_row(layout: RowLayout, before: Sequence[int], ids: Sequence[int], short: bool) -> ScoredRow:
    """Return the row that ends with `ids`, after as many of the tokens before them as fit.

    If there are too few, the row is short, which a model of token rows can read, or begins with ends of documents.
    """
    window = [*before, *ids][-layout.payload :]
    ends = [layout.separator] * (0 if short else layout.payload - len(window))
    row = layout.row([*ends, *window])[: layout.start + len(ends) + len(window) + layout.frame]
    return ScoredRow(row, len(row) - layout.frame - len(ids), len(row))


def text_rows(model: Model, text: str, n: int | None, console: Console) -> TextRows:
    """Return the first n rows (None: all) of a text file, a named corpus, a set of `ZERO_SHOT`, or a prepared folder."""
    data, tokenizer = model.config.data, model.tokenizer
    if data.source_len:
        raise UsageError("A model of pairs has no likelihood of a text: leave the text out, or name pairs with --data.")
    if is_prepared(Path(text)):
        splits = [prepared_blocks(model, Path(text), name) for name in ("train", "heldout")]
        ids = itertools.chain.from_iterable(split.rows([i]).tolist() for split in splits for i in range(len(split)))
        pad_id = splits[0].pad_id if splits[0].index["padded"] else None
        return TextRows([whole_row(row, pad_id) for row in itertools.islice(ids, n)])
    source, field, rules = ZERO_SHOT.get(text, (text, "", "none"))
    data = replace(data, source=source, field=field, detokenize=rules, whole=False)
    if data.packing == "sentences":  # which begins a row with the sentence that was cut in the row before
        data = replace(data, packing="continuous")
    layout, corpus = layout_of(data, tokenizer), open_corpus(data, tokenizer.keeps_white_space, console)
    pad_id = layout.pad_id if layout.packing == "padded" else None
    rows, carry, documents, cut = [], [], 0, 0
    stream = filter(None, (corpus.heldout or corpus.stream)(0))
    while (n is None or len(rows) < n) and (some := list(budgeted(stream, CHARACTERS, len))):
        if not all(isinstance(document, str) for document in some):
            raise DataError(f"'{text}' holds token ids, not text: name the text itself.")
        pieces = [str(document).split("\n") if layout.frame and tokenizer.boundary_id else [str(document)] for document in some]
        ids = iter(tokenizer.encode_batch(list(itertools.chain.from_iterable(pieces))))
        for count in map(len, pieces):
            packed, carry = pack_document(layout, carry, list(itertools.islice(ids, count)))
            rows += [whole_row(row, pad_id) for row in packed]
            documents, cut = documents + 1, cut + (pad_id is not None and len(packed) > 1)
    if carry and (n is None or len(rows) < n):
        before = rows[-1].ids[layout.start :][: layout.payload] if rows else []
        rows.append(last_row(layout, before, [i for piece in carry for i in piece], model.method.sources == "before"))
    if not rows:
        raise DataError(f"'{text}' holds no text: name another one.")
    return TextRows(rows[:n], documents, cut)


def whole_row(ids: list[int], pad_id: int | None) -> ScoredRow:
    """Return a row that counts but for the padding at its end."""
    return ScoredRow(ids, 0, max((i for i, token in enumerate(ids, 1) if token != pad_id), default=0))


# ---------------------------------------------------------------- figures


def likelihood_row(
    source: ModelSource, cache: DiskCache, console: Console, n: int | None, draws: int, seed: int, text: str = HELDOUT
) -> dict[str, Any]:
    """Return the likelihood of a text and the model's identity, or the reason why there is none."""
    model, method = source.model, source.model.method
    about = {
        "name": source.name,
        "method": model.config.method,
        "title": method.title,
        "checkpoint_sha256": source.sha256,
        "tokenizer": model.tokenizer.fingerprint,
        "text": text,
    }
    if not has_likelihood(method):
        return about | {"kind": None, "reason": f"{method.title} gives no likelihood: score its text instead."}
    rows = None if text == HELDOUT else text_rows(model, text, n, console)

    def compute() -> dict[str, Any]:
        with console.progress(f"Likelihood under {source.name}", "rows") as progress:
            if rows is None:
                return heldout_likelihood(source, n, draws, seed, progress)
            return text_likelihood(model, rows, draws, seed, source.batch, progress)

    depends = about | {"kind": "likelihood", "version": __version__, "n": n, "draws": draws, "seed": seed}
    depends |= {"batch": source.batch, "heldout": (rows or source.blocks).fingerprint}
    return about | cache.get_or_compute(f"likelihood-{source.name}", depends, compute)


def heldout_likelihood(
    source: ModelSource, n: int | None = None, draws: int = DRAWS, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the perplexity of the first `n` held-out rows (None: all), beside that of token frequencies."""
    heldout, model = source.blocks, source.model
    n = min(n or len(heldout), len(heldout))
    method = model.complete_method()
    draws = 1 if method.exact_likelihood else draws
    nats, tokens = heldout_nats(method, heldout, n, draws, seed, source.batch, progress)
    characters = sum(map(len, model.to_text(heldout.rows(range(n)))))
    figures = likelihood_figures(method, nats, tokens, characters, draws, seed)
    return figures | {"unigram_perplexity": unigram_perplexity(heldout, n), "heldout": heldout.fingerprint}


def text_likelihood(
    model: Model, text: TextRows, draws: int = DRAWS, seed: int = 0, batch: int = 64, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the perplexity of all of a text."""
    method, unknown = model.complete_method(), model.tokenizer.unk_id
    draws = 1 if method.exact_likelihood else draws
    nats, tokens = text_nats(method, text, draws, seed, batch, progress)
    counted_ids = [row.ids[row.first : row.end] for row in text.rows]
    characters = sum(len(model.tokenizer.decode(ids)) for ids in counted_ids)
    more = {"documents": text.documents, "cut": text.cut, "unknown": sum(i == unknown for ids in counted_ids for i in ids)}
    return likelihood_figures(method, nats, tokens, characters, draws, seed) | more


def likelihood_figures(
    method: Method, nats: np.ndarray, tokens: np.ndarray, characters: int, draws: int, seed: int
) -> dict[str, Any]:
    """Return the perplexity of rows with a 95% bootstrap interval over them."""
    scores = [TextScore(float(a), int(b), ()) for a, b in zip(nats, tokens, strict=True)]
    low, high = perplexity_interval(scores, seed=seed)
    return {
        "kind": "exact" if method.exact_likelihood else "bound",
        "perplexity": perplexity(scores),
        "perplexity_low": low,
        "perplexity_high": high,
        "nats_per_token": float(nats.sum() / tokens.sum()),
        "bits_per_character": float(nats.sum()) / math.log(2) / characters if characters else None,
        "rows": len(scores),
        "tokens": int(tokens.sum()),
        "characters": characters,
        "draws": draws,
        "seed": seed,
    }


def heldout_nats(
    method: Method, blocks: Blocks, n: int, draws: int, seed: int, batch: int, progress: Progress | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return nats and token counts of the first n rows of a split."""
    joined = method.sources == "before"
    make = partial(batch_of, blocks, device=method.device, joined=joined)
    return row_nats(method, batches(n, batch), make, draws, seed, progress)


def text_nats(
    method: Method, text: TextRows, draws: int, seed: int, batch: int, progress: Progress | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return nats and token counts of the rows of a text."""
    return row_nats(method, text.parts(batch), partial(text.batch, method=method), draws, seed, progress)


@torch.no_grad()
def row_nats(
    method: Method,
    parts: Sequence[Sequence[int]],
    batch: Callable[[Sequence[int]], Batch],
    draws: int,
    seed: int,
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return nats and token counts by the number of a row; the nats are means over `draws` random times.

    Draw d of row i is example `draws * i + d` of batches of `draws`, so that a method that stratifies its times draws one time
    in each of `draws` equal intervals for every row.
    """
    order = np.concatenate([np.asarray(part) for part in parts])

    def score(rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        nats, tokens = np.zeros(len(rows)), np.zeros(len(rows))
        examples = batch(rows)
        for draw in range(draws):
            noise = RowNoise(seed, [draws * row + draw for row in rows], 0, method.device, draws)
            likelihood = method.likelihood(examples, noise)
            if likelihood is None:
                raise DataError(f"{method.title} gives no likelihood: score its text instead.")
            nats += likelihood.nats_B.double().cpu().numpy() / draws
            tokens = likelihood.tokens_B.cpu().numpy()
        if progress is not None:
            progress(max(rows) + 1, len(order))
        return nats, tokens

    scored_2N = np.array([np.concatenate(values) for values in zip(*shared(parts, score), strict=True)], float)
    nats, tokens = scored_2N[:, order.argsort()]
    return nats, tokens


def unigram_perplexity(heldout: Blocks, n: int) -> float:
    """Return the perplexity of the first n held-out rows under the training split's token counts plus one."""
    counts = token_counts(Blocks(heldout.folder, "train")) + 1
    seen = token_counts(heldout, n)
    return math.exp(-float(seen @ np.log(counts / counts.sum())) / seen.sum())


def token_counts(blocks: Blocks, n: int | None = None) -> np.ndarray:
    """Count each token id in the first n rows (None: all), without padding."""
    counts = np.zeros(blocks.vocab_size, np.int64)
    n = len(blocks) if n is None else n
    for start in range(0, n, ROWS_PER_CHUNK):
        tokens_BL = blocks.rows(range(start, min(start + ROWS_PER_CHUNK, n)))
        mask_BL = blocks.mask(tokens_BL)
        real = tokens_BL.flatten() if mask_BL is None else tokens_BL[mask_BL]
        counts += np.bincount(real.numpy(), minlength=blocks.vocab_size)
    return counts
