"""The service: its routes, the page, and the process with a socket, uvicorn, and signals that end it in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from jpeg_dlm import __version__
from jpeg_dlm.serve import codec, schemas
from jpeg_dlm.serve.batching import MAX_BATCH, BatchingService
from jpeg_dlm.serve.http import ApiError, Metrics, RequestMiddleware, all_done, api_error, check_key, while_connected
from jpeg_dlm.serve.jobs import ChatJob, CompletionJob, TrajectoryJob
from jpeg_dlm.serve.models import Served
from jpeg_dlm.util.errors import JpegDlmError, UsageError

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


class Service:
    """The models, the queue in front of them, and everything that requests share.

    A request may take `limit_s` seconds; `queue` texts may wait, and `batch` are written at once.
    """

    def __init__(
        self,
        models: Mapping[str, Served],
        limit_s: float = 60.0,
        queue: int = 1024,
        batch: int = MAX_BATCH,
        keys: Sequence[bytes] = (),
    ) -> None:
        self.models, self.limit_s, self.keys = models, limit_s, keys
        self.metrics = Metrics(lambda: self.batching.waiting)
        self.batching = BatchingService(batch, max_queue=queue, observe=self.metrics.observe_batch)

    def find(self, name: str | None) -> Served:
        """Return a model by name, or the first one."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"There is no model '{name[:80]}': choose one of {known}.", "model", "model_not_found")
        return self.models[name]

    async def answer(self, job: CompletionJob | TrajectoryJob, request: Request, stream: bool) -> Response:
        """Answer with all texts, or with events, in which an error after the first is an event too."""
        if not stream:
            return JSONResponse(await while_connected(request, job.answer(self.limit_s)))

        async def events() -> AsyncIterator[str]:
            try:
                async for chunk in job.chunks(self.limit_s):
                    yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
                yield "data: [DONE]\n\n"
            except Exception as error:
                yield f"data: {json.dumps(api_error(error).as_json())}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers=SSE_HEADERS)

    def codec_route(self, act: Callable[[Served, Any], Any]) -> Callable[[Any, Request], Awaitable[Response]]:
        """Return a route that answers with what a function of `codec` returns; this runs in the thread of the queue."""
        verb = act.__name__

        async def route(body: Any, request: Request) -> Response:
            served = self.find(body.model)
            if not served.can[verb]:
                raise ApiError(422, f"{served.title} cannot {verb} texts: use a model that `/v1/models` says can.", "model")
            future = self.batching.call(lambda _: act(served, body))
            (content,) = await while_connected(request, all_done([future], self.limit_s))
            return JSONResponse({"object": "list", "model": served.name} | content)

        route.__annotations__["body"] = get_type_hints(act)["request"]  # from which FastAPI takes the schema
        return route


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

    @router.post("/v1/chat/completions")
    async def chat(body: schemas.Chat, request: Request) -> Response:
        """Write answers to the last message of a user, as the OpenAI conventions describe."""
        return await service.answer(ChatJob(service.find(body.model), body, service.batching), request, body.stream)

    @router.post("/v1/trajectory")
    async def trajectory(body: schemas.Trajectory, request: Request) -> Response:
        """Write texts and return what they would be after each step."""
        return await service.answer(TrajectoryJob(service.find(body.model), body, service.batching), request, body.stream)

    for path, act in (
        ("embeddings", codec.embed),
        ("reconstruct", codec.reconstruct),
        ("interpolate", codec.interpolate),
        ("edit", codec.edit),
    ):
        router.add_api_route(f"/v1/{path}", service.codec_route(act), methods=["POST"], name=path, description=act.__doc__)

    @router.get("/v1/models")
    async def list_models() -> Response:
        """List the models and what each can do."""
        return JSONResponse({"object": "list", "data": [served.as_json() for served in service.models.values()]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Describe one model."""
        return JSONResponse(service.find(name).as_json())

    @router.get("/metrics", response_class=PlainTextResponse)
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
        return api_error(error).as_response()

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
    app.add_middleware(RequestMiddleware, limit_s=service.limit_s, metrics=service.metrics)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return app


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; connections wait until the server starts."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"Cannot listen on {host}, port {port} ({reason}): choose others with --host and --port.") from error


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
        timeout_graceful_shutdown=int(service.limit_s + GRACE_S),
        proxy_headers=False,
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises again those that it took, after they have done their work
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(config)
    server.run(sockets=[bound])
    if server.force_exit:
        sys.exit(1)
