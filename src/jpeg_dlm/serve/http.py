"""Errors as the OpenAI conventions write them, and waiting for results: with a limit, and while the client stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jpeg_dlm.serve.batching import QueueFullError
from jpeg_dlm.util.errors import DataError, JpegDlmError, UsageError

T = TypeVar("T")

RETRY_AFTER_S = "1"  # about the time of a full batch (assumed)
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


def api_error(error: BaseException) -> ApiError:
    """Return the answer to an error; only messages about the request itself are passed on."""
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
    if isinstance(error, JpegDlmError):
        return ApiError(503, "The model cannot do this now: see the log of the server.")
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
    places = {asyncio.wrap_future(future): i for i, future in enumerate(futures)}
    waiting, end = set(places), asyncio.get_running_loop().time() + limit_s
    try:
        while waiting:
            left = end - asyncio.get_running_loop().time()
            done, waiting = await asyncio.wait(waiting, timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise out_of_time(limit_s)
            for future in sorted(done, key=places.__getitem__):
                yield places[future], future.result()
    finally:
        for future in places:
            future.cancel()


async def all_done(futures: Sequence[Future[Any]], limit_s: float) -> list[Any]:
    """Return the results of all futures."""
    results = dict([done async for done in as_done(futures, limit_s)])
    return [results[place] for place in range(len(futures))]
