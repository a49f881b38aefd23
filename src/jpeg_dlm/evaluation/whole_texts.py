"""A model with a context as a source of whole texts, written block after block, beside whole held-out documents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from jpeg_dlm.continuing import LongTexts
from jpeg_dlm.errors import UsageError
from jpeg_dlm.evaluation.sources import ModelSource, Real, SourceTexts, batches
from jpeg_dlm.machine.collectives import shared
from jpeg_dlm.text.blocks import Blocks

READ_AT_ONCE = 1024  # rows


def documents(blocks: Blocks) -> Iterator[list[int]]:
    """Yield the ids of each document of padded rows, without its end token."""
    document: list[int] = []
    for start in range(0, len(blocks), READ_AT_ONCE):
        for row in blocks.rows(range(start, min(start + READ_AT_ONCE, len(blocks)))).tolist():
            ended = blocks.index["eos_id"] in row
            document += row[: row.index(blocks.index["eos_id"])] if ended else row
            if ended:
                yield document
                document = []


class WholeTexts(ModelSource):
    """A model that writes texts of at most `length` ids from their beginning; real texts are cut at the same length."""

    def __init__(self, source: ModelSource, length: int, scale: float = 1.0) -> None:
        super().__init__(source.model, source.name, source.batch, source.heldout, source.reference, source.path)
        self.long = LongTexts.of(source.model, None, length, scale)

    def evaluations(self, sampler: dict[str, Any]) -> int:
        """Return the evaluations of a text of the full length."""
        blocks = -(-self.long.length // self.model.config.data.token_len)
        return blocks * super().evaluations(sampler) * (1 if self.long.scale == 1 else 2)

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        return super().identity(run, sampler) | {"length": self.long.length, "context_scale": self.long.scale}

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> SourceTexts:
        def write(rows: range) -> tuple[list[list[int]], float]:
            began = time.perf_counter()
            ids = self.long.tokens(len(rows), seed=run, first=rows.start, batch=self.batch, **sampler)
            return ids, time.perf_counter() - began

        parts, seconds = zip(*shared(batches(n or 1, self.batch), write), strict=True)
        return self.decoded([ids for part in parts for ids in part], specials, sum(seconds))

    def decoded(self, rows: Sequence[list[int]], specials: bool, seconds: float | None = None) -> SourceTexts:
        if specials:
            raise UsageError("This protocol scores special tokens, which whole texts do not have: choose another one.")
        return SourceTexts([self.model.tokenizer.decode(row) for row in rows], list(rows), seconds)

    def real(self, n: int, specials: bool = False) -> Real:
        if self.reference is not None:
            return super().real(n, specials)
        rows = [document[: self.long.length] for document in islice(documents(self.blocks), n)]
        return Real(self.decoded(rows, specials), f"held-out {self.blocks.fingerprint[:12]}", same_length=True)
