"""The service: routes, and how a request becomes a prediction."""

# No `from __future__ import annotations`: FastAPI reads the models of the routes below from their annotations.

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response, Security
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError

from dapcal import __version__
from dapcal.in_file import BlockDamaged
from dapcal.serve.access import AccessLog
from dapcal.serve.batching import Batcher
from dapcal.serve.direct import Direct, direct
from dapcal.serve.errors import FieldProblem, Refused, documented, handle_errors
from dapcal.serve.gate import Gate, Routes, Traffic
from dapcal.serve.metrics import CONTENT_TYPE, Metrics
from dapcal.serve.page import HEADERS, page
from dapcal.serve.schema import Health, Judged, Pointers, Ready, Shapes, shapes
from dapcal.serve.served import Limits, Served

logger = logging.getLogger(__name__)

PREDICTING = frozenset({"/predict", "/predict/batch"})
OPEN = frozenset({"/health", "/ready"})
ROUTES = Routes(PREDICTING | OPEN | {"/", "/docs", "/metrics", "/openapi.json"}, PREDICTING, OPEN)


def create_app(
    served: Served,
    limits: Limits | None = None,
    *,
    token: str | None = None,
    access: AccessLog | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The service as an ASGI application.

    Args:
        served: the model.
        limits: what is refused; by default `Limits()`. Those of connections are kept by `dapcal.serve.run`.
        token: that every request must carry as `Authorization: Bearer`, but for /health and /ready.
        access: told of every answer.
        metrics: where to count on, such as those of an application that this one replaces.
    """
    limits = limits or Limits()
    shape = shapes(served, limits)
    metrics = metrics or Metrics()
    traffic = Traffic()

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
    app.state.traffic, app.state.close = traffic, batcher.close
    handle_errors(app)
    # for the schema alone: the gate has checked it when a route is reached
    needs_token = [] if token is None else [Security(HTTPBearer(auto_error=False))]
    around = _add_predictions(app, served, shape, batcher, metrics, needs_token)
    _add_pages(app, served, limits, metrics, traffic, needs_token)
    app.add_middleware(
        Gate, limits=limits, metrics=metrics, routes=ROUTES, traffic=traffic, token=token, access=access, direct=around
    )
    return app


def _add_predictions(
    app: FastAPI, served: Served, shape: Shapes, batcher: Batcher[Judged], metrics: Metrics, needs_token: Sequence[Any]
) -> dict[str, Direct]:
    """Returns the way around the routes: what answers the body of a request that is as the schema asks."""
    errors = documented(400, *([401] if needs_token else []), 408, 413, 415, 422, 500, 503)
    names = [field.name for field in served.fields]

    async def predictions(given: list[dict[str, Any]], paths: Sequence[list[str | int]]) -> list[Judged]:
        outcomes = await batcher([{name: row[name] for name in names} for row in given])
        records = [outcome for outcome in outcomes if isinstance(outcome, Judged)]
        metrics.rows.inc(len(records))
        metrics.rows_out.inc(sum(record.ood for record in records))
        if len(records) < len(given):
            raise _failed([(p, o) for p, o in zip(paths, outcomes, strict=True) if isinstance(o, Exception)])
        return records

    async def of_row(row: BaseModel) -> bytes:
        given = [row.model_dump(by_alias=True)]
        (record,) = await predictions(given, [[]])
        return _json(shape.answer.model_construct(**dict(record), notes=served.notes(given)))

    async def of_rows(body: BaseModel) -> bytes:
        given = [row.model_dump(by_alias=True) for row in body.rows]  # type: ignore[attr-defined]
        records = await predictions(given, [["rows", number] for number in range(len(given))])
        # of many rows they take a while, for which single ones do not wait
        notes = await asyncio.to_thread(served.notes, given)
        return _json(shape.predictions.model_construct(predictions=records, notes=notes))

    options: dict[str, Any] = {"responses": errors, "dependencies": needs_token}

    @app.post("/predict", response_model=shape.answer, summary="Predict for one row", **options)
    async def predict(row: shape.row) -> Response:  # type: ignore[name-defined]
        """Takes an object with a value for every column, null where it is not known; other fields are ignored."""
        return Response(await of_row(row), media_type="application/json")

    @app.post("/predict/batch", response_model=shape.predictions, summary="Predict for several rows", **options)
    async def predict_batch(body: shape.rows) -> Response:  # type: ignore[name-defined]
        """Takes rows as /predict does; gives one prediction for each, in their order, and notes on all of them."""
        return Response(await of_rows(body), media_type="application/json")

    return {"/predict": direct(shape.row, of_row), "/predict/batch": direct(shape.rows, of_rows)}


def _add_pages(
    app: FastAPI, served: Served, limits: Limits, metrics: Metrics, traffic: Traffic, needs_token: Sequence[Any]
) -> None:
    started = time.monotonic()
    names = {"docs": "/docs", "openapi": "/openapi.json", "health": "/health", "ready": "/ready", "metrics": "/metrics"}
    secret = documented(401) if needs_token else {}
    text: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format."}
    }

    @app.get("/", summary="Where to go from here", responses=secret, dependencies=needs_token)
    async def index() -> Pointers:
        return Pointers(model=served.name, **names)

    @app.get("/ready", summary="Whether a request for predictions would be taken now", responses=documented(503))
    async def ready() -> Ready:
        if traffic.is_ending or traffic.inside >= limits.waiting:
            why = "The service is about to end." if traffic.is_ending else "As many requests are waiting as may."
            raise Refused(503, "not_ready", why, headers={"Retry-After": "1"})
        return Ready(ready=True)

    @app.get("/health", summary="That the service runs, and what it serves")
    async def health() -> Health:
        uptime = time.monotonic() - started
        return Health(ready=True, model=served.name, task=served.task, version=__version__, uptime_seconds=uptime)

    @app.get(
        "/metrics",
        name="metrics",
        summary="Numbers for Prometheus",
        response_class=Response,
        responses=text | secret,
        dependencies=needs_token,
    )
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
    """Whether the model refuses a row; others are about its record, or the model's own file."""
    return isinstance(error, ValueError) and not isinstance(error, ValidationError | BlockDamaged)


def _json(answer: BaseModel) -> bytes:
    """Written by pydantic, which has null for numbers that JSON cannot hold."""
    return answer.model_dump_json(by_alias=True).encode()
