"""The service: its routes, the page, and the process with a socket, uvicorn, and signals that end it in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from jpeg_dlm import __version__
from jpeg_dlm.serve import codec, schemas
from jpeg_dlm.serve.batching import MAX_BATCH, BatchingService
from jpeg_dlm.serve.http import ApiError, all_done, api_error, while_connected
from jpeg_dlm.serve.jobs import CompletionJob, TrajectoryJob
from jpeg_dlm.serve.middleware import Metrics, RequestMiddleware, check_key
from jpeg_dlm.serve.models import Served
from jpeg_dlm.util.errors import JpegDlmError, UsageError

LOGGER = logging.getLogger(__name__)
GRACE_S = 5.0  # beyond the limit of a request
SSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second tells nginx to pass events on at once
# Only files of this server run, and only this server is asked.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PACKAGE = Path(__file__).parent.parent
PAGE = {"/": "serve/page/index.html", "/page.js": "serve/page/page.js", "/page.css": "serve/page/page.css"}
PAGE |= {f"/{name}": f"report/{name}" for name in ("player.js", "player.css", "style.css")}


@dataclass(frozen=True)
class Limits:
    """The most that the service takes on."""

    seconds: float = 60.0  # for one request
    queue: int = 1024  # texts that wait
    batch: int = MAX_BATCH


class Service:
    """The models, the queue in front of them, and everything that requests share."""

    def __init__(self, models: Mapping[str, Served], limits: Limits, keys: Sequence[bytes] = ()) -> None:
        self.models, self.limits, self.keys = models, limits, keys
        self.metrics = Metrics(lambda: self.batching.waiting)
        self.batching = BatchingService(limits.batch, max_queue=limits.queue, observe=self.metrics.observe_batch)

    def find(self, name: str | None) -> Served:
        """Return a model by name, or the first one."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"There is no model '{name[:80]}': choose one of {known}.", "model", "model_not_found")
        return self.models[name]

    def to_api_error(self, error: Exception) -> ApiError:
        """Return the answer to an error; log it if it is the server's own."""
        answer = api_error(error)
        if answer.status_code >= 500 and not isinstance(error, ApiError):
            LOGGER.error("The server failed on a request.", exc_info=error)
        return answer

    async def answer(self, job: CompletionJob | TrajectoryJob, request: Request, stream: bool) -> Response:
        """Answer with all texts, or with events, in which an error after the first is an event too."""
        limit_s = self.limits.seconds
        if not stream:
            return JSONResponse(await while_connected(request, job.answer(limit_s)))

        async def events() -> AsyncIterator[str]:
            try:
                async for chunk in job.chunks(limit_s):
                    yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
                yield "data: [DONE]\n\n"
            except Exception as error:
                yield f"data: {json.dumps(self.to_api_error(error).as_json())}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers=SSE_HEADERS)

    async def use_codec(self, verb: str, act: Callable[[Served, Any], Any], body: Any, request: Request) -> Response:
        """Answer with what a function of `codec` returns; it runs in the thread of the queue."""
        served = self.find(body.model)
        if not served.can[verb]:
            raise ApiError(422, f"{served.title} cannot {verb} texts: use a model that `/v1/models` says can.", "model")
        future = self.batching.call(lambda _: act(served, body))
        (content,) = await while_connected(request, all_done([future], self.limits.seconds))
        return JSONResponse(content)


def api_routes(service: Service) -> APIRouter:
    """Return the routes that need a key if there are any."""

    async def authorize(request: Request) -> None:
        if service.keys:
            check_key(request.headers.get("authorization", ""), service.keys)

    router = APIRouter(dependencies=[Depends(authorize)])

    @router.post("/v1/completions")
    async def completions(body: schemas.Completion, request: Request) -> Response:
        """Write texts, as the OpenAI conventions describe."""
        return await service.answer(CompletionJob(service.find(body.model), body, service.batching), request, body.stream)

    @router.post("/v1/trajectory")
    async def trajectory(body: schemas.Trajectory, request: Request) -> Response:
        """Write texts and return what they would be after each step."""
        return await service.answer(TrajectoryJob(service.find(body.model), body, service.batching), request, body.stream)

    @router.post("/v1/embeddings")
    async def embeddings(body: schemas.EmbeddingRequest, request: Request) -> Response:
        """Encode texts: the mean of their latents, or all latents in a row."""
        return await service.use_codec("embed", codec.embed, body, request)

    @router.post("/v1/reconstruct")
    async def reconstruct(body: schemas.Reconstruction, request: Request) -> Response:
        """Encode and decode texts; tell for each token whether it came back at its place."""
        return await service.use_codec("reconstruct", codec.reconstruct, body, request)

    @router.post("/v1/interpolate")
    async def interpolate(body: schemas.Interpolation, request: Request) -> Response:
        """Decode points on the line between two texts."""
        return await service.use_codec("interpolate", codec.interpolate, body, request)

    @router.post("/v1/edit")
    async def edit(body: schemas.Edit, request: Request) -> Response:
        """Write variations of a text from its latents with noise."""
        return await service.use_codec("edit", codec.edit, body, request)

    @router.get("/v1/models")
    async def list_models() -> Response:
        """List the models and what each can do."""
        return JSONResponse({"object": "list", "data": [served.as_json() for served in service.models.values()]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Describe one model."""
        return JSONResponse(service.find(name).as_json())

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        content = prometheus_client.generate_latest(service.metrics.registry)
        return Response(content, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return router


def build_app(service: Service, origins: Sequence[str] = ()) -> FastAPI:
    """Return the ASGI application; closing it finishes what the service has accepted."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batching.close)

    async def refuse(_: Request, error: Exception) -> Response:
        return service.to_api_error(error).as_response()

    app = FastAPI(
        title="jpeg-dlm",
        version=__version__,
        description="Text by diffusion language models.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((RequestValidationError, HTTPException, JpegDlmError), refuse),
        responses={"default": {"description": "An error in OpenAI's form: {error: {message, type, param, code}}."}},
    )
    app.include_router(api_routes(service))

    @app.get("/healthz")
    async def health() -> Response:
        """Return that the process answers."""
        return JSONResponse({"status": "ok"})

    @app.get("/readyz")
    async def ready() -> Response:
        """Return whether requests are accepted."""
        if not service.batching.alive:
            raise ApiError(503, "The server does not accept requests now.")
        return JSONResponse({"status": "ready", "models": list(service.models), "waiting": service.batching.waiting})

    async def page(request: Request) -> Response:
        return FileResponse(PACKAGE / PAGE[request.url.path], headers=PAGE_HEADERS)

    for path in PAGE:
        app.add_route(path, page, include_in_schema=False)
    facts: dict[str, Any] = {"to_api_error": service.to_api_error, "metrics": service.metrics}
    app.add_middleware(RequestMiddleware, limit_s=service.limits.seconds, **facts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return app


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; it refuses connections until the server starts."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"Cannot listen on {host}, port {port} ({reason}): choose others with --host and --port.") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the address of the page."""
    host, port, *_ = bound.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(service: Service, bound: socket.socket, origins: Sequence[str] = (), log: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish what was accepted and return. A second signal ends at once.

    With `log`, uvicorn writes a line for each request, without what was requested or answered.
    """
    import uvicorn

    config = uvicorn.Config(
        build_app(service, origins),
        log_level="info" if log else "critical",
        access_log=log,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(service.limits.seconds + GRACE_S),
        proxy_headers=False,
    )
    # uvicorn raises the signals it took again for the handlers that it found; here they have done their work.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server = uvicorn.Server(config)
        server.run(sockets=[bound])
        if server.force_exit:
            sys.exit(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
