"""Jobs that the main thread need not wait for."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread


class Background:
    """Runs jobs one after another in one thread; the next `start` or `wait` raises the first error of those before.

    The `with` block ends after the last job, except that `SystemExit`, as the second stop signal raises it, drops them.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], object], Event] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._last = Event()
        self._last.set()
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object]) -> Event:
        """Run a job after those before it; return the event of its end."""
        self._raise()
        if self._thread is None:
            self._thread = Thread(target=self._work, daemon=True)  # a daemon, so that exit need not wait for it
            self._thread.start()
        self._last = Event()
        self._jobs.put((job, self._last))
        return self._last

    def wait(self, end: Event | None = None) -> None:
        """Wait for the end of a job, or of all."""
        (end or self._last).wait()
        self._raise()

    def _work(self) -> None:
        while entry := self._jobs.get():
            try:
                entry[0]()
            except BaseException as error:
                self._error = self._error or error
            entry[1].set()
            del entry  # frees what the job held while there is no other

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._jobs.put(None)
        self._thread = None
        if kind is not SystemExit:
            self.wait()
