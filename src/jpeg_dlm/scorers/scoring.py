"""The common interface of language models that score text: negative log-likelihoods and features of texts.

Without a beginning token the first token is context only (LM1B); with it every token is scored (OWT).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.machine.collectives import shared, world_size
from jpeg_dlm.machine.cpu import make_safe, with_limit
from jpeg_dlm.text.text_metrics import TextScore

TOKENS_PER_BATCH = 2048  # logits of a batch over 50 k tokens stay near 400 MB
PAPER_SCORER_TOKENS = 1024  # released: the first 1024 tokens of a text are scored

Progress = Callable[[int, int], None]
Scored = Literal["all", "eos", "non_eos"]


class Scorer:
    """Base class that handles batching, skipping and truncation; subclasses tokenize and return per-token NLL."""

    name: str
    hash: str
    bos_id: int | None
    eos_id: int | None = None
    context: int

    def __init__(self, device: str = "cpu", precision: str = "auto") -> None:
        if precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"The scorer's precision must be auto, fp32 or bf16, not {precision!r}.")
        self.device = torch.device(device)
        if precision == "bf16" and self.device.type == "cpu":
            make_safe()
        # (measured) bf16 on a CPU without its instructions is nine times slower than fp32, so 'auto' means CUDA only.
        cuda = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        self.bf16 = precision == "bf16" or (precision == "auto" and cuda)

    @property
    def precision(self) -> str:
        """Precision as recorded in results."""
        return "fp32" if not self.bf16 else with_limit("bf16") if self.device.type == "cpu" else "bf16"

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Return the first `max_tokens` ids of a text, without special tokens."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids of this scorer."""
        raise NotImplementedError

    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the last hidden states (B, L, H), after the final norm."""
        raise NotImplementedError

    def token_nll(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the NLL (B, L - 1) of each token after the first, given those before it; padding is on the right."""
        raise NotImplementedError

    @torch.no_grad()
    def nll(
        self,
        texts: Sequence[str],
        max_tokens: int = PAPER_SCORER_TOKENS,
        bos: bool = False,
        progress: Progress | None = None,
        scored: Scored = "all",
        ids: Sequence[Sequence[int]] | None = None,
        stride: int = 0,
    ) -> list[TextScore]:
        """Return one score per text, in order. Blank texts, and one-token texts without `bos`, are marked as skipped.

        With `stride`, texts longer than the scorer's context are scored in overlapping windows, `stride` tokens apart, each
        token in the first window that contains it (bd3lms); otherwise they are cut. `ids`, if given, replace the texts.
        `scored` "eos" counts only the first end token of a row (MDLM, Duo); "non_eos" counts none.
        """
        if max_tokens < 2:
            raise UsageError("Scoring needs max_tokens of at least 2.")
        if bos and self.bos_id is None:
            raise UsageError(f"{self.name} has no beginning token: score without it.")
        if scored != "all" and self.eos_id is None:
            raise UsageError(f"{self.name} has no end token: choose a protocol that scores all tokens.")
        limit = max_tokens if stride else min(max_tokens, self.context)
        if not 0 <= stride < self.context:
            raise UsageError(f"The stride must be below the {self.context} tokens of {self.name}'s window.")
        if ids is None:
            ids = [self.encode(text, limit - bos) if text.strip() else [] for text in texts]
        ids = [list(row[: limit - bos]) for row in ids]
        rows = [[self.bos_id, *row] if bos and row else row for row in ids]
        if scored == "eos":
            # One end token suffices: further padding would be neither scored nor seen.
            longest = max(map(len, rows), default=0)
            rows = [[*row, self.eos_id] if row and len(row) < longest else row for row in rows]
        counted = [_counted(row, scored, self.eos_id) for row in rows]
        windows = [(i, w) for i, row in enumerate(rows) for w in _windows(len(row), self.context, stride or self.context)]
        pieces = [rows[i][w.start : w.stop] for i, w in windows]
        totals, done = [0.0] * len(rows), sum(len(row) < 2 for row in rows)

        def sums(batch: list[int]) -> list[float]:
            nonlocal done
            chosen = [windows[k] for k in batch]
            kept = [[j >= w.new and c for j, c in w.places(counted[i])] for i, w in chosen]
            found = self._sums([pieces[k] for k in batch], kept)
            done += len(batch) * world_size()  # the other processes score as many
            if progress is not None:
                progress(min(done, len(rows)), len(rows))
            return found

        batches = list(_batches_by_length(pieces))
        for batch, found in zip(batches, shared(batches, sums), strict=True):
            for k, total in zip(batch, found, strict=True):
                totals[windows[k][0]] += total
        return [
            TextScore(total, sum(kept) if len(row) > 1 else 0, tuple(own))
            for total, kept, row, own in zip(totals, counted, rows, ids, strict=True)
        ]

    @torch.no_grad()
    def features(self, texts: Sequence[str], max_tokens: int, progress: Progress | None = None) -> Tensor:
        """Return the last hidden state (n, H) at the final retained token of each text that is not empty, for MAUVE.

        It is computed in fp32 on every device, as in mauve-text, whatever the precision of the likelihoods.
        """
        limit = min(max_tokens, self.context)
        rows = [row for row in (self.encode(text, limit) for text in texts if text.strip()) if row]
        done = 0

        def last(batch: list[int]) -> Tensor:
            nonlocal done
            tokens_BL, mask_BL = self._padded([rows[i] for i in batch])
            h_BLH = self.hidden_states(tokens_BL, mask_BL)
            done += len(batch) * world_size()
            if progress is not None:
                progress(min(done, len(rows)), len(rows))
            return h_BLH[torch.arange(len(batch)), mask_BL.sum(1) - 1].float().cpu()

        batches = list(_batches_by_length(rows, shortest=1))
        order = torch.tensor([i for batch in batches for i in batch])
        return torch.cat(shared(batches, last))[order.argsort()] if rows else torch.empty(0, 0)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def _padded(self, rows: Sequence[list[Any]]) -> tuple[Tensor, Tensor]:
        length = max(map(len, rows))
        # Any id can serve as padding: causal attention never sees it, and the mask removes it from the sum.
        tokens_BL = torch.tensor([row + [row[-1]] * (length - len(row)) for row in rows], device=self.device)
        mask_BL = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=self.device).bool()
        return tokens_BL, mask_BL

    def _sums(self, rows: list[list[Any]], counted: list[list[bool]]) -> list[float]:
        tokens_BL, mask_BL = self._padded(rows)
        with self._autocast():
            nll = self.token_nll(tokens_BL, mask_BL)
        length = tokens_BL.shape[1] - 1
        counted_BL = torch.tensor([one + [False] * (length - len(one)) for one in counted], device=self.device)
        # Not a product with the mask, because uncounted values may be infinite.
        return torch.where(counted_BL, nll.double(), 0.0).sum(1).tolist()


@dataclass(frozen=True)
class _Window:
    """Tokens `start` to `stop` of a row; earlier windows contain those before `new`."""

    start: int
    stop: int
    new: int

    def places(self, counted: list[bool]) -> Iterator[tuple[int, bool]]:
        """Yield (position in the row, True if scored) of every token after the window's first."""
        return ((j, counted[j - 1]) for j in range(self.start + 1, self.stop))


def _windows(length: int, context: int, stride: int) -> Iterator[_Window]:
    """Yield windows of at most `context` tokens, `stride` apart, that cover a row."""
    new = 0
    for start in range(0, max(1, length), stride):
        stop = min(start + context, length)
        yield _Window(start, stop, new)
        new = stop
        if stop == length:
            return


def _counted(row: Sequence[Any], scored: Scored, eos_id: int | None) -> list[bool]:
    """Return a flag for each token after the first: True if it is scored."""
    if scored == "all":
        return [True] * (len(row) - 1)
    ends, counted = 0, []
    for i in row:
        ends += i == eos_id
        counted.append(i != eos_id or (scored == "eos" and ends == 1))
    return counted[1:]


def _batches_by_length(rows: Sequence[Sequence[Any]], shortest: int = 2) -> Iterator[list[int]]:
    """Yield indices of rows of similar length to limit padding, longest first so that memory errors come early."""
    order = sorted((i for i, row in enumerate(rows) if len(row) >= shortest), key=lambda i: (-len(rows[i]), i))
    while order:
        size = max(1, TOKENS_PER_BATCH // len(rows[order[0]]))
        yield order[:size]
        order = order[size:]
