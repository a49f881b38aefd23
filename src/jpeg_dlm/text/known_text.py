"""Measures samples against the training text: trigram perplexity, known words, copied rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jpeg_dlm.rng import generator
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.text_metrics import distinct_n
from jpeg_dlm.text.tokenizer import TextTokenizer

MOST_TOKENS = 1 << 22  # of training text to count, evenly spread (assumed: ten seconds, once)
REAL_ROWS = 512  # held-out rows to compare samples with
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


def cut_rows(rows_BL: np.ndarray, end_id: int | None) -> list[np.ndarray]:
    """Cut each row after its first end token; keep rows without one, and all rows if `end_id` is None."""
    if end_id is None:
        return list(rows_BL)
    return [row[: int(np.argmax(row == end_id)) + 1] if (row == end_id).any() else row for row in rows_BL]


def spread(total: int, count: int) -> np.ndarray:
    """Return the numbers of `count` rows evenly spread over `total`; all rows if `count` is larger."""
    return np.arange(total) if count >= total else np.arange(count) * total // count


class Trigram:
    """Trigram model with Witten-Bell interpolation down to the uniform distribution over the vocabulary.

    p(c | h) = (n(h c) + kinds(h) p(c | shorter h)) / (n(h) + kinds(h)), where kinds(h) counts the distinct tokens after h.
    """

    def __init__(self, rows: Sequence[np.ndarray], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.levels = []
        for grams in self._grams(rows):
            seen, counts = np.unique(grams, return_counts=True)
            contexts, place = np.unique(seen // self.base, return_inverse=True)
            self.levels.append((seen, counts, contexts, np.bincount(place, counts), np.bincount(place)))

    @property
    def base(self) -> int:
        """Number of ids, including one that marks the start of a row."""
        return self.vocab_size + 1

    def _grams(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return all unigrams, bigrams and trigrams, each encoded as one number."""
        start = np.full(2, self.vocab_size)
        stream = np.concatenate([part for row in rows for part in (start, row)]).astype(np.int64)
        starts = np.cumsum([0, *(len(row) + 2 for row in rows[:-1])])
        real = np.ones(len(stream), bool)
        real[starts] = real[starts + 1] = False
        place = np.flatnonzero(real)
        c, b, a = stream[place], stream[place - 1], stream[place - 2]
        return [c, b * self.base + c, (a * self.base + b) * self.base + c]

    def nats(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return -log p of every token of all rows."""
        p = np.array(1 / self.vocab_size)
        for grams, (seen, counts, contexts, totals, kinds) in zip(self._grams(rows), self.levels, strict=True):
            count, context = _lookup(seen, grams), _lookup(contexts, grams // self.base)
            n_gram = np.where(count >= 0, counts[count], 0)
            n, k = np.where(context >= 0, totals[context], 0), np.where(context >= 0, kinds[context], 1)
            p = (n_gram + k * p) / (n + k)  # after an unseen history, n = 0: p of the shorter history
        return -np.log(p)

    def perplexity(self, rows: Sequence[np.ndarray]) -> float:
        """Return exp of the mean nats over all tokens."""
        return math.exp(self.nats(rows).mean())


def _lookup(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the index of each key, or -1 if it is absent."""
    place = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == keys, place, -1)


def words_of(text: str, whole: bool) -> list[str]:
    """Return the case-folded words of a text; unless it is `whole`, without the first and last, which may be cut."""
    words = WORD.findall(text.casefold())
    return words if whole else words[1:-1]


@dataclass(frozen=True)
class Written:
    """Measures of some rows."""

    words: float  # share of words that occur in the training text
    distinct: float  # distinct word pairs over all word pairs
    trigram: float  # perplexity
    copied: float  # share of rows that occur in the training text


class KnownText:
    """Statistics of the training text, and the measures of real and shuffled text."""

    def __init__(self, train: Blocks, heldout: Blocks, tokenizer: TextTokenizer, most_tokens: int = MOST_TOKENS) -> None:
        self.tokenizer = tokenizer
        self.padded: bool = train.index["padded"]
        rows = self.cut(train.rows(spread(len(train), max(1, most_tokens // train.token_len))).numpy())
        self.trigram = Trigram(rows, train.vocab_size)
        self.known = {word for row in rows for word in self.words(row)}
        self.stream = self._joined(rows)
        real = self.cut(heldout.rows(np.arange(min(REAL_ROWS, len(heldout)))).numpy())
        self.real = self.measure(real) if real else None
        self.shuffled = self.trigram.perplexity(shuffled(real, tokenizer.eos_id if self.padded else None)) if real else None

    def cut(self, rows_BL: np.ndarray) -> list[np.ndarray]:
        return cut_rows(rows_BL, self.tokenizer.eos_id if self.padded else None)

    def words(self, row: np.ndarray) -> list[str]:
        return words_of(self.tokenizer.decode(row.tolist()), whole=self.padded)

    def distinct(self, rows: Sequence[np.ndarray]) -> float:
        """Return distinct word pairs over all word pairs, a share that falls with the number of rows."""
        return distinct_n([self.words(row) for row in rows], 2)

    def measure(self, rows: Sequence[np.ndarray]) -> Written:
        """Measure rows that `cut` returned."""
        words = [word for row in rows for word in self.words(row)]
        return Written(
            words=sum(word in self.known for word in words) / max(1, len(words)),
            distinct=self.distinct(rows),
            trigram=self.trigram.perplexity(rows),
            copied=sum(map(self.has, rows)) / len(rows),
        )

    def _joined(self, rows: Sequence[np.ndarray]) -> bytes:
        """Join rows into one byte string; if rows are whole texts, with separators."""
        border = np.array([self.trigram.vocab_size] if self.padded else [], np.int64)
        return np.concatenate([border, *(part for row in rows for part in (row, border))]).astype("<u4").tobytes()

    def has(self, row: np.ndarray) -> bool:
        """Return True if the training text contains a row, as a whole text if rows are whole texts."""
        wanted, place = self._joined([row]), -1
        while (place := self.stream.find(wanted, place + 1)) % 4 and place >= 0:
            pass  # a match that is not aligned to a token
        return place >= 0


def shuffled(rows: Sequence[np.ndarray], end_id: int | None) -> list[np.ndarray]:
    """Shuffle the tokens of each row with a fixed seed; an end token stays at the end."""
    random, found = generator(0, "shuffled-tokens"), []
    for row in rows:
        ends = int(end_id is not None and row[-1] == end_id)
        order = torch.randperm(len(row) - ends, generator=random).numpy()
        found.append(np.concatenate([row[order], row[len(row) - ends :]]))
    return found
