"""Jobs that the main thread need not wait for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event, Thread


class Background(AbstractContextManager["Background"]):
    """Runs jobs in threads, one after another; the next `start` or `wait` raises the first error of those before.

    The `with` block ends after the last job, except that `SystemExit`, as the second stop signal raises it, drops them.
    """

    def __init__(self) -> None:
        self._last = Event()
        self._last.set()
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object]) -> Event:
        """Run a job after those before it; return the event of its end."""
        self._raise()
        before, self._last = self._last, Event()
        Thread(target=self._work, args=(job, before, self._last), daemon=True).start()  # exit need not wait for a daemon
        return self._last

    def wait(self, end: Event | None = None) -> None:
        """Wait for the end of a job, or of all."""
        (end or self._last).wait()
        self._raise()

    def _work(self, job: Callable[[], object], before: Event, end: Event) -> None:
        before.wait()
        try:
            job()
        except BaseException as error:
            self._error = self._error or error
        end.set()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not SystemExit:
            self.wait()
