"""Samples many small requests from many threads in few batches; each request gets the same texts as alone.

with BatchingService(model.writer) as service:
    waiting = [service.submit(1, model.sampler_options(steps=8), seed=s) for s in range(40)]
    tokens = [future.result() for future in waiting]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.latent_sampler import Writer
from jpeg_dlm.rng import RowNoise, RowStreams

MAX_BATCH = 64  # rows, as in `generate`
MAX_WAIT_S = 0.005  # short compared to the time of one text (measured: 8 steps of the bundled model take longer)


# ---------------------------------------------------------------- noise of several requests


@dataclass(frozen=True)
class StackedNoise(RowNoise):
    """The rows of several `RowNoise` stacked; each row has the random numbers of its own seed and row."""

    parts: tuple[RowNoise, ...] = ()
    lent: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)  # shared generators and their initial states

    @classmethod
    def of(cls, parts: Sequence[RowNoise]) -> StackedNoise:
        rows = [row for part in parts for row in part.rows]
        return cls(parts[0].seed, rows, parts[0].step, parts[0].device, parts=tuple(parts))

    def streams(self, purpose: str) -> RowStreams:
        return RowStreams([g for part in self.parts for g in part.streams(purpose).generators], self.device)

    def shared(self, purpose: str) -> torch.Generator:
        """Return the generator of the first part; `parted` tells if this was wrong for the others."""
        generator = super().shared(purpose)
        self.lent.append((generator, generator.get_state()))
        return generator

    @property
    def parted(self) -> bool:
        """True if parts of several seeds drew shared numbers, such as a random grid, which depend on the seed."""
        drawn = any(not torch.equal(generator.get_state(), before) for generator, before in self.lent)
        return drawn and len({part.seed for part in self.parts}) > 1

    def _draw(self, kind: Any, purpose: str, shape: tuple[int, ...]) -> Tensor:
        return torch.cat([part._draw(kind, purpose, shape) for part in self.parts])


# ---------------------------------------------------------------- the service


@dataclass
class Request:
    """Rows that a caller waits for; `done` holds those already sampled."""

    rows: range
    sampler: Any
    seed: int
    future: Future[Tensor]
    deadline: float
    done: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """Rows of one request that take part in a batch."""

    request: Request
    rows: range


class BatchingService:
    """Samples in one thread. Requests with equal options share a batch; the batch with the oldest request goes first.

    A batch starts when it is full, or `max_wait_s` after its oldest request arrived. A request that does not fit is split.
    While the service is open, only its thread may use `method`.
    """

    def __init__(
        self, method: Writer, max_batch: int = MAX_BATCH, max_wait_s: float = MAX_WAIT_S, device: torch.device | str = "cpu"
    ) -> None:
        if max_batch < 1 or max_wait_s < 0:
            raise UsageError("A service needs max_batch of at least 1 and max_wait_s of at least 0.")
        self.method, self.max_batch, self.max_wait_s, self.device = method, max_batch, max_wait_s, device
        self._queue: list[Request] = []  # in the order of arrival
        self._seed_apart: list[Any] = []  # samplers whose batches must have a single seed
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jpeg-dlm-batching", daemon=True)
        self._thread.start()

    def submit(self, n: int, sampler: Any, seed: int = 0, first: int = 0) -> Future[Tensor]:
        """Request token ids (n, L) of samples `first` to `first + n - 1` of `seed`; `cancel()` works until they start."""
        if n < 1:
            raise UsageError("The number of samples must be at least 1.")
        if getattr(sampler, "protocol", "default") == "released":
            raise UsageError("A service cannot use the released protocol, in which a text depends on its batch: use 'default'.")
        future: Future[Tensor] = Future()
        with self._changed:
            if self._closed:
                raise UsageError("The service is closed: start another one.")
            self._queue.append(Request(range(first, first + n), sampler, seed, future, time.monotonic() + self.max_wait_s))
            self._changed.notify()
        return future

    def close(self, cancel: bool = False) -> None:
        """Finish all requests, or with `cancel` those already started, and end the thread; safe to call again."""
        with self._changed:
            self._closed = True
            if cancel:
                for request in self._queue:
                    request.future.cancel()
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> BatchingService:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(cancel=error[0] is not None)

    # ------------------------------------------------------------ choosing a batch

    def _work(self) -> None:
        while pieces := self._next_batch():
            self._run(pieces)

    def _next_batch(self) -> list[Piece]:
        """Wait for the next batch and take it from the queue; empty once the service is closed and the queue is empty."""
        with self._changed:
            while True:
                # A started request cannot be cancelled, so the requests dropped here have no rows to return.
                self._queue = [request for request in self._queue if not request.future.cancelled()]
                if not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                companions = [request for request in self._queue if self._fits(request, self._queue[0])]
                left = self._queue[0].deadline - time.monotonic()
                if self._closed or left <= 0 or sum(len(request.rows) for request in companions) >= self.max_batch:
                    if pieces := self._take(companions):
                        return pieces
                else:
                    self._changed.wait(left)

    def _fits(self, request: Request, oldest: Request) -> bool:
        same = request.sampler == oldest.sampler
        return same and (request.seed == oldest.seed or oldest.sampler not in self._seed_apart)

    def _take(self, companions: Sequence[Request]) -> list[Piece]:
        """Take the first rows of these requests up to a full batch; remove requests without remaining rows."""
        pieces, room = [], self.max_batch
        for request in companions:
            if not room:
                break
            if not request.future.running() and not request.future.set_running_or_notify_cancel():
                continue  # cancelled a moment ago
            pieces.append(Piece(request, request.rows[:room]))
            room -= len(pieces[-1].rows)
            request.rows = request.rows[len(pieces[-1].rows) :]
        self._queue = [request for request in self._queue if request.rows]
        return pieces

    # ------------------------------------------------------------ sampling it

    def _run(self, pieces: list[Piece]) -> None:
        noise = StackedNoise.of([RowNoise(piece.request.seed, piece.rows, 0, self.device) for piece in pieces])
        try:
            with torch.no_grad():
                tokens = self.method.sample(pieces[0].request.sampler, noise).cpu()
            found = tokens.split([len(piece.rows) for piece in pieces])
        except Exception as error:
            if len(pieces) == 1:
                self._fail(pieces[0].request, error)
            else:  # one request may have caused it: alone, each gets its own texts or its own error
                self._run_apart(pieces, lambda piece: id(piece.request))
            return
        if noise.parted:
            self._seed_apart.append(pieces[0].request.sampler)
            self._run_apart(pieces, lambda piece: piece.request.seed)
            return
        for piece, rows in zip(pieces, found, strict=True):
            self._deliver(piece.request, rows)

    def _run_apart(self, pieces: Sequence[Piece], key: Callable[[Piece], int]) -> None:
        groups: dict[int, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(key(piece), []).append(piece)
        for group in groups.values():
            self._run(group)

    def _deliver(self, request: Request, rows: Tensor) -> None:
        request.done.append(rows)
        if not request.rows:
            request.future.set_result(torch.cat(request.done))

    def _fail(self, request: Request, error: Exception) -> None:
        """Fail a request and drop its remaining rows, since its texts are delivered together."""
        request.future.set_exception(error)
        with self._changed:
            self._queue = [other for other in self._queue if other is not request]
