"""`/v1/trajectory`: the texts that a model would write if it had to stop after each step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from jpeg_dlm.report.moments import Moment, Recorder
from jpeg_dlm.sampling.batching import BatchingService
from jpeg_dlm.serve.completions import seed_of
from jpeg_dlm.serve.http import out_of_time
from jpeg_dlm.serve.http_errors import ApiError
from jpeg_dlm.serve.models import Served
from jpeg_dlm.serve.requests import Trajectory


class Journey:
    """One request for a trajectory. Moments arrive from the service's thread in `moments`; None follows the last."""

    def __init__(self, served: Served, request: Trajectory) -> None:
        if len(request.prompt) > 1:
            raise ApiError(422, "A trajectory has one prompt: send a request for each.", "prompt")
        self.served, self.request, self.seed = served, request, seed_of(request)
        served.options(request)  # refuses what the model has no use for
        self.given = served.given(*(request.prompt or (None,)), request.template)
        self.loop = asyncio.get_running_loop()
        self.moments: asyncio.Queue[Moment | None] = asyncio.Queue()
        self.recorder = Recorder(served.model, self.given, self._tell)

    def _tell(self, moment: Moment | None) -> None:
        self.loop.call_soon_threadsafe(self.moments.put_nowait, moment)

    def submit(self, service: BatchingService) -> Future[Tensor]:
        """Ask for the texts and watch them form."""
        request, watch = self.request, self.recorder
        future = self.served.submit(service, request, request.n, self.seed, given=self.given, watch=watch)
        future.add_done_callback(lambda _: self._tell(None))
        return future

    async def follow(self, future: Future[Tensor], limit_s: float) -> AsyncIterator[dict[str, Any]]:
        """Yield each moment when it is reached; the last one has the finished texts."""
        try:
            async with asyncio.timeout(limit_s):
                while (moment := await self.moments.get()) is not None:
                    yield moment.as_json()
            future.result(0)  # its error, if there was one
        except TimeoutError:
            raise out_of_time(limit_s) from None
        finally:
            future.cancel()

    def as_json(self) -> dict[str, Any]:
        """Return what is known of the run before its moments."""
        return {"object": "trajectory", "model": self.served.name, "seed": self.seed, "heading": self.recorder.heading}
