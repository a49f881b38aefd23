"""Samples many small requests from many threads in few batches; each request gets the same texts as alone.

service = BatchingService()
waiting = [future for s in range(40) for future in service.submit(model.writer, range(2), model.sampler_options(), seed=s)]
rows = [future.result() for future in waiting]
service.close()
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.flow.sampler import TextSampler
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.sources import sample
from jpeg_dlm.util.errors import JpegDlmError, UsageError
from jpeg_dlm.util.rng import Law, RowNoise

MAX_BATCH = 64  # rows, as in `generate`
MAX_WAIT_S = 0.005  # short compared to the time of one text (measured: 8 steps of the bundled model take longer)
WAIT_SHARE = 0.2  # of the time of the batch before: so long its clients may take to come back with their next requests


class QueueFullError(JpegDlmError):
    """More rows wait than the service accepts."""


class Abandoned(Exception):
    """Every request of a batch was cancelled while it was sampled."""


@dataclass(frozen=True)
class StackedNoise(RowNoise):
    """The rows of several `RowNoise` stacked; each row has the random numbers of its own seed and row."""

    parts: tuple[RowNoise, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[RowNoise]) -> StackedNoise:
        rows = [row for part in parts for row in part.rows]
        return cls(parts[0].seed, rows, parts[0].step, parts[0].device, parts=tuple(parts))

    def shared(self, purpose: str) -> torch.Generator:
        """Return the generator of a seed; with several seeds only that of the grid, which is random in no mixed batch."""
        if purpose != "grid" and len({part.seed for part in self.parts}) > 1:
            raise ValueError("requests of several seeds share no random numbers")  # so that each is sampled alone
        return super().shared(purpose)

    def _draw(self, law: Law, purpose: str, shape: tuple[int, ...]) -> Tensor:
        return torch.cat([part._draw(law, purpose, shape) for part in self.parts])


@dataclass(eq=False)
class Request:
    """A text that a caller waits for, or one call, which counts as so many `texts`."""

    writer: TextSampler | None = None
    sampler: Any = None
    seed: int = 0
    row: int = 0
    fixed_L: Tensor | None = None
    source: Batch | None = None  # of one row
    call: Callable[[Future[Any]], Any] | None = None
    texts: int = 1
    arrived: float = field(default_factory=time.monotonic)
    future: Future[Any] = field(default_factory=Future)

    def fits(self, oldest: Request) -> bool:
        """Return whether it can share a batch; given tokens may choose another sampler, and random grids belong to a seed."""
        if self.call or oldest.call or self.writer is not oldest.writer or self.sampler != oldest.sampler:
            return self is oldest
        same_seed = self.seed == oldest.seed or getattr(oldest.sampler, "grid", "") != "random"
        return same_seed and (self.fixed_L is None) == (oldest.fixed_L is None)

    def settle(self, result: Any = None, error: Exception | None = None) -> None:
        """Deliver the result or the error, unless the caller cancelled the request."""
        try:
            self.future.set_exception(error) if error else self.future.set_result(result)
        except InvalidStateError:
            pass


class BatchingService:
    """Works in one thread. Requests with the same writer and options share a batch; the one with the oldest request is first.

    A batch starts when it is full, when it has as many rows as the batch before, or when its oldest request has waited for
    `max_wait_s` (after a long batch, for a share of its time). A batch whose futures are all cancelled stops after its
    current step. Meanwhile only this thread may use the writers.
    """

    def __init__(
        self,
        max_batch: int = MAX_BATCH,
        max_wait_s: float = MAX_WAIT_S,
        max_queue: int | None = None,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:
        """Start the thread; `max_queue` bounds the texts that wait, and `observe(rows, seconds)` is called after each batch."""
        self.max_batch, self.max_wait_s, self.max_queue, self.observe = max_batch, max_wait_s, max_queue, observe
        self._queue: list[Request] = []  # in the order of arrival
        self._before = (max_batch, 0.0)  # rows and seconds of the batch before
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jpeg-dlm-batching", daemon=True)
        self._thread.start()

    def submit(
        self,
        writer: TextSampler,
        rows: range,
        sampler: Any,
        seed: int = 0,
        fixed_L: Tensor | None = None,
        source: Batch | None = None,
    ) -> list[Future[Tensor]]:
        """Request the token ids (1, L) of each of these samples of `seed`, all or none.

        All of them keep `fixed_L`; those of a model of pairs are targets of `source`, a batch of one row.
        """
        return self._add([Request(writer, sampler, seed, row, fixed_L, source) for row in rows])

    def call(self, function: Callable[[Future[Any]], Any], texts: int = 1) -> Future[Any]:
        """Request the result of a function that uses a writer's model; in the queue it counts as so many texts.

        It is called with its own future, so that it can stop when this is cancelled.
        """
        return self._add([Request(call=function, texts=texts)])[0]

    def _add(self, requests: list[Request]) -> list[Future[Any]]:
        with self._changed:
            if self._closed:
                raise UsageError("The service is closed: start another one.")
            if self.max_queue is not None and self._waiting() + sum(r.texts for r in requests) > self.max_queue:
                raise QueueFullError(f"{self._waiting()} texts wait already: try again later.")
            self._queue += requests
            self._changed.notify()
        return [request.future for request in requests]

    def _waiting(self) -> int:
        return sum(request.texts for request in self._queue if not request.future.done())

    @property
    def waiting(self) -> int:
        """The number of texts that wait for their batch."""
        with self._changed:
            return self._waiting()

    @property
    def alive(self) -> bool:
        """True while requests are accepted."""
        return not self._closed and self._thread.is_alive()

    def close(self) -> None:
        """Finish all requests and end the thread; safe to call again."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        while batch := self._next_batch():
            began = time.monotonic()
            self._run(batch)
            seconds = time.monotonic() - began
            if batch[0].call is None:
                self._before = (len(batch), seconds)
                self.observe(len(batch), seconds)

    def _next_batch(self) -> list[Request]:
        """Wait for the next batch and take it from the queue; empty once the service is closed and the queue is empty."""
        with self._changed:
            while True:
                self._queue = [request for request in self._queue if not request.future.done()]
                if not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                oldest, (rows, seconds) = self._queue[0], self._before
                batch = [request for request in self._queue if request.fits(oldest)][: self.max_batch]
                left = oldest.arrived + max(self.max_wait_s, WAIT_SHARE * seconds) - time.monotonic()
                if self._closed or oldest.call or len(batch) >= min(rows, self.max_batch) or left <= 0:
                    self._queue = [request for request in self._queue if request not in batch]
                    return batch
                self._changed.wait(left)

    def _run(self, batch: Sequence[Request]) -> None:
        first = batch[0]
        try:
            results = [first.call(first.future)] if first.call else self._sample(batch)
        except Exception as error:
            if len(batch) == 1 or isinstance(error, Abandoned):
                first.settle(error=error)
                return
            for request in batch:  # one request may have caused it: alone, each gets its own text or its own error
                if not request.future.done():
                    self._run([request])
            return
        for request, result in zip(batch, results, strict=True):
            request.settle(result)

    @torch.no_grad()
    def _sample(self, batch: Sequence[Request]) -> Sequence[Tensor]:
        writer, sampler = batch[0].writer, batch[0].sampler
        assert writer is not None
        seeds = itertools.groupby(batch, lambda request: request.seed)
        noise = StackedNoise.of([RowNoise(seed, [r.row for r in rows], 0, writer.device) for seed, rows in seeds])
        fixed = [request.fixed_L for request in batch if request.fixed_L is not None]
        sources = [request.source for request in batch if request.source is not None]

        def stop_if_abandoned(*step: Any) -> None:
            if all(request.future.cancelled() for request in batch):
                raise Abandoned

        fixed_BL = torch.stack(fixed).to(writer.device) if fixed else None
        source = None
        if sources:
            tokens_BS, mask_BS = (torch.cat([getattr(s, name) for s in sources]) for name in ("tokens_BL", "real_BL"))
            source = Batch(tokens_BS.to(writer.device), mask_BS.to(writer.device))
        return sample(writer, sampler, noise, stop_if_abandoned, fixed_BL, source).cpu().split(1)
