"""Numbers about the service, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # all our names are ASCII: servers before 3.0 read them too


FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of the environment from which the library learns, at its import, where the processes of a service count."""


class Metrics:
    """Counts requests, rows and calls of the model, in a registry of its own: two services in one process never mix.

    Args:
        folder: where several processes count; what is told then is the sum over all of them. None: this one alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        registry = self._registry = _Registry()
        self._requests = Counter("dapcal_requests", "Requests answered.", ("route", "status"), registry=registry)
        self.rows = Counter("dapcal_rows_predicted", "Rows predicted.", registry=registry)
        self.rows_out = Counter(
            "dapcal_rows_out_of_distribution", "Predicted rows that are out of distribution.", registry=registry
        )
        self.calls = Counter(
            "dapcal_model_calls", "Calls of the model, each for all rows that were waiting.", registry=registry
        )
        self._seconds = Histogram(
            "dapcal_request_seconds",
            "Time from a request's head to its answer.",
            ("route",),
            registry=registry,
            buckets=SECONDS,
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> str:
        """Everything so far."""
        registry: CollectorRegistry = self._registry
        if self._folder is not None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, path=str(self._folder))
        return generate_latest(registry).decode()


class _Registry(CollectorRegistry):
    """Without the times at which each series began, which would double the series; the library's switch is global."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
