"""The process: a socket, uvicorn, and signals that end it in order."""

from __future__ import annotations

import errno
import signal
import socket
import sys
from collections.abc import Sequence

from jpeg_dlm.errors import UsageError
from jpeg_dlm.serve.app import Service, build_app

GRACE_S = 5.0  # beyond the limit of a request


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; it refuses connections until the server starts."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"Port {port} of {host} is taken: choose another with --port.") from error
        raise UsageError(f"Cannot listen on {host}, port {port} ({error.strerror or error}): choose others.") from error
    return bound


def run_server(service: Service, bound: socket.socket, origins: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish what was accepted and return. A second signal ends at once."""
    import uvicorn

    config = uvicorn.Config(
        build_app(service, origins), log_config=None, log_level="critical", access_log=False, server_header=False,
        lifespan="on", ws="none", timeout_keep_alive=30, timeout_graceful_shutdown=int(service.limits.seconds + GRACE_S),
        proxy_headers=False,
    )  # fmt: skip
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


def address_of(bound: socket.socket) -> str:
    """Return the address of the page."""
    host, port, *_ = bound.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
