"""Errors as the OpenAI conventions write them: a status, a sentence, and the field that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jpeg_dlm.errors import DataError, JpegDlmError, UsageError
from jpeg_dlm.sampling.batching import QueueFullError

LONGEST_WAIT_S = 60  # of Retry-After
KINDS = {
    401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error",
}  # fmt: skip


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is answered with an error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client closed its connection."""


def api_error(error: BaseException, wait_s: float = 1.0) -> ApiError:
    """Return the answer to an error; only messages about the request itself are passed on."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        seconds = str(max(1, min(LONGEST_WAIT_S, round(wait_s))))
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": seconds})
    if isinstance(error, (UsageError, DataError)):
        return ApiError(422, str(error))
    if isinstance(error, JpegDlmError):
        return ApiError(503, "The model cannot do this now: see the log of the server.")
    return ApiError(500, "The server failed on this request: see its log.")
