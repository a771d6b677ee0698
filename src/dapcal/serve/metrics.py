"""Numbers about the service, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts requests, rows and calls of the model. Touched by the event loop alone, so it needs no lock."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.rows = 0
        self.rows_out = 0
        self._total: defaultdict[str, float] = defaultdict(float)
        self._latencies: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(SECONDS) + 1))

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests[route, status] += 1
        self._total[route] += seconds
        self._latencies[route][bisect_left(SECONDS, seconds)] += 1  # a bucket holds its upper end

    def text(self, calls: int) -> str:
        """Everything so far; `calls` of the model."""
        return "\n".join(self._lines(calls)) + "\n"

    def _lines(self, calls: int) -> Iterator[str]:
        yield from _head("dapcal_requests_total", "counter", "Requests answered.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'dapcal_requests_total{{route="{route}",status="{status}"}} {count}'
        for name, count, about in (
            ("dapcal_rows_predicted_total", self.rows, "Rows predicted."),
            ("dapcal_rows_out_of_distribution_total", self.rows_out, "Predicted rows that are out of distribution."),
            ("dapcal_model_calls_total", calls, "Calls of the model, each for all rows that were waiting."),
        ):
            yield from _head(name, "counter", about)
            yield f"{name} {count}"
        yield from _head("dapcal_request_seconds", "histogram", "Time from a request's head to its answer.")
        for route, counts in sorted(self._latencies.items()):
            below = 0
            for limit, count in zip((*map(repr, SECONDS), "+Inf"), counts, strict=True):
                below += count
                yield f'dapcal_request_seconds_bucket{{route="{route}",le="{limit}"}} {below}'
            yield f'dapcal_request_seconds_sum{{route="{route}"}} {self._total[route]!r}'
            yield f'dapcal_request_seconds_count{{route="{route}"}} {below}'


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
