"""SIGTERM and Ctrl-C make a run finish its step, save and exit; a second one makes it exit at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Within the `with` block, sets `requested` to the name of the first signal that arrives.

    The second signal restores the previous handlers, writes the message that `farewell` returns, and exits with 128 plus its
    number. Signals within `echo_s` seconds of the first are ignored: under torchrun a single Ctrl-C reaches a worker twice.
    Outside the main thread Python allows no handlers, and `requested` stays None.
    """

    def __init__(self, echo_s: float = 0.0, farewell: Callable[[], str] | None = None) -> None:
        self.requested: str | None = None
        self._echo_s, self._farewell = echo_s, farewell
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            self._since = time.monotonic()
        elif time.monotonic() - self._since >= self._echo_s:
            self._restore()
            with contextlib.suppress(OSError):
                # Not through `sys.stderr`: the signal may have interrupted a write to it.
                os.write(2, f"\n{self._farewell()}\n".encode() if self._farewell else b"")
            raise SystemExit(128 + number)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None means a handler that was not set from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
