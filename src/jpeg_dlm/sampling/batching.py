"""Samples many small requests from many threads in few batches; each request gets the same texts as alone.

with BatchingService() as service:
    waiting = [service.submit(model.writer, 1, model.sampler_options(steps=8), seed=s) for s in range(40)]
    tokens = [future.result() for future in waiting]
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.errors import JpegDlmError, UsageError
from jpeg_dlm.flow.latent_sampler import Prediction, Watch, Writer
from jpeg_dlm.rng import Law, RowNoise

MAX_BATCH = 64  # rows, as in `generate`
MAX_WAIT_S = 0.005  # short compared to the time of one text (measured: 8 steps of the bundled model take longer)
REMEMBERED = 256  # samplers whose batches must have a single seed
PACE_WEIGHT = 0.2  # of the newest batch in the average time of a row
WAIT_SHARE = 0.2  # of the time of the batch before: so long its clients may take to come back with their next requests


class QueueFullError(JpegDlmError):
    """More rows wait than the service accepts."""


class Abandoned(Exception):
    """Every request of a batch was cancelled while it was sampled."""


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

    def generators(self, purpose: str) -> list[torch.Generator]:
        return [g for part in self.parts for g in part.generators(purpose)]

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

    def _draw(self, law: Law, purpose: str, shape: tuple[int, ...]) -> Tensor:
        return torch.cat([part._draw(law, purpose, shape) for part in self.parts])


# ---------------------------------------------------------------- the service


@dataclass(eq=False)
class Request:
    """Rows that a caller waits for, or one call; `done` holds the rows already sampled."""

    writer: Writer | None
    rows: range
    sampler: Any
    seed: int
    arrived: float
    given_L: Tensor | None = None
    watch: Watch | None = None
    call: Callable[[], Any] | None = None
    future: Future[Any] = field(default_factory=Future)
    done: list[Tensor] = field(default_factory=list)

    def settle(self, result: Any = None, error: Exception | None = None) -> None:
        """Deliver the result or the error, unless the caller cancelled the request."""
        try:
            self.future.set_exception(error) if error else self.future.set_result(result)
        except InvalidStateError:
            pass


@dataclass(frozen=True)
class Piece:
    """Rows of one request that take part in a batch."""

    request: Request
    rows: range


class BatchingService:
    """Works in one thread. Requests with the same writer and options share a batch; the one with the oldest request is first.

    A batch starts when it is full, when it has as many rows as the batch before, or when its oldest request has waited for
    `max_wait_s` (after a long batch, for a share of its time). A request that does not fit is split, unless it is watched. A
    batch whose futures are all cancelled stops after its current step. Meanwhile only this thread may use the writers.
    """

    def __init__(
        self, max_batch: int = MAX_BATCH, max_wait_s: float = MAX_WAIT_S, max_queue: int | None = None,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:  # fmt: skip
        """Start the thread; `max_queue` bounds the rows that wait, and `observe(rows, seconds)` is called after every batch."""
        if max_batch < 1 or max_wait_s < 0:
            raise UsageError("A service needs max_batch of at least 1 and max_wait_s of at least 0.")
        self.max_batch, self.max_wait_s, self.max_queue, self.observe = max_batch, max_wait_s, max_queue, observe
        self._queue: list[Request] = []  # in the order of arrival
        self._seed_apart: dict[Any, None] = {}  # the newest samplers whose batches must have a single seed
        self._row_s = 0.0  # average time of a row
        self._before = (max_batch, 0.0)  # rows and seconds of the batch before
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jpeg-dlm-batching", daemon=True)
        self._thread.start()

    def submit(
        self, writer: Writer, n: int, sampler: Any, seed: int = 0, first: int = 0, *,
        given_L: Tensor | None = None, watch: Watch | None = None,
    ) -> Future[Tensor]:  # fmt: skip
        """Request token ids (n, L) of samples `first` to `first + n - 1` of `seed`.

        `given_L` is kept in every one of them; `watch` is called in the thread of the service with the request's own rows.
        """
        if n < 1:
            raise UsageError("The number of samples must be at least 1.")
        if watch and n > self.max_batch:
            raise UsageError(f"At most {self.max_batch} samples can be watched at once.")
        if getattr(sampler, "protocol", "default") == "released":
            raise UsageError("A service cannot use the released protocol, in which a text depends on its batch: use 'default'.")
        return self._add(Request(writer, range(first, first + n), sampler, seed, time.monotonic(), given_L, watch))

    def call(self, function: Callable[[], Any], rows: int = 1) -> Future[Any]:
        """Request the result of a function that uses a writer's model; in the queue it counts as so many rows."""
        return self._add(Request(None, range(rows), None, 0, time.monotonic(), call=function))

    def _add(self, request: Request) -> Future[Any]:
        with self._changed:
            if self._closed:
                raise UsageError("The service is closed: start another one.")
            if self.max_queue is not None and self._waiting() + len(request.rows) > self.max_queue:
                raise QueueFullError(f"{self._waiting()} texts wait already: try again later.")
            self._queue.append(request)
            self._changed.notify()
        return request.future

    def _waiting(self) -> int:
        return sum(len(request.rows) for request in self._queue if not request.future.cancelled())

    @property
    def waiting(self) -> int:
        """The number of rows that wait for their batch."""
        with self._changed:
            return self._waiting()

    @property
    def expected_wait_s(self) -> float:
        """The time that the rows in the queue will take, judged by the latest batches."""
        return self.waiting * self._row_s

    @property
    def alive(self) -> bool:
        """True while requests are accepted."""
        return not self._closed and self._thread.is_alive()

    def close(self, cancel: bool = False) -> None:
        """Finish all requests, or with `cancel` those already started, and end the thread; safe to call again."""
        with self._changed:
            self._closed = True
            if cancel:
                for request in self._queue:
                    if not request.done:
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
            began, rows = time.monotonic(), sum(len(piece.rows) for piece in pieces)
            self._run(pieces)
            seconds = time.monotonic() - began
            if pieces[0].request.call is None:
                self._before = (rows, seconds)
                self._row_s += (seconds / rows - self._row_s) * (PACE_WEIGHT if self._row_s else 1)
                self.observe(rows, seconds)

    def _next_batch(self) -> list[Piece]:
        """Wait for the next batch and take it from the queue; empty once the service is closed and the queue is empty."""
        with self._changed:
            while True:
                self._queue = [request for request in self._queue if not request.future.cancelled()]
                if not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                companions = [request for request in self._queue if self._fits(request, self._queue[0])]
                rows, seconds = self._before
                left = self._queue[0].arrived + max(self.max_wait_s, WAIT_SHARE * seconds) - time.monotonic()
                enough = self._queue[0].call or sum(len(request.rows) for request in companions) >= min(rows, self.max_batch)
                if self._closed or enough or left <= 0:
                    return self._take(companions)
                self._changed.wait(left)

    def _fits(self, request: Request, oldest: Request) -> bool:
        if request is oldest:
            return True
        if request.call or oldest.call or request.writer is not oldest.writer or request.sampler != oldest.sampler:
            return False
        # Watching costs evaluations of its own, and given tokens may choose another way to sample.
        alike = [(one.watch is None, one.given_L is None) for one in (request, oldest)]
        return alike[0] == alike[1] and (request.seed == oldest.seed or _kind(oldest) not in self._seed_apart)

    def _take(self, companions: Sequence[Request]) -> list[Piece]:
        """Take the first rows of these requests up to a full batch; remove requests without remaining rows."""
        pieces, room = [], self.max_batch
        for request in companions:
            if room <= 0 or (request.watch and len(request.rows) > room):
                break
            pieces.append(Piece(request, request.rows if request.call else request.rows[:room]))
            room -= len(pieces[-1].rows)
            request.rows = request.rows[len(pieces[-1].rows) :]
        self._queue = [request for request in self._queue if request.rows]
        return pieces

    # ------------------------------------------------------------ sampling it

    def _run(self, pieces: list[Piece]) -> None:
        first = pieces[0].request
        noise = StackedNoise.of([RowNoise(piece.request.seed, piece.rows, 0, _device(first)) for piece in pieces])
        try:
            if first.call:
                first.settle(first.call())
                return
            found = self._sample(pieces, noise)
        except Abandoned:
            self._forget(pieces)
            return
        except Exception as error:
            if len(pieces) == 1:
                first.settle(error=error)
                self._forget(pieces)  # a request's texts are delivered together, so its remaining rows are dropped
            else:  # one request may have caused it: alone, each gets its own texts or its own error
                self._run_apart(pieces, lambda piece: id(piece.request))
            return
        if noise.parted:
            self._seed_apart[_kind(first)] = None
            while len(self._seed_apart) > REMEMBERED:
                del self._seed_apart[next(iter(self._seed_apart))]
            self._run_apart(pieces, lambda piece: piece.request.seed)
            return
        for piece, rows in zip(pieces, found, strict=True):
            piece.request.done.append(rows)
            if not piece.request.rows:
                piece.request.settle(torch.cat(piece.request.done))

    @torch.no_grad()
    def _sample(self, pieces: Sequence[Piece], noise: StackedNoise) -> Sequence[Tensor]:
        first, sizes = pieces[0].request, [len(piece.rows) for piece in pieces]
        assert first.writer is not None
        given = [p.request.given_L.expand(len(p.rows), -1) for p in pieces if p.request.given_L is not None]
        given_BL = torch.cat(given).to(_device(first)) if given else None

        def watch(step: int, steps: int, t: float, tokens: Callable[[], Tensor]) -> None:
            if all(piece.request.future.cancelled() for piece in pieces):
                raise Abandoned
            shared, end = functools.cache(tokens), 0
            for piece, size in zip(pieces, sizes, strict=True):
                end += size
                if piece.request.watch and not piece.request.future.cancelled():
                    piece.request.watch(step, steps, t, _part(tokens, shared, slice(end - size, end)))

        return first.writer.sample(first.sampler, noise, watch, given_BL).cpu().split(sizes)

    def _run_apart(self, pieces: Sequence[Piece], key: Callable[[Piece], int]) -> None:
        groups: dict[int, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(key(piece), []).append(piece)
        for group in groups.values():
            self._run(group)

    def _forget(self, pieces: Sequence[Piece]) -> None:
        gone = [piece.request for piece in pieces]
        with self._changed:
            self._queue = [request for request in self._queue if request not in gone]


def _kind(request: Request) -> tuple[int, Any]:
    return id(request.writer), request.sampler


def _device(request: Request) -> torch.device | str:
    return "cpu" if request.writer is None else request.writer.device


def _part(tokens: Callable[[], Tensor], shared: Callable[[], Tensor], rows: slice) -> Callable[[], Tensor]:
    """Return what a sampler tells of some rows; `shared` decodes all rows once."""
    if isinstance(tokens, Prediction):
        return replace(tokens, decode=lambda: shared()[rows], state_BND=tokens.state_BND[rows])
    return lambda: shared()[rows]
