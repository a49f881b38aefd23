"""Around every request: errors as the OpenAI conventions write them, keys, limits on size and time, waiting, and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpeg_dlm.serve.batching import QueueFullError
from jpeg_dlm.util.errors import DataError, UsageError

T = TypeVar("T")

LOGGER = logging.getLogger(__name__)
RETRY_AFTER_S = "1"  # about the time of a full batch (assumed)
SHORTEST_KEY = 16
LARGEST_BODY = 1 << 20  # bytes
CLIENT_GONE = 499  # as nginx logs it; nobody receives it
STALLED = 3  # times the limit after which a request that does not arrive, or an answer that nobody reads, is given up
LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}


class ApiError(HTTPException):
    """A request that is answered with an error: a status, a sentence, and the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def as_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = KINDS.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def as_response(self) -> Response:
        return JSONResponse(self.as_json(), self.status_code, self.headers)


def out_of_time(limit_s: float) -> ApiError:
    """Return the error for a request that took too long."""
    return ApiError(504, f"The answer took more than {limit_s:g} s: ask for fewer texts or steps, or try again later.")


def api_error(error: Exception) -> ApiError:
    """Return the answer to an error; messages that are not about the request itself go to the log alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):  # of the router, or of FastAPI for bytes that are not even text
        return ApiError(error.status_code, f"{error.detail}: see /openapi.json.", headers=error.headers)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": RETRY_AFTER_S})
    if isinstance(error, (UsageError, DataError)):
        return ApiError(422, str(error))
    LOGGER.error("The server failed on a request.", exc_info=error)
    return ApiError(500, "The server failed on this request: see its log.")


def _invalid(error: RequestValidationError) -> ApiError:
    """Return the answer to a body that is not JSON, or to its first field that is wrong."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON ({first['ctx']['error']}).")
    if len(first["loc"]) < 2:
        return ApiError(422, f"The body must be a JSON object, sent as application/json: {first['msg']}.")
    name = str(first["loc"][1])[:80].encode("ascii", "replace").decode()
    return ApiError(422, f"`{name}`: {first['msg']}.", name)


def read_keys(path: Path) -> list[bytes]:
    """Return the hashes of the keys in a file: one on each line; empty lines and those that begin with # do not count."""
    lines = [line.strip().encode() for line in path.read_text("utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys or min(map(len, keys)) < SHORTEST_KEY:
        raise UsageError(f"'{path}' holds no key, or one that is too short: write at least {SHORTEST_KEY} bytes on each line.")
    return [hashlib.sha256(key).digest() for key in keys]


def check_key(header: str, keys: Sequence[bytes]) -> None:
    """Raise an error unless the header `Authorization` holds one of the keys."""
    scheme, _, key = header.partition(" ")
    digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
    matches = [hmac.compare_digest(digest, known) for known in keys]  # all of them: the time says nothing about a key
    if scheme.lower() != "bearer" or not any(matches):
        sentence = "This server needs a key: send the header  Authorization: Bearer KEY."
        raise ApiError(401, sentence, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


# ---------------------------------------------------------------- waiting for results


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await some work; cancel it when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        left.cancel()
        task.cancel()


async def as_done(futures: Sequence[Future[Any]], limit_s: float) -> AsyncIterator[tuple[int, Any]]:
    """Yield the place and result of each future as it is done; cancel the others if that ends early."""

    async def placed(place: int, future: Future[Any]) -> tuple[int, Any]:
        return place, await asyncio.wrap_future(future)

    try:
        for done in asyncio.as_completed([placed(*item) for item in enumerate(futures)], timeout=limit_s):
            yield await done
    except TimeoutError:
        raise out_of_time(limit_s) from None
    finally:
        for future in futures:
            future.cancel()


async def all_done(futures: Sequence[Future[Any]], limit_s: float) -> list[Any]:
    """Return the results of all futures."""
    results = dict([done async for done in as_done(futures, limit_s)])
    return [results[place] for place in range(len(futures))]


# ---------------------------------------------------------------- metrics, size and time


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

    def __init__(self, app: ASGIApp, limit_s: float, metrics: Metrics) -> None:
        self.app, self.limit_s, self.metrics = app, limit_s, metrics

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
            answer = out_of_time(self.limit_s) if isinstance(error, TimeoutError) else api_error(error)
            await answer.as_response()(scope, receive, observed)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.latency.labels(path).observe(time.monotonic() - began)
