"""Ends all processes of a run soon after one of them ends, even if they wait in a collective.

Each process holds a connection to the main one. The kernel closes it however a process ends, and keepalive probes detect a
machine that is gone. A process that is only slow, or busy saving, keeps its connection; the timeout of collectives covers
delays.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
from types import TracebackType

import torch
import torch.distributed as torch_dist

from jpeg_dlm.errors import JpegDlmError
from jpeg_dlm.machine.dist import Ranks

CONNECT_S = 30.0  # assumed: all processes connect at the same time
GRACE_S = 4.0  # lets a process report its own error first; through the main process it takes twice that (assumed)
POLL_S = 0.2
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}  # detects a dead machine after 14 s (assumed)
HELLO = struct.Struct("!q")
GOODBYE = b"."
LOST = "Another process of this run has ended, so this one ends too: earlier checkpoints are intact, continue with --resume."


class Lifeline:
    """Within the block, all processes end as soon as any does. With one process it does nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._peers: list[socket.socket] = []
        self._left, self._lost = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)

    def __enter__(self) -> Lifeline:
        if self._ranks.world > 1:
            self._peers = _accept(self._ranks) if self._ranks.is_main else _connect(self._ranks)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Report the true cause if a collective failed because another process ended.
        bereft = isinstance(error, RuntimeError) and bool(self._peers) and self._lost.wait(2 * POLL_S)
        self._left.set()
        for peer in self._peers:
            with contextlib.suppress(OSError), peer:
                if error is None:
                    peer.sendall(GOODBYE)
        if bereft:
            raise JpegDlmError(LOST) from error

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            while selector.get_map() and not self._left.is_set():
                for key, _ in selector.select(POLL_S):
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    selector.unregister(peer)
                    if not self._left.is_set() and _received(peer, 1) != GOODBYE:
                        return self._bereft()

    def _bereft(self) -> None:
        self._lost.set()
        if not self._left.wait(GRACE_S):
            # The main thread waits in a collective, which cannot be interrupted other than by exiting.
            sys.stderr.write(f"error: {LOST}\n")
            sys.stderr.flush()
            os._exit(JpegDlmError.exit_code)


def _accept(ranks: Ranks) -> list[socket.socket]:
    """Accept the connections of all other processes, which receive port and secret by broadcast."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=ranks.world, dualstack_ipv6=dual) as server:
        word = int.from_bytes(os.urandom(7), "big")
        torch_dist.broadcast(torch.tensor([server.getsockname()[1], word], device=ranks.device), 0)
        server.settimeout(CONNECT_S)
        peers: list[socket.socket] = []
        while len(peers) < ranks.world - 1:
            try:
                peer = server.accept()[0]
            except TimeoutError:
                sys.stderr.write("warning: Not every process connected, so the end of one may be noticed only by a timeout.\n")
                break
            peer.settimeout(CONNECT_S)
            if _received(peer, HELLO.size) == HELLO.pack(word):
                peers.append(_kept_alive(peer))
            else:
                peer.close()
    return peers


def _connect(ranks: Ranks) -> list[socket.socket]:
    """Connect to the main process. If a firewall prevents that, return no connection and rely on timeouts."""
    address = torch.zeros(2, dtype=torch.int64, device=ranks.device)
    torch_dist.broadcast(address, 0)
    port, word = address.tolist()
    try:
        peer = socket.create_connection((os.environ["MASTER_ADDR"], port), CONNECT_S)
        peer.sendall(HELLO.pack(word))
    except OSError:
        return []
    return [_kept_alive(peer)]


def _received(peer: socket.socket, size: int) -> bytes:
    with contextlib.suppress(OSError):
        return peer.recv(size)
    return b""


def _kept_alive(peer: socket.socket) -> socket.socket:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has these options
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer
