"""SIGTERM and Ctrl-C make a run finish its step, save and exit; a second one makes it exit at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType


class StopSignal(contextlib.ExitStack):
    """Within the `with` block, sets `requested` to the name of the first signal that arrives.

    The second signal restores the previous handlers, writes `farewell`, and exits with 128 plus its number. Signals within
    `echo_s` seconds of the first are ignored: under torchrun a single Ctrl-C reaches a worker twice.
    Outside the main thread Python allows no handlers, and `requested` stays None.
    """

    def __init__(self, echo_s: float = 0.0, farewell: str = "") -> None:
        super().__init__()
        self.requested: str | None = None
        self._echo_s, self._farewell, self._since = echo_s, farewell, 0.0

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # None means a handler that was not set from Python, which Python cannot restore.
                self.callback(signal.signal, number, signal.signal(number, self._handle) or signal.SIG_DFL)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since >= self._echo_s:
            self.close()
            with contextlib.suppress(OSError):
                # Not through `sys.stderr`: the signal may have interrupted a write to it.
                os.write(2, f"\n{self._farewell}\n".encode() if self._farewell else b"")
            raise SystemExit(128 + number)
