"""What training text says of written text: a trigram's perplexity, words that exist, rows that are copies.

Rows of `padded` data end with their first end token, and what follows is not looked at; other rows are whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jpeg_dlm.evaluation.text_metrics import distinct_n
from jpeg_dlm.rng import generator
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.tokenizer import TextTokenizer

MOST_TOKENS = 1 << 22  # of training text that are counted, evenly spread (assumed: ten seconds, once)
REAL_ROWS = 512  # of held-out text that written text is held against
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


# ---------------------------------------------------------------- rows


def cut_rows(rows_BL: np.ndarray, end_id: int | None) -> list[np.ndarray]:
    """Each row up to and with its first end token; whole without one, or where `end_id` is None."""
    if end_id is None:
        return list(rows_BL)
    return [row[: int(np.argmax(row == end_id)) + 1] if (row == end_id).any() else row for row in rows_BL]


def spread(total: int, count: int) -> np.ndarray:
    """Numbers of `count` rows, evenly spread over `total`; all of them if there are no more."""
    return np.arange(total) if count >= total else np.arange(count) * total // count


# ---------------------------------------------------------------- trigram


class Trigram:
    """p(token | the two before it in its row), interpolated by Witten and Bell's rule down to equal shares of a vocabulary.

    p(c | h) = (n(h c) + kinds(h) p(c | shorter h)) / (n(h) + kinds(h)), where kinds(h) is how many tokens were seen after h.
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
        """Ids and one more, which stands before the first token of a row."""
        return self.vocab_size + 1

    def _grams(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each token with none, one and two before it, as one number."""
        start = np.full(2, self.vocab_size)
        stream = np.concatenate([part for row in rows for part in (start, row)]).astype(np.int64)
        starts = np.cumsum([0, *(len(row) + 2 for row in rows[:-1])])
        real = np.ones(len(stream), bool)
        real[starts] = real[starts + 1] = False
        place = np.flatnonzero(real)
        c, b, a = stream[place], stream[place - 1], stream[place - 2]
        return [c, b * self.base + c, (a * self.base + b) * self.base + c]

    def nats(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """-log p of every token of all rows."""
        p = np.array(1 / self.vocab_size)
        for grams, (seen, counts, contexts, totals, kinds) in zip(self._grams(rows), self.levels, strict=True):
            count, context = _lookup(seen, grams), _lookup(contexts, grams // self.base)
            n_gram = np.where(count >= 0, counts[count], 0)
            n, k = np.where(context >= 0, totals[context], 0), np.where(context >= 0, kinds[context], 1)
            p = (n_gram + k * p) / (n + k)  # after what was never seen: p of the shorter history
        return -np.log(p)

    def perplexity(self, rows: Sequence[np.ndarray]) -> float:
        """exp of the mean over all tokens."""
        return math.exp(self.nats(rows).mean())


def _lookup(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The place of each key, -1 where it is not."""
    place = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == keys, place, -1)


# ---------------------------------------------------------------- words


def words_of(text: str, whole: bool) -> list[str]:
    """The words of a text without regard to case; of rows that were cut anywhere, not the first and the last."""
    words = WORD.findall(text.casefold())
    return words if whole else words[1:-1]


# ---------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Written:
    """What is known of some written rows."""

    words: float  # share of words that training text has
    distinct: float  # different pairs of words over all pairs
    trigram: float  # perplexity
    copied: float  # share of rows that training text has


class KnownText:
    """Training text, counted once; real and shuffled text by the same measures."""

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
        """Different pairs of words over all pairs, which falls with the number of rows."""
        return distinct_n([self.words(row) for row in rows], 2)

    def measure(self, rows: Sequence[np.ndarray]) -> Written:
        """What is known of rows that were cut."""
        words = [word for row in rows for word in self.words(row)]
        return Written(
            words=sum(word in self.known for word in words) / max(1, len(words)),
            distinct=self.distinct(rows),
            trigram=self.trigram.perplexity(rows),
            copied=sum(map(self.has, rows)) / len(rows),
        )

    def _joined(self, rows: Sequence[np.ndarray]) -> bytes:
        """Rows as one string of numbers; those that are whole texts, with their borders."""
        border = np.array([self.trigram.vocab_size] if self.padded else [], np.int64)
        return np.concatenate([border, *(part for row in rows for part in (row, border))]).astype("<u4").tobytes()

    def has(self, row: np.ndarray) -> bool:
        """Whether a row stands in the training text, anywhere, or as a whole text where rows are."""
        wanted, place = self._joined([row]), -1
        while (place := self.stream.find(wanted, place + 1)) % 4 and place >= 0:
            pass  # a match between two numbers is none
        return place >= 0


def shuffled(rows: Sequence[np.ndarray], end_id: int | None) -> list[np.ndarray]:
    """Each row's tokens in a random order that never changes; an end token stays at the end."""
    random, found = generator(0, "shuffled-tokens"), []
    for row in rows:
        ends = int(end_id is not None and row[-1] == end_id)
        order = torch.randperm(len(row) - ends, generator=random).numpy()
        found.append(np.concatenate([row[order], row[len(row) - ends :]]))
    return found
