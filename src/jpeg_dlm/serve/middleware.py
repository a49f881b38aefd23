"""Around every request: bearer keys, limits on its size and time, errors as JSON, and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpeg_dlm.serve.http import ApiError, out_of_time
from jpeg_dlm.util.errors import UsageError

SHORTEST_KEY = 16
LARGEST_BODY = 1 << 20  # bytes
CLIENT_GONE = 499  # as nginx logs it; nobody receives it
STALLED = 3  # times the limit after which a request that does not arrive, or an answer that nobody reads, is given up
LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Return the hashes of the keys in a file: one on each line; empty lines and those that begin with # do not count."""
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"'{path}' holds no key: write one on each line.")
    if min(map(len, keys)) < SHORTEST_KEY:
        raise UsageError(f"A key in '{path}' has fewer than {SHORTEST_KEY} characters: make it longer.")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def check_key(header: str, keys: Sequence[bytes]) -> None:
    """Raise an error unless the header `Authorization` holds one of the keys."""
    scheme, _, key = header.partition(" ")
    digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
    # Hashes of equal length, all of them compared: the time says nothing about a key.
    matches = [hmac.compare_digest(digest, other) for other in keys]
    if scheme.lower() != "bearer" or not any(matches):
        sentence = "This server needs a key: send the header  Authorization: Bearer KEY."
        raise ApiError(401, sentence, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class Metrics:
    """Counts requests and texts; `observe_batch` is called by the thread that samples."""

    def __init__(self, waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "jpeg_dlm", "registry": self.registry}
        self.requests = Counter("requests", "Answered requests.", ["path", "status"], **common)
        self.latency = Histogram("request_seconds", "Time of an answer.", ["path"], buckets=LATENCIES_S, **common)
        self.running = Gauge("requests_running", "Requests that are being answered.", **common)
        self.batches = Histogram("batch_rows", "Texts of each batch.", buckets=ROWS, **common)
        self.texts = Counter("texts", "Texts written in batches; its rate is texts per second.", **common)
        self.busy = Counter("sampling_seconds", "Time spent sampling batches.", **common)
        Gauge("queue_texts", "Texts that wait for their batch.", **common).set_function(waiting)

    def observe_batch(self, rows: int, seconds: float) -> None:
        """Count a batch."""
        self.batches.observe(rows)
        self.texts.inc(rows)
        self.busy.inc(seconds)


class RequestMiddleware:
    """ASGI middleware; metrics hold nothing of what was requested or answered."""

    def __init__(self, app: ASGIApp, limit_s: float, to_api_error: Callable[[Exception], ApiError], metrics: Metrics) -> None:
        self.app, self.limit_s, self.to_api_error, self.metrics = app, limit_s, to_api_error, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, received = time.monotonic(), CLIENT_GONE, 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > LARGEST_BODY:
                raise ApiError(413, f"The body is larger than {LARGEST_BODY} bytes: send less at once.")
            return message

        async def observed(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            with self.metrics.running.track_inprogress():
                async with asyncio.timeout(STALLED * self.limit_s):
                    await self.app(scope, bounded, observed)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status != CLIENT_GONE:
                raise  # the answer has begun, so the connection is closed
            answer = out_of_time(self.limit_s) if isinstance(error, TimeoutError) else self.to_api_error(error)
            await answer.as_response()(scope, receive, observed)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.latency.labels(path).observe(time.monotonic() - began)
