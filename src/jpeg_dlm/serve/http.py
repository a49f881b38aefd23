"""Reading a request and waiting for its answer: limits on size and time, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jpeg_dlm.serve.http_errors import ApiError, ClientGone
from jpeg_dlm.strict_json import parse_json

LARGEST_BODY = 1 << 20  # bytes
DRAINED_BODY = 64 << 20  # of a body that is too large, so many bytes are read, so that the client sees the answer
MORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second tells nginx to pass events on at once


class Answer(Response):
    """JSON of one line, in UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return line(content)


def line(content: Any) -> bytes:
    """Return JSON in one line."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def event(content: Any) -> bytes:
    """Return one server-sent event; a string is sent as it is."""
    return b"data: " + (content.encode() if isinstance(content, str) else line(content)) + b"\n\n"


async def read_body(request: Request, limit_s: float) -> Any:
    """Return the JSON of a request's body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form on another site cannot send this type without asking
        raise ApiError(415, "Send JSON, with the header  Content-Type: application/json.")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                size += len(part)
                if size > DRAINED_BODY:
                    break
                if size <= LARGEST_BODY:
                    body += part
    except TimeoutError:
        raise ApiError(408, f"The request took more than {limit_s:g} s to arrive: send it faster.") from None
    except ClientDisconnect:
        raise ClientGone from None
    if size > LARGEST_BODY:
        raise ApiError(
            413, f"The body is larger than {LARGEST_BODY} bytes: send less at once.", headers={"Connection": "close"}
        )
    try:
        return parse_json(bytes(body))
    except (ValueError, UnicodeError) as error:
        raise ApiError(400, f"The body is not JSON ({str(error)[:200]}).") from None


async def gone(request: Request) -> None:
    """Return when the client closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def result_of(request: Request, futures: Sequence[Future[Any]], limit_s: float) -> list[Any]:
    """Wait for all results; cancel them if one fails, the time is over or the client goes away."""
    work = asyncio.gather(*map(asyncio.wrap_future, futures))
    left = asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait({work, left}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGone if left.done() else out_of_time(limit_s)
    finally:
        left.cancel()
        for future in futures:
            future.cancel()
        work.cancel()
        with contextlib.suppress(BaseException):
            await work


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


def out_of_time(limit_s: float) -> ApiError:
    """Return the error for a request that took too long."""
    return ApiError(504, f"The answer took more than {limit_s:g} s: ask for fewer texts or steps, or try again later.")
