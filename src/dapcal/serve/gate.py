"""What a request meets first: its token, its body and its time are checked, it is counted, and no traceback answers."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dapcal.serve.access import AccessLog
from dapcal.serve.direct import Direct
from dapcal.serve.errors import Refused
from dapcal.serve.metrics import Metrics
from dapcal.serve.served import Limits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Routes:
    """Paths of the service.

    Attributes:
        known: all of them; anything else is counted as "other".
        bounded: those that take a body.
        open: those that need no token.
    """

    known: frozenset[str]
    bounded: frozenset[str]
    open: frozenset[str]


@dataclass
class Traffic:
    """What is going on: requests for predictions that are under way, and whether the service is about to end."""

    inside: int = 0
    is_ending: bool = False


class Gate:
    """ASGI middleware.

    Args:
        app: what is behind the gate.
        limits: of requests for predictions.
        metrics: where answers are counted.
        routes: what there is behind it.
        traffic: counted here.
        token: that a request must carry; None where none is needed.
        access: told of every answer.
        direct: by path, what answers the body of a request that is as the schema asks (`dapcal.serve.direct`).
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        metrics: Metrics,
        routes: Routes,
        traffic: Traffic,
        token: str | None = None,
        access: AccessLog | None = None,
        direct: Mapping[str, Direct] | None = None,
    ) -> None:
        self.direct = direct or {}
        self.app, self.limits, self.metrics, self.routes, self.traffic = app, limits, metrics, routes, traffic
        self.access, self._token = access, None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, sent = time.perf_counter(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._answer(scope, receive, watched)
        except _Gone:
            return
        except Exception as error:
            if not isinstance(error, Refused):
                logger.exception("A request failed")
                error = Refused(500, "internal_error", "The service failed; its log says why.")
            if not status:
                await error.response()(scope, receive, watched)
        finally:
            if status:
                route, seconds = scope["path"], time.perf_counter() - started
                self.metrics.request(route if route in self.routes.known else "other", status, seconds)
                if self.access is not None:
                    client = (scope.get("client") or ("",))[0]
                    self.access(client, scope["method"], route, status, seconds, sent)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        _check_length(headers)
        if scope["path"] not in self.routes.open:
            self._check_token(headers)
        if scope["path"] not in self.routes.bounded or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        _check_media_type(headers.get("content-type", ""))
        if self.traffic.inside >= self.limits.waiting:
            message = f"{self.traffic.inside} requests are waiting, and no more may; try again later."
            raise Refused(503, "overloaded", message, headers={"Retry-After": "1"})
        self.traffic.inside += 1
        body: bytes | None = None
        try:
            async with asyncio.timeout(self.limits.seconds):
                async with asyncio.timeout(self.limits.body_seconds):
                    body = await self._body(headers, receive)
                answer = await self.direct[scope["path"]](body) if scope["path"] in self.direct else None
                if answer is None:
                    await self.app(scope, _once(body, receive), send)
                else:
                    await Response(answer, media_type="application/json")(scope, receive, send)
        except TimeoutError as error:
            raise self._late(has_body=body is not None) from error
        finally:
            self.traffic.inside -= 1

    def _check_token(self, headers: Headers) -> None:
        if self._token is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # in a time that does not tell how much of it is right
        if not hmac.compare_digest(given.strip().encode(), self._token) or scheme.lower() != "bearer":
            message = "Expected the header Authorization: Bearer with the service's token."
            raise Refused(401, "token_needed", message, headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body; what arrives is counted, since the length a client declares need not be true or there."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.limits.body_bytes:
            raise self._too_large()
        pieces, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.limits.body_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(pieces)

    def _too_large(self) -> Refused:
        return Refused(413, "body_too_large", f"The body is larger than {self.limits.body_bytes} bytes; send less.")

    def _late(self, has_body: bool) -> Refused:
        if not has_body:
            message = f"The body has not arrived within {min(self.limits.seconds, self.limits.body_seconds):g} s."
            return Refused(408, "body_too_slow", message, headers={"Connection": "close"})  # its end may never come
        message = f"There was no prediction within {self.limits.seconds:g} s; try again later, or with fewer rows."
        return Refused(503, "timeout", message, headers={"Retry-After": "1"})


class _Gone(Exception):
    """The client has hung up."""


def _check_length(headers: Headers) -> None:
    """Two statements of where a body ends: a proxy before us may believe the other one (request smuggling)."""
    if "transfer-encoding" in headers and "content-length" in headers:
        message = "Expected Content-Length or Transfer-Encoding, got both; send one of them."
        raise Refused(400, "length_ambiguous", message, headers={"Connection": "close"})


def _check_media_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise Refused(415, "media_type_unsupported", "Expected a body with Content-Type: application/json.")


def _once(body: bytes, receive: Receive) -> Receive:
    """A receiver that gives a body that has been read already, then what else there is."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(messages, None) or await receive()

    return again
