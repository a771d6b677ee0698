"""The service: routes, and how a request becomes a prediction."""

# No `from __future__ import annotations`: FastAPI reads the models of the routes below from their annotations.

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ValidationError

from dapcal import __version__
from dapcal.serve.batching import Batcher
from dapcal.serve.errors import FieldProblem, Refused, documented, handle_errors
from dapcal.serve.gate import Gate
from dapcal.serve.metrics import CONTENT_TYPE, Metrics
from dapcal.serve.page import HEADERS, page
from dapcal.serve.schema import Health, Judged, Pointers, Shapes, shapes
from dapcal.serve.served import Limits, Served

logger = logging.getLogger(__name__)

PREDICTING = frozenset({"/predict", "/predict/batch"})
PAGES = frozenset({"/", "/docs", "/health", "/metrics", "/openapi.json"})


def create_app(served: Served, limits: Limits | None = None) -> FastAPI:
    """The service as an ASGI application.

    Args:
        served: the model.
        limits: what is refused; by default `Limits()`.
    """
    limits = limits or Limits()
    shape = shapes(served, limits)
    metrics = Metrics()

    def predict(rows: list[dict[str, Any]]) -> list[Judged]:
        metrics.calls.inc()
        return [shape.prediction.model_validate(record) for record in served.predict(rows)]

    batcher = Batcher(predict, limits.rows_at_once)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)

    app = FastAPI(
        title=served.name,
        version=__version__,
        description=f"Calibrated predictions ({served.task}) that know how far a row is from the training data.",
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
    )
    handle_errors(app)
    _add_predictions(app, shape, batcher, metrics)
    _add_pages(app, served, metrics)
    app.add_middleware(Gate, limits=limits, metrics=metrics, routes=PREDICTING | PAGES, bounded=PREDICTING)
    return app


def _add_predictions(app: FastAPI, shape: Shapes, batcher: Batcher[Judged], metrics: Metrics) -> None:
    errors = documented(400, 408, 413, 415, 422, 500, 503)

    async def predictions(rows: Sequence[BaseModel], paths: Sequence[list[str | int]]) -> list[Judged]:
        outcomes = await batcher([row.model_dump(by_alias=True) for row in rows])
        records = [outcome for outcome in outcomes if isinstance(outcome, Judged)]
        metrics.rows.inc(len(records))
        metrics.rows_out.inc(sum(record.ood for record in records))
        if len(records) < len(rows):
            raise _failed([(p, o) for p, o in zip(paths, outcomes, strict=True) if isinstance(o, Exception)])
        return records

    @app.post("/predict", response_model=shape.prediction, responses=errors, summary="Predict for one row")
    async def predict(row: shape.row) -> Response:  # type: ignore[name-defined]
        """Takes an object with a value for every column; null or nothing where a column need not be known."""
        (record,) = await predictions([row], [[]])
        return _json(record)

    @app.post("/predict/batch", response_model=shape.predictions, responses=errors, summary="Predict for several rows")
    async def predict_batch(body: shape.rows) -> Response:  # type: ignore[name-defined]
        """Takes rows as /predict does; gives one prediction for each, in their order."""
        records = await predictions(body.rows, [["rows", number] for number in range(len(body.rows))])
        return _json(shape.predictions.model_construct(predictions=records))


def _add_pages(app: FastAPI, served: Served, metrics: Metrics) -> None:
    started = time.monotonic()
    addresses = {"docs": "/docs", "openapi": "/openapi.json", "health": "/health", "metrics": "/metrics"}
    text: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format."}
    }

    @app.get("/", summary="Where to go from here")
    async def index() -> Pointers:
        return Pointers(model=served.name, **addresses)

    @app.get("/health", summary="Whether the service is ready")
    async def health() -> Health:
        uptime = time.monotonic() - started
        return Health(ready=True, model=served.name, task=served.task, version=__version__, uptime_seconds=uptime)

    @app.get("/metrics", name="metrics", summary="Numbers for Prometheus", response_class=Response, responses=text)
    async def numbers() -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()), headers=HEADERS)


def _failed(rows: Sequence[tuple[list[str | int], Exception]]) -> Refused:
    """The error for rows (path, exception) without a prediction: the client's, if the model only says what is wrong."""
    failures = [(path, error) for path, error in rows if not _is_refusal(error)]
    for _, error in failures:
        logger.error("A row could not be predicted", exc_info=error)
    if failures:
        fields = [FieldProblem(path=path, message="could not be predicted") for path, _ in failures]
        return Refused(500, "prediction_failed", "The model failed; the service's log says why.", fields)
    fields = [FieldProblem(path=path, message=str(error)) for path, error in rows]
    return Refused(422, "row_refused", "The model refuses what a row holds.", fields)


def _is_refusal(error: Exception) -> bool:
    """Whether the model refuses a row; a ValidationError is about its record, not about the row."""
    return isinstance(error, ValueError) and not isinstance(error, ValidationError)


def _json(answer: BaseModel) -> Response:
    """Written by pydantic, which has null for numbers that JSON cannot hold."""
    return Response(answer.model_dump_json(by_alias=True), media_type="application/json")
