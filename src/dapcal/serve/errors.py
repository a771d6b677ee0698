"""Errors of the service: one shape for all, {"error": {"code", "message", "fields"}}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

SEARCHED = 100  # fields of a row, for one that was misspelt
SHOWN = 20  # a batch of a thousand empty rows has a problem in every column of each

Code = Literal[
    "body_invalid",
    "body_not_json",
    "body_too_large",
    "body_too_slow",
    "head_too_slow",
    "internal_error",
    "length_ambiguous",
    "media_type_unsupported",
    "method_not_allowed",
    "not_found",
    "not_http",
    "not_ready",
    "overloaded",
    "prediction_failed",
    "refused",
    "row_refused",
    "timeout",
    "token_needed",
]

STATUSES: dict[int, str] = {
    400: "The body is not JSON, or its length is declared twice.",
    401: "The header Authorization: Bearer with the service's token is missing or wrong.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    422: "The body is JSON, but not what the schema asks for, or the model refuses a row.",
    500: "The model could not predict, or the service failed; the service's log says why.",
    503: "Too many requests are waiting, or this one has waited too long.",
}


class FieldProblem(BaseModel):
    """What is wrong with one part of the body."""

    path: list[str | int]
    message: str


class Problem(BaseModel):
    """What went wrong: a code for programs, a sentence for people, and where in the body."""

    code: Code
    message: str
    fields: list[FieldProblem]


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: Problem


class Refused(Exception):
    """A request ends with this error."""

    def __init__(
        self,
        status: int,
        code: Code,
        message: str,
        fields: Sequence[FieldProblem] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.problem = Problem(code=code, message=message, fields=list(fields))
        self.headers = headers

    def response(self) -> Response:
        """The answer. ASCII, since what a client sent need not be text that UTF-8 can hold."""
        content = json.dumps({"error": self.problem.model_dump()})
        return Response(content, self.status, self.headers, media_type="application/json")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's part about errors with these statuses."""
    responses: dict[int | str, dict[str, Any]] = {s: {"model": ErrorBody, "description": STATUSES[s]} for s in statuses}
    if 503 in responses:
        seconds = {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}}
        responses[503]["headers"] = {"Retry-After": seconds}
    if 401 in responses:
        responses[401]["headers"] = {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}}
    return responses


def handle_errors(app: FastAPI) -> None:
    """Have everything that FastAPI refuses by itself answered in our shape."""

    async def answer(_: Request, error: Exception) -> Response:
        return _refused(error).response()

    for kind in (Refused, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 400:  # what the JSON parser gives up on: bytes that are not text, nesting without end
        return Refused(400, "body_not_json", "The body is not JSON.")
    codes: dict[int, Code] = {404: "not_found", 405: "method_not_allowed"}
    message = f"{HTTPStatus(error.status_code).phrase}; /docs says what there is."
    return Refused(error.status_code, codes.get(error.status_code, "refused"), message, headers=_headers(error))


def _headers(error: HTTPException) -> dict[str, str] | None:
    return None if error.headers is None else dict(error.headers)


def _invalid(problems: Sequence[Any]) -> Refused:
    if problems and problems[0]["type"] == "json_invalid":
        position = problems[0]["loc"][-1]
        return Refused(400, "body_not_json", f"The body is not JSON: {problems[0]['ctx']['error']} at {position}.")
    fields = [FieldProblem(path=list(p["loc"][1:]), message=p["msg"] + _near(p)) for p in problems[:SHOWN]]
    more = f", the first {SHOWN} of which are listed" if len(problems) > SHOWN else ""
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    return Refused(422, "body_invalid", f"The body has {count}{more}; /openapi.json has the schema.", fields)


def _near(problem: Any) -> str:
    """For a field that is missing, the one that may be it, misspelt."""
    row = problem.get("input")
    if problem["type"] != "missing" or not isinstance(row, dict):
        return ""
    near = get_close_matches(str(problem["loc"][-1]), list(row)[:SEARCHED], 1)
    return f"; is `{near[0]}` meant for it?" if near else ""
