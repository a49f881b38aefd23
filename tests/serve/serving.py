"""Servers for tests: in a thread, with a sampler that can be held, and in a process of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from jpeg_dlm.serve.app import Service, bind, build_app

PATIENCE = 600  # seconds; a busy machine is slow


class Gated:
    """A writer that waits at each step until its gate is open."""

    def __init__(self, writer: Any) -> None:
        self.writer, self.entered, self.gate, self.rows = writer, threading.Event(), threading.Event(), []
        self.title, self.device, self.supports = writer.title, writer.device, writer.supports

    def sample(self, sampler, noise, watch=None, fixed_BL=None, guidance=None):
        self.rows.append(len(noise.rows))
        self.entered.set()

        def held(*step):
            while watch and not watch(*step) and not self.gate.wait(0.02):
                pass

        return self.writer.sample(sampler, noise, held, fixed_BL, *([guidance] if guidance else []))


@dataclass
class Reply:
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The sentence of an error in OpenAI's form."""
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        message = self.json["error"]["message"]
        assert not any(word in message for word in ("Traceback", ".py", "/root", "/tmp"))  # noqa: S108
        return message

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, which must end with [DONE]."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == "" and lines.pop() == "data: [DONE]", self.body
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@dataclass
class Client:
    """Plain HTTP to a server on this machine."""

    port: int

    def __call__(self, path: str, body: Any = None, raw: bytes | None = None, method: str = "", **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            sent = raw if raw is not None else None if body is None else json.dumps(body).encode()
            typed = {} if sent is None else {"Content-Type": "application/json"}
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method or ("GET" if sent is None else "POST"), path, sent, typed | names)
            reply = connection.getresponse()
            return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())

    def texts(self, **body: Any) -> list[str]:
        """The texts of a completion that must succeed."""
        reply = self("/v1/completions", body)
        assert reply.status == 200, reply.body
        return [choice["text"] for choice in reply.json["choices"]]


@contextlib.contextmanager
def in_thread(service: Service, origins: tuple[str, ...] = ()) -> Iterator[Client]:
    """Serve in a thread of this process."""
    bound = bind("127.0.0.1", 0)
    bound.listen()
    server = uvicorn.Server(uvicorn.Config(build_app(service, origins), log_config=None, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield Client(bound.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def eventually(holds: Callable[[], Any]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@dataclass
class Process:
    """`jpeg-dlm serve` as a person starts it."""

    popen: subprocess.Popen[bytes]
    log: Path
    port: int = 0

    @property
    def ask(self) -> Client:
        return Client(self.port)

    @property
    def lines(self) -> list[str]:
        """Everything on standard error."""
        return self.log.read_text().splitlines()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(PATIENCE)


@contextlib.contextmanager
def process(*words: str | Path) -> Iterator[Process]:
    """Start a server on a free port and wait until it listens."""
    command = [sys.executable, "-m", "jpeg_dlm", "serve", *map(str, words), "--port", "0", "--device", "cpu"]
    with tempfile.NamedTemporaryFile() as log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log) as popen:
        server = Process(popen, Path(log.name))
        try:
            eventually(lambda: server.lines or popen.poll() is not None)
            match = re.search(r"http://127\.0\.0\.1:(\d+)", server.lines[0])
            assert match, server.lines
            server.port = int(match[1])
            yield server
        finally:
            popen.kill()
