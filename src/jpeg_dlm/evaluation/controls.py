"""Controls: samplers without a model (ours), made to lower single figures of text. Shapes: N texts, K words of a context."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np

from jpeg_dlm.evaluation.metrics import training_rows
from jpeg_dlm.evaluation.texts import SourceTexts, TextBaseline
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.util.rng import derive_seed

ORDERS = (2, 3, 4, 5)
PIECE = 4  # words of a piece in a collage
CONTROLS: Mapping[str, str] = {
    **{f"chain{k}": f"control: chain of order {k}" for k in ORDERS},
    "ngrams": f"control: collage of {PIECE}-grams",
    "parts": "control: collage of halves or sentences",
    "repeats": "control: every other text repeats its first half",
    "copies": "control: one text only",
}
SENTENCE = re.compile(r"(?<=[.!?])\s+")
Words = Sequence[str]


class WordChain:
    """The Markov chain over words that fits some texts best; after a context comes what follows it at a random place."""

    def __init__(self, texts: Sequence[Words], order: int, seed: int = 0) -> None:
        self.order, self.random = order, np.random.default_rng(derive_seed(seed, "chain", order))
        self.words = ["", *sorted(set(chain.from_iterable(texts)))]  # 0 is what stands before and after a text
        ids = {word: i for i, word in enumerate(self.words)}
        border = [0] * order
        stream = [*border, *chain.from_iterable([*map(ids.__getitem__, words), *border] for words in texts)]
        self.longest = max(map(len, texts))
        # A context is known by a random linear hash of 64 bits: two of millions are hardly ever the same.
        self.factors_K = self.random.integers(1 << 63, size=order, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        stream = np.array(stream, np.uint64)
        hashes = np.lib.stride_tricks.sliding_window_view(stream[:-1], order) @ self.factors_K
        places = np.argsort(hashes, kind="stable")
        self.hashes, self.following = hashes[places], stream[order:][places]

    def write(self, n: int) -> list[str]:
        """Return n texts; none is longer than the longest that the chain was fitted to."""
        rows_NK = np.zeros((n, self.order), np.uint64)
        for _ in range(self.longest):
            hashes_N = rows_NK[:, -self.order :] @ self.factors_K
            first_N, last_N = (np.searchsorted(self.hashes, hashes_N, side) for side in ("left", "right"))
            next_N = self.following[self.random.integers(first_N, np.maximum(last_N, first_N + 1))]
            ended_N = (rows_NK[:, -1] == 0) & (rows_NK.shape[1] > self.order)
            rows_NK = np.column_stack([rows_NK, np.where(ended_N, 0, next_N).astype(np.uint64)])
        return [" ".join(self.words[i] for i in row if i) for row in rows_NK.tolist()]


def collage_of_pieces(texts: Sequence[Words], random: np.random.Generator, size: int = PIECE) -> list[str]:
    """Return texts of the same lengths in words, made of random pieces of `size` words."""
    pieces = [words[i : i + size] for words in texts for i in range(max(1, len(words) - size + 1))]
    drawn = ([pieces[i] for i in random.integers(len(pieces), size=len(words))] for words in texts)
    return [" ".join(list(chain.from_iterable(some))[: len(words)]) for some, words in zip(drawn, texts, strict=True)]


def collage_of_parts(texts: Sequence[str], random: np.random.Generator) -> list[str]:
    """Return texts of which each sentence, or each half if there is one sentence, comes from another text, in its place."""
    written, groups = [""] * len(texts), defaultdict(list)
    for i, text in enumerate(texts):
        words, parts = text.split(), SENTENCE.split(text.strip())
        half = (len(words) + 1) // 2
        groups[len(parts)].append((i, parts if len(parts) > 1 else [" ".join(words[:half]), " ".join(words[half:])]))
    for group in groups.values():
        columns = zip(*(parts for _, parts in group), strict=True)
        mixed = [[column[i] for i in random.permutation(len(group))] for column in columns]
        for (i, _), parts in zip(group, zip(*mixed, strict=True), strict=True):
            written[i] = " ".join(filter(None, parts))
    return written


@cache
def training_words(folder: Path) -> list[list[str]]:
    """Return the words of the training texts of a prepared folder, which take some seconds to read."""
    train = Blocks(folder, "train")
    tokenizer, rows = train.tokenizer(), training_rows(train).tolist()
    return [words for row in rows if (words := tokenizer.decode(row).split())]


class Control(TextBaseline):
    """A control beside a model: a chain fitted to its training text, or pieces of held-out texts not compared with."""

    names = CONTROLS

    def write(self, run: int, n: int | None, sampler: dict[str, object], specials: bool) -> SourceTexts:
        others = self.source.texts(self.others(n), False).texts
        random, words = np.random.default_rng(derive_seed(run, self.kind)), [text.split() for text in others]
        match self.kind:
            case "ngrams":
                texts = collage_of_pieces(words, random)
            case "parts":
                texts = collage_of_parts(others, random)
            case "repeats":
                texts = [" ".join(w[: len(w) // 2] * 2) if i % 2 else " ".join(w) for i, w in enumerate(words)]
            case "copies":
                texts = [max(others, key=len)] * len(others)
            case _:
                texts = WordChain(training_words(self.heldout.folder), int(self.kind[-1]), run).write(len(others))
        return SourceTexts(texts, [self.model.tokenizer.encode(text) for text in texts])
