"""Jobs that the main thread need not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Background:
    """Runs jobs one after another in threads; the next `start` or `wait` raises the first error of those before.

    The `with` block ends after the last job, except that `SystemExit`, as the second stop signal raises it, drops them.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object]) -> threading.Thread:
        """Run a job after those before it, and return its thread."""
        self._raise()
        self._last = threading.Thread(target=self._run, args=(job, self._last), daemon=True)  # a daemon can be dropped
        self._last.start()
        return self._last

    def wait(self, thread: threading.Thread | None = None) -> None:
        """Wait for the job of a thread, or for all."""
        if thread := thread or self._last:
            thread.join()
        self._raise()

    def _run(self, job: Callable[[], object], before: threading.Thread | None) -> None:
        if before:
            before.join()
        try:
            job()
        except BaseException as error:
            self._error = self._error or error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not SystemExit:
            self.wait()
