"""Floors and ceiling of a table of generated text, scored like the texts of a model, against other real texts.

Floors are tokens drawn by their frequency and real texts with their words shuffled, of the lengths of real texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from jpeg_dlm.api import Model
from jpeg_dlm.errors import DataError
from jpeg_dlm.evaluation.sources import ModelSource, Real, SourceTexts
from jpeg_dlm.rng import generator
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.known_text import MOST_TOKENS, spread
from jpeg_dlm.text.text_metrics import shuffle_words

Kind = Literal["unigram", "words", "real"]
ANCHORS: Mapping[Kind, str] = {"unigram": "tokens by frequency", "words": "words shuffled", "real": "real text"}


class Anchor:
    """One of these as a source of texts beside a model, whose tokenizer and held-out text it takes."""

    def __init__(self, kind: Kind, beside: ModelSource) -> None:
        if beside.heldout is None:
            raise DataError("There is no held-out text: prepare more of it.")
        self.kind: Kind = kind
        self.name, self.beside, self.heldout = ANCHORS[kind], beside, beside.heldout

    @property
    def model(self) -> Model:
        return self.beside.model

    def runs(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)[:1] if self.kind == "real" else list(seeds)

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.model.tokenizer.fingerprint
        return {"anchor": self.kind, "heldout": self.heldout.fingerprint, "tokenizer": tokenizer, "seed": run}

    def real(self, n: int, specials: bool = False) -> Real:
        return self.beside.real(n, specials)

    def enough(self, n: int) -> bool:
        """Return True if there are n real texts beside the n with which texts are compared."""
        return len(self.heldout) >= 2 * n

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> SourceTexts:
        n = min(n or 1, len(self.heldout))
        first = n if self.enough(n) else 0
        rows_BL = self.heldout.rows(range(first, first + n))
        if self.kind == "unigram":
            rows_BL = self.drawn(rows_BL, run)
        texts = self.beside.texts(rows_BL, specials)
        if self.kind != "words":
            return texts
        g = generator(run, "words")
        mixed = [shuffle_words(text, g) for text in texts.texts]
        return SourceTexts(mixed, [self.model.tokenizer.encode(text) for text in mixed])

    def drawn(self, rows_BL: Tensor, seed: int) -> Tensor:
        """Return rows of the same lengths with each token drawn by its frequency in the training text."""
        train = Blocks(self.heldout.folder, "train")
        seen = train.rows(spread(len(train), max(1, MOST_TOKENS // train.token_len)))
        counts_V = torch.bincount(seen.flatten(), minlength=train.vocab_size).double()
        kept_BL = torch.zeros_like(rows_BL, dtype=torch.bool)
        if train.index["padded"]:
            ends = torch.tensor([train.pad_id, train.index["eos_id"]])
            counts_V[ends] = 0
            kept_BL = torch.isin(rows_BL, ends)
        tokens = torch.multinomial(counts_V, rows_BL.numel(), replacement=True, generator=generator(seed, "unigram"))
        return torch.where(kept_BL, rows_BL, tokens.view_as(rows_BL))
