"""Models in the lm-evaluation-harness: importing this module registers the model `jpeg_dlm`.

python -m jpeg_dlm lm-eval --model jpeg_dlm --model_args model=runs/ar,draws=32 --tasks ... --batch_size 64
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from jpeg_dlm.api import load
from jpeg_dlm.evaluation.likelihood import DRAWS, ScoredRow, TextRows, has_likelihood, last_row, text_nats
from jpeg_dlm.evaluation.tasks import completed
from jpeg_dlm.methods.ar import Ar
from jpeg_dlm.util.errors import MissingPackageError, UsageError

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingPackageError("lm-eval", "lm-eval", "The lm-evaluation-harness") from error

BATCH = 64
LONGEST = 256  # tokens of a generated text, unless the task says otherwise (the harness)


def run(words: Sequence[str]) -> None:
    """Run the harness's own command line, which knows our models."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    sys.argv = ["lm-eval", *words]
    cli_evaluate()


@register_model("jpeg_dlm")
class HarnessModel(LM):
    """A model folder, run or checkpoint; bounds are means over `draws` random times."""

    def __init__(
        self,
        model: str = "bundled",
        draws: int = DRAWS,
        seed: int = 0,
        batch_size: int | str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.seed = load(None if model == "bundled" else model, device), seed
        self.method, self.layout = self.model.complete_method(), self.model.layout
        self.draws = 1 if self.method.exact_likelihood else draws
        self.batch = int(text) if (text := str(batch_size)).isdigit() else BATCH

    # ------------------------------------------------------------ likelihood

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return log p(continuation | context), or a bound; only AR says whether the continuation is its greedy one."""
        if self.method.sources != "before" or self.model.config.data.source_len:
            raise UsageError(
                f"This model of {self.method.title} gives no likelihood after a context: choose AR, MDLM, SEDD or Duo."
            )
        rows = [self.continuation(*request.args) for request in requests]
        return list(zip(self.log_p(rows), self.greedy(rows), strict=True))

    def continuation(self, context: str, text: str) -> ScoredRow:
        """Return a row of a text after its context, or the end of it; a token of both is the text's."""
        encode = self.model.tokenizer.encode
        ids, head = encode(context + text), encode(context)
        same = next((i for i, (a, b) in enumerate(zip(ids, head, strict=False)) if a != b), min(len(ids) - 1, len(head)))
        return self.unframed(last_row(self.layout, ids[:same], ids[same:][-self.layout.payload :], short=True))

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return log p(text), or a bound; a long text is cut into rows, each token counts once, and no end token does."""
        size, start = self.layout.payload, self.layout.start
        rows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.model.tokenizer.encode(request.args[0])
            for at in range(0, len(ids), size):
                part = ids[at : at + size]
                if self.method.sources == "before":
                    rows.append(self.unframed(last_row(self.layout, ids[:at], part, short=True)))
                else:  # latents are of whole rows, in which the text stands as in training
                    rows.append(ScoredRow(self.layout.text_row(part), start, start + len(part)))
                owners.append(owner)
        totals = torch.zeros(len(requests), dtype=torch.float64)
        return totals.index_add(0, torch.tensor(owners, dtype=torch.long), torch.tensor(self.log_p(rows)).double()).tolist()

    def unframed(self, row: ScoredRow) -> ScoredRow:
        return replace(row, end=row.end - self.layout.frame)

    def log_p(self, rows: Sequence[ScoredRow]) -> list[float]:
        if not has_likelihood(self.method):
            raise UsageError(f"{self.method.title} gives no likelihood: choose tasks that generate text.")
        return (-text_nats(self.method, TextRows(rows), self.draws, self.seed, self.batch)[0]).tolist() if rows else []

    @torch.no_grad()
    def greedy(self, rows: Sequence[ScoredRow]) -> list[bool]:
        same, text, method = [False] * len(rows), TextRows(rows), self.method
        if not isinstance(method, Ar):
            return same
        for part in text.parts(self.batch):
            batch = text.batch(part, method)
            first = batch.source_len or method.unpredicted
            wrong_BL = method.most_probable(batch.tokens_BL, first) != batch.tokens_BL[:, first:]
            wrong_BL &= batch.real_BL[:, first:]
            for row, wrong in zip(part, wrong_BL.any(1).tolist(), strict=True):
                same[row] = not wrong
        return same

    # ------------------------------------------------------------ generation

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return texts after prompts, or targets of sources, by the model's own sampler, up to the first stop sequence."""
        contexts, options = zip(*(request.args for request in requests), strict=True)
        place: dict[str, Any] = {"seed": self.seed, "batch": self.batch}
        if self.model.config.data.source_len:
            texts = self.model.generate(1, source=list(contexts), **place)
        else:
            decode, size = self.model.tokenizer.decode, self.layout.payload
            rooms = [max(1, min(option.get("max_gen_toks", LONGEST), size // 2)) for option in options]
            ids = [self.model.tokenizer.encode(text)[-(size - room) :] for text, room in zip(contexts, rooms, strict=True)]
            written = [
                row[: o.get("max_gen_toks", LONGEST)]
                for row, o in zip(completed(self.model, ids, **place), options, strict=True)
            ]
            texts = [decode([*a, *b]).removeprefix(decode(a)) for a, b in zip(ids, written, strict=True)]
        return [until(text, option.get("until", [])) for text, option in zip(texts, options, strict=True)]


def until(text: str, stops: str | Sequence[str]) -> str:
    """Return a text up to the first of these."""
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop)[0] if stop else text
    return text
