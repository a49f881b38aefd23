"""One line of JSON for each request, without what was asked or answered."""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from typing import Any, TextIO


class Log:
    """Writes to a stream (standard error by default) if `on`; failures of the server are always told."""

    def __init__(self, on: bool = False, stream: TextIO | None = None) -> None:
        self.on, self.stream = on, stream or sys.stderr

    def request(self, **facts: Any) -> None:
        """Tell that a request was answered."""
        if self.on:
            self._write({"event": "request", **facts})

    def failure(self, path: str, error: BaseException) -> None:
        """Tell of an error that no request explains, with its traceback."""
        self._write({"event": "failure", "path": path, "traceback": "".join(traceback.format_exception(error))})

    def _write(self, facts: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        print(json.dumps({"time": now, **facts}, default=str), file=self.stream, flush=True)
