"""Metrics in Prometheus' format, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Counts requests and texts; `observe_batch` is called by the thread that samples."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        known = {"namespace": "jpeg_dlm", "registry": self.registry}
        self.requests = Counter("requests", "Answered requests.", ["path", "status"], **known)
        self.latency = Histogram(
            "request_seconds", "Time from a request to the end of its answer.", ["path"], buckets=LATENCIES_S, **known
        )
        self.running = Gauge("requests_running", "Requests that are being answered.", **known)
        self.batches = Histogram("batch_rows", "Texts of each batch.", buckets=ROWS, **known)
        self.texts = Counter("texts", "Texts written; its rate is texts per second.", **known)
        self.busy = Counter("sampling_seconds", "Time spent sampling.", **known)
        self.speed = Gauge("texts_per_second", "Texts per second of the latest batch.", **known)
        Gauge("queue_texts", "Texts that wait for their batch.", **known).set_function(waiting)

    def observe_batch(self, rows: int, seconds: float) -> None:
        """Count a batch."""
        self.batches.observe(rows)
        self.texts.inc(rows)
        self.busy.inc(seconds)
        self.speed.set(rows / max(seconds, 1e-9))

    def observe_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.requests.labels(path, str(status)).inc()
        self.latency.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self.registry)
