"""The routes of the service, on Starlette: `requests` validates the fields itself, so FastAPI would have nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpeg_dlm.sampling.batching import MAX_BATCH, BatchingService
from jpeg_dlm.serve import codec, requests
from jpeg_dlm.serve.auth import check_key
from jpeg_dlm.serve.completions import Job
from jpeg_dlm.serve.fields import read
from jpeg_dlm.serve.http import MORE, Answer, as_done, event, read_body, result_of
from jpeg_dlm.serve.http_errors import ApiError, ClientGone, api_error
from jpeg_dlm.serve.logs import Log
from jpeg_dlm.serve.models import Models, find
from jpeg_dlm.serve.openapi import description
from jpeg_dlm.serve.pages import FILES, page_headers
from jpeg_dlm.serve.service_metrics import Metrics
from jpeg_dlm.serve.trajectories import Journey

CLIENT_GONE = 499  # as nginx logs it; nobody receives it
STALLED = 3  # times the limit after which an answer that its client does not read is given up

Handler = Callable[["Service", Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """How much the service takes on."""

    seconds: float = 60.0  # for one request
    queue: int = 1024  # texts that wait
    batch: int = MAX_BATCH


class Service:
    """The models, the queue in front of them, and everything that requests share."""

    def __init__(self, models: Models, limits: Limits, keys: Sequence[bytes] = (), log: Log | None = None) -> None:
        self.models, self.limits, self.keys, self.log = models, limits, keys, log or Log()
        self.metrics = Metrics(lambda: self.batching.waiting)
        self.batching = BatchingService(limits.batch, max_queue=limits.queue, observe=self.metrics.observe_batch)

    # ------------------------------------------------------------ writing

    async def completions(self, request: Request) -> Response:
        asked = read(requests.Completion, await read_body(request, self.limits.seconds))
        job = Job(find(self.models, asked.model), asked)
        request.state.facts = {"model": job.served.name, "texts": len(job.prompts) * asked.n}
        if asked.stream:
            return self._stream(self._chunks(job, job.submit(self.batching, apart=True)))
        found = await result_of(request, job.submit(self.batching), self.limits.seconds)
        choices = [choice for place, tokens in enumerate(found) for choice in job.choices(place, tokens)]
        return Answer({**job.as_json(choices), "usage": job.usage(sum(choice.tokens for choice in choices))})

    async def _chunks(self, job: Job, futures: Sequence[Any]) -> AsyncIterator[Any]:
        written = 0
        async for place, tokens in as_done(futures, self.limits.seconds):
            choices = job.choices(place, tokens)
            written += sum(choice.tokens for choice in choices)
            yield job.as_json(choices)
        if (job.request.stream_options or {}).get("include_usage") is True:
            yield {**job.as_json([]), "usage": job.usage(written)}
        yield "[DONE]"

    async def trajectory(self, request: Request) -> Response:
        asked = read(requests.Trajectory, await read_body(request, self.limits.seconds))
        journey = Journey(find(self.models, asked.model), asked)
        request.state.facts = {"model": journey.served.name, "texts": asked.n}
        future = journey.submit(self.batching)
        if asked.stream:
            return self._stream(self._moments(journey, future))
        await result_of(request, [future], self.limits.seconds)
        return Answer({**journey.as_json(), "moments": [moment.as_json() for moment in journey.recorder.moments]})

    async def _moments(self, journey: Journey, future: Any) -> AsyncIterator[Any]:
        yield journey.as_json()
        async for moment in journey.follow(future, self.limits.seconds):
            yield moment
        yield "[DONE]"

    def _stream(self, parts: AsyncIterator[Any]) -> Response:
        """Send events; an error after the first is an event too."""

        async def events() -> AsyncIterator[bytes]:
            try:
                async for part in parts:
                    yield event(part)
            except Exception as error:
                yield event(self.told("stream", error).as_json())

        return StreamingResponse(events(), media_type="text/event-stream", headers=MORE)

    # ------------------------------------------------------------ the codec

    async def codec(self, request: Request, kind: type, act: Callable[[Any, Any], Any], ability: str, what: str) -> Response:
        """Answer a request that needs the codec by `act`, if the model has the `ability`."""
        asked = read(kind, await read_body(request, self.limits.seconds))
        served = find(self.models, asked.model)
        request.state.facts = {"model": served.name}
        served.need(getattr(served, ability), what)
        (found,) = await result_of(request, [self.batching.call(lambda: act(served, asked))], self.limits.seconds)
        return Answer(found)

    # ------------------------------------------------------------ facts

    async def list_models(self, request: Request) -> Response:
        return Answer({"object": "list", "data": [served.as_json() for served in self.models.values()]})

    async def one_model(self, request: Request) -> Response:
        return Answer(find(self.models, request.path_params["name"]).as_json())

    async def health(self, request: Request) -> Response:
        return Answer({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if not self.batching.alive:
            raise ApiError(503, "The server does not accept requests now.")
        return Answer({"status": "ready", "models": list(self.models), "waiting": self.batching.waiting})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def openapi(self, request: Request) -> Response:
        return Answer(description())

    def told(self, path: str, error: BaseException) -> ApiError:
        """Return the answer to an error; log it if it is the server's own."""
        found = api_error(error, self.batching.expected_wait_s)
        if found.status >= 500 and not isinstance(error, ApiError):
            self.log.failure(path, error)
        return found


# ---------------------------------------------------------------- around every request


class Around:
    """ASGI middleware: keys, errors as JSON, metrics, the log, and an end to answers that nobody reads."""

    def __init__(self, app: ASGIApp, service: Service, paths: Sequence[str]) -> None:
        self.app, self.service, self.paths = app, service, set(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, request, began = self.service, Request(scope, receive), time.monotonic()
        request.state.facts, status, number = {}, CLIENT_GONE, secrets.token_hex(8)

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        service.metrics.running.inc()
        try:
            async with asyncio.timeout(STALLED * service.limits.seconds):
                try:
                    if service.keys and request.url.path not in OPEN and request.method != "OPTIONS":
                        check_key(request.headers.get("authorization", ""), service.keys)
                    await self.app(scope, receive, tell)
                except ClientGone:
                    await Response(status_code=CLIENT_GONE)(scope, receive, send)
                except Exception as error:
                    if status != CLIENT_GONE:
                        raise  # the answer has begun, so the connection is closed
                    found = service.told(request.url.path, error)
                    await Answer(found.as_json(), found.status, dict(found.headers))(scope, receive, tell)
        finally:
            seconds = time.monotonic() - began
            path = request.url.path if request.url.path in self.paths else "other"
            service.metrics.running.dec()
            service.metrics.observe_request(path, status, seconds)
            service.log.request(
                id=number, method=request.method, path=path, status=status, seconds=round(seconds, 4),
                client=request.client.host if request.client else None, **request.state.facts,
            )  # fmt: skip


def _codec(kind: type, act: Callable[[Any, Any], Any], what: str, ability: str = "has_codec") -> Handler:
    return lambda service, request: service.codec(request, kind, act, ability, what)


ROUTES: dict[str, tuple[str, Handler]] = {
    "/v1/models": ("GET", Service.list_models),
    "/v1/models/{name:path}": ("GET", Service.one_model),
    "/v1/completions": ("POST", Service.completions),
    "/v1/embeddings": ("POST", _codec(requests.EmbeddingRequest, codec.embed, "embed texts")),
    "/v1/trajectory": ("POST", Service.trajectory),
    "/v1/reconstruct": ("POST", _codec(requests.Reconstruction, codec.reconstruct, "reconstruct texts")),
    "/v1/interpolate": ("POST", _codec(requests.Interpolation, codec.interpolate, "interpolate texts")),
    "/v1/edit": ("POST", _codec(requests.Edit, codec.edit, "edit texts", "can_edit")),
    "/healthz": ("GET", Service.health),
    "/readyz": ("GET", Service.ready),
    "/metrics": ("GET", Service.show_metrics),
    "/openapi.json": ("GET", Service.openapi),
}
OPEN = frozenset({"/healthz", "/readyz", "/openapi.json", *FILES})  # paths that need no key


def build_app(service: Service, origins: Sequence[str] = ()) -> Starlette:
    """Return the ASGI application; closing it finishes what the service has accepted."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batching.close)

    def route(path: str, method: str, handler: Handler) -> Route:
        async def answer(request: Request) -> Response:
            return await handler(service, request)

        return Route(path, answer, methods=[method])

    def page(path: str) -> Route:
        async def answer(request: Request) -> Response:
            content, kind = FILES[path]()
            return Response(content, media_type=kind, headers=page_headers())

        return Route(path, answer)

    async def refused(request: Request, error: Exception) -> Response:
        """Answer requests for which there is no route."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        said = f"There is no {request.method} {request.url.path[:80]}: see /openapi.json."
        return Answer(ApiError(status, said).as_json(), status, getattr(error, "headers", None))

    cors = Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return Starlette(
        routes=[*(route(path, *how) for path, how in ROUTES.items()), *map(page, FILES)],
        middleware=[*([cors] if origins else []), Middleware(Around, service=service, paths=[*ROUTES, *FILES])],
        exception_handlers={HTTPException: refused},
        lifespan=lifespan,
    )
