"""What a request meets first: it is counted, its body and time are bounded, and no traceback answers it."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dapcal.serve.errors import Refused
from dapcal.serve.metrics import Metrics
from dapcal.serve.served import Limits

logger = logging.getLogger(__name__)


class Gate:
    """ASGI middleware.

    Args:
        app: what is behind the gate.
        limits: of requests for predictions.
        metrics: where answers are counted.
        routes: all paths; anything else is counted as "other".
        bounded: the paths that take a body.
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, metrics: Metrics, routes: frozenset[str], bounded: frozenset[str]
    ) -> None:
        self.app, self.limits, self.metrics, self.routes, self.bounded = app, limits, metrics, routes, bounded
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
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
                route = scope["path"] if scope["path"] in self.routes else "other"
                self.metrics.request(route, status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self.bounded or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        _check_media_type(headers.get("content-type", ""))
        if self._inside >= self.limits.waiting:
            message = f"{self._inside} requests are waiting, and no more may; try again later."
            raise Refused(503, "overloaded", message, headers={"Retry-After": "1"})
        self._inside += 1
        body: bytes | None = None
        try:
            async with asyncio.timeout(self.limits.seconds):
                body = await self._body(headers, receive)
                await self.app(scope, _once(body, receive), send)
        except TimeoutError as error:
            raise self._late(has_body=body is not None) from error
        finally:
            self._inside -= 1

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
        seconds = f"{self.limits.seconds:g} s"
        if not has_body:
            headers = {"Connection": "close"}  # its end may never come
            return Refused(408, "body_too_slow", f"The body has not arrived within {seconds}.", headers=headers)
        message = f"There was no prediction within {seconds}; try again later, or with fewer rows."
        return Refused(503, "timeout", message, headers={"Retry-After": "1"})


class _Gone(Exception):
    """The client has hung up."""


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
