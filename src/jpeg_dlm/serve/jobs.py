"""Requests that write: completions, at once or each when it is done, and the trajectories of texts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from jpeg_dlm.report.trajectory import Snapshot, TrajectoryRecorder
from jpeg_dlm.serve.batching import BatchingService
from jpeg_dlm.serve.http import ApiError, all_done, as_done, out_of_time
from jpeg_dlm.serve.models import Served
from jpeg_dlm.serve.schemas import MOST_TEXTS, Chat, Completion, Trajectory, as_list


class CompletionJob:
    """One request for completions: its texts are submitted at once, and rows of ids become choices."""

    def __init__(self, served: Served, request: Completion, service: BatchingService) -> None:
        self.served, self.request, self.written = served, request, 0
        self.prompts: Sequence[str] = as_list(request.prompt) or ("",)
        if len(self.prompts) * request.n > MOST_TEXTS:
            raise ApiError(422, f"Prompts times `n` must be at most {MOST_TEXTS}: send several requests.", "n")
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        self.head |= {"model": served.name, "seed": request.seed}
        self.fixed = [served.model.fixed_tokens(prompt or None, request.template) for prompt in self.prompts]
        self.prompt_ids = [served.model.tokenizer.encode(prompt) if prompt else [] for prompt in self.prompts]
        self.futures: list[Future[Tensor]] = []
        try:
            for fixed in self.fixed:
                self.futures += served.submit(service, request, fixed)
        except Exception:
            for future in self.futures:
                future.cancel()
            raise

    async def chunks(self, limit_s: float) -> AsyncIterator[Any]:
        """Yield each text when it is done, and at the end the usage if it was asked for."""
        async for place, tokens in as_done(self.futures, limit_s):
            yield {**self.head, "choices": self._choices(place, tokens)}
        if self.request.stream_options and self.request.stream_options.include_usage:
            yield {**self.head, "choices": [], "usage": self._usage()}

    async def answer(self, limit_s: float) -> dict[str, Any]:
        """Return all texts."""
        rows = await all_done(self.futures, limit_s)
        choices = [choice for place, tokens in enumerate(rows) for choice in self._choices(place, tokens)]
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _choices(self, place: int, tokens: Tensor) -> list[dict[str, Any]]:
        """Return the choices of the rows with which the future at this place ended."""
        start = place * len(tokens)
        prompt = start // self.request.n
        texts = self.served.model.to_text(tokens, self.fixed[prompt])
        rows = self.served.model.ended(tokens, self.fixed[prompt]).tolist()
        return [self._choice(start + i, prompt, row, text) for i, (row, text) in enumerate(zip(rows, texts, strict=True))]

    def _choice(self, index: int, prompt: int, row: list[int], text: str) -> dict[str, Any]:
        model, request = self.served.model, self.request
        tokenizer, ids = model.tokenizer, self.prompt_ids[prompt]
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
        cuts = [at for stop in as_list(request.stop) if stop and (at := text.find(stop)) >= 0]
        if cuts:
            text, ended = text[: min(cuts)], True
        self.written += len(written)
        return {"index": index, "text": text, "logprobs": None, "finish_reason": "stop" if ended else "length"}

    def _usage(self) -> dict[str, Any]:
        source = self.served.model.tokenizer.encode(self.request.source) if self.request.source else []
        read = sum(map(len, self.prompt_ids)) + len(source)
        return {"prompt_tokens": read, "completion_tokens": self.written, "total_tokens": read + self.written}


class ChatJob(CompletionJob):
    """One request for chat completions: completions of the last message of a user, in the form of messages."""

    def __init__(self, served: Served, request: Chat, service: BatchingService) -> None:
        text = request.text()
        if text is None:
            raise ApiError(422, "`messages` has no text of a user: send a message with the role user.", "messages")
        super().__init__(served, request.completion(**{"source" if served.reads_sources else "prompt": text}), service)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self.head |= {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind}

    def _choice(self, index: int, prompt: int, row: list[int], text: str) -> dict[str, Any]:
        choice = super()._choice(index, prompt, row, text)
        message = {"role": "assistant", "content": choice.pop("text")}
        return {**choice, "delta" if self.request.stream else "message": message}


class TrajectoryJob:
    """One request for a trajectory. Snapshots arrive from the service's thread in a queue; None follows the last."""

    def __init__(self, served: Served, request: Trajectory, service: BatchingService) -> None:
        fixed = served.model.fixed_tokens(request.prompt or None, request.template)
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Snapshot | None] = asyncio.Queue()
        recorder = TrajectoryRecorder(served.model, fixed, self._put)
        self.head = {"object": "trajectory", "model": served.name, "seed": request.seed, "heading": recorder.heading}
        (self.future,) = served.submit(service, request, fixed, watch=recorder)
        self.future.add_done_callback(lambda _: self._put(None))

    def _put(self, snapshot: Snapshot | None) -> None:
        self.loop.call_soon_threadsafe(self.queue.put_nowait, snapshot)

    async def chunks(self, limit_s: float) -> AsyncIterator[Any]:
        """Yield what is known before the first step, then each snapshot; the last one has the finished texts."""
        try:
            yield self.head
            async with asyncio.timeout(limit_s):
                while (snapshot := await self.queue.get()) is not None:
                    yield snapshot.as_json()
            self.future.result(0)  # its error, if there was one
        except TimeoutError:
            raise out_of_time(limit_s) from None
        finally:
            self.future.cancel()

    async def answer(self, limit_s: float) -> dict[str, Any]:
        """Return all snapshots."""
        head, *snapshots = [chunk async for chunk in self.chunks(limit_s)]
        return {**head, "moments": snapshots}
