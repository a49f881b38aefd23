"""`/v1/completions`: texts, at once or each when it is done."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from jpeg_dlm.sampling.batching import BatchingService
from jpeg_dlm.serve.http_errors import ApiError
from jpeg_dlm.serve.models import Served
from jpeg_dlm.serve.requests import MOST_TEXTS, Completion, Writing

DRAWN_SEEDS = 2**31  # a seed that nobody chose is below it, so that people can copy it


@dataclass(frozen=True)
class Choice:
    """A finished text."""

    index: int
    text: str
    tokens: int  # written by the model
    finish_reason: str

    def as_json(self) -> dict[str, Any]:
        return {"index": self.index, "text": self.text, "logprobs": None, "finish_reason": self.finish_reason}


def seed_of(request: Writing) -> int:
    """Return the seed of a request, or draw one."""
    return secrets.randbelow(DRAWN_SEEDS) if request.seed is None else request.seed


class Job:
    """One request for completions: what to submit, and how to turn rows of ids into choices."""

    def __init__(self, served: Served, request: Completion) -> None:
        self.served, self.request, self.seed = served, request, seed_of(request)
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        if len(request.prompt) * request.n > MOST_TEXTS:
            raise ApiError(422, f"Prompts times `n` must be at most {MOST_TEXTS}: send several requests.", "n")
        self.prompts: Sequence[str] = request.prompt or ("",)
        served.options(request)  # refuses what the model has no use for
        self.given = [served.given(prompt, request.template) for prompt in self.prompts]

    def submit(self, service: BatchingService, apart: bool = False) -> list[Future[Tensor]]:
        """Ask for all texts: those of a prompt together, or each `apart`, so that it can be sent when it is done."""
        size = 1 if apart else self.request.n
        return submit_all(
            lambda i, first: self.served.submit(service, self.request, size, self.seed, first, given=self.given[i]),
            [(i, first) for i in range(len(self.prompts)) for first in range(0, self.request.n, size)],
        )

    def choices(self, place: int, tokens: Tensor) -> list[Choice]:
        """Return the choices of the rows with which the future at this place ended."""
        start = place * len(tokens)
        prompt = start // self.request.n
        texts = self.served.model.to_text(tokens, self.given[prompt])
        rows = self.served.model.ended(tokens, self.given[prompt]).tolist()
        return [self._choice(start + i, prompt, row, text) for i, (row, text) in enumerate(zip(rows, texts, strict=True))]

    def _choice(self, index: int, prompt: int, row: list[int], text: str) -> Choice:
        model, request = self.served.model, self.request
        tokenizer, ids = model.tokenizer, self._prompt_ids[prompt]
        start = (1 if model.config.data.frame else 0) + len(ids)
        around = {tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id}
        written = [i for i in row[start:] if i not in around]
        ended = model.config.data.rows_end and tokenizer.eos_id in row
        if request.max_tokens is not None and len(written) > request.max_tokens:
            written, ended = written[: request.max_tokens], False
            text = tokenizer.decode([*ids, *written])
        if ids and not request.echo:
            head = tokenizer.decode(ids)
            text = text[len(head) :] if text.startswith(head) else tokenizer.decode(written)
        cuts = [at for stop in request.stop if stop and (at := text.find(stop)) >= 0]
        if cuts:
            text, ended = text[: min(cuts)], True
        return Choice(index, text, len(written), "stop" if ended else "length")

    @cached_property
    def _prompt_ids(self) -> list[list[int]]:
        return [self.served.model.tokenizer.encode(prompt) if prompt else [] for prompt in self.prompts]

    def as_json(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer, or a part of it."""
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.served.name,
            "seed": self.seed, "choices": [choice.as_json() for choice in choices],
        }  # fmt: skip

    def usage(self, written: int) -> dict[str, Any]:
        """Return the numbers of tokens."""
        read = sum(map(len, self._prompt_ids))
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def submit_all(submit: Callable[..., Future[Tensor]], places: Sequence[tuple[int, ...]]) -> list[Future[Tensor]]:
    """Submit all or nothing: where one is refused, those before it are cancelled."""
    futures: list[Future[Tensor]] = []
    try:
        for place in places:
            futures.append(submit(*place))
    except Exception:
        for future in futures:
            future.cancel()
        raise
    return futures
