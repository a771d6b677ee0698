"""One connection: what a client may take its time for, and what it hears where there are too many of them.

uvicorn reads and writes HTTP; what it leaves open to a client that is slow, silent or one of thousands is bounded here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, Literal, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dapcal.serve.errors import Code, Refused
from dapcal.serve.served import Limits

Phase = Literal["head", "answer", "rest", "idle", "closing"]

FAREWELL = 1.0  # seconds to read why a connection is refused
FAREWELLS = 16  # connections that have so long, at a time


def bounded(limits: Limits, refused: Callable[[int, str], None]) -> type[H11Protocol]:
    """The class of connections of one service.

    Args:
        limits: for their heads, answers and idle times, and for their number.
        refused: told the status and the client's address where a connection is answered before it is a request.
    """

    class Bounded(Connection):
        bounds = limits
        leaving: ClassVar[set[Connection]] = set()

        def tell(self, status: int) -> None:
            refused(status, self.client[0] if self.client else "")

    return Bounded


class Connection(H11Protocol):
    """Reads and answers the requests of one client, one after the other."""

    bounds: ClassVar[Limits]
    leaving: ClassVar[set[Connection]]  # those that were refused, and may still read why

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._phase: tuple[Phase, object] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._has_spoken = False

    def tell(self, status: int) -> None:
        """Count an answer that no request has led to."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Have it wait for a head, unless there are too many."""
        super().connection_made(cast(asyncio.Transport, _Joining(transport, self.loop)))
        if len(self.connections) - len(self.leaving) > self.bounds.connections:
            message = f"{self.bounds.connections} connections are open, and no more may be; try again later."
            self._refuse(503, "overloaded", message, {"Retry-After": "1"})
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Read on, within the time that there is for what is read."""
        if self._is_refused:
            return
        self._has_spoken = True
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def shutdown(self) -> None:
        """Finish what is under way, or close at once."""
        if not self._is_refused:
            super().shutdown()
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self.leaving.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn forgets it after an error

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """What is not HTTP; in the midst of an answer there is no way to say so."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._refuse(400, "not_http", "What was sent is not HTTP, or its head is too large.")

    def _watch(self) -> None:
        """Set the time that is left whenever another phase begins; what arrives within one gives it no more."""
        phase = self._current()
        if phase == self._phase:
            return
        self._phase = phase
        seconds = {
            "head": self.bounds.head_seconds,
            "answer": self.bounds.seconds + self.bounds.head_seconds,  # the gate gives up before, unless nobody reads
            "rest": self.bounds.head_seconds,
            "idle": self.bounds.idle_seconds,
            "closing": self.bounds.seconds,
        }[phase[0]]
        self._set(seconds, self._expired)

    def _current(self) -> tuple[Phase, object]:
        """What the client or we are at, with the request that it is about."""
        if self.transport.is_closing():
            return "closing", None
        if self.cycle is not None and not self.cycle.response_complete:
            return "answer", self.cycle
        if self.cycle is None or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            return "head", self.cycle
        return ("idle" if self.conn.their_state is h11.IDLE else "rest"), self.cycle

    def _expired(self) -> None:
        phase = self._phase[0] if self._phase else "closing"
        if phase in ("answer", "closing"):  # the client does not take what is written
            self.transport.abort()
        elif phase == "head" and self._has_spoken:
            message = f"The head of the request has not arrived within {self.bounds.head_seconds:g} s."
            self._refuse(408, "head_too_slow", message)
        else:
            self.transport.close()
            self._watch()

    def _refuse(self, status: int, code: Code, message: str, headers: dict[str, str] | None = None) -> None:
        """Answer and hang up. What is unread when a socket closes costs the client the answer, so it is read first."""
        self._is_refused = True
        self.tell(status)
        if self.cycle is not None:  # a body that went wrong: whoever waits for the rest of it need not
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps({"error": Refused(status, code, message).problem.model_dump()}).encode()
        lines = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(headers or {})}.items())
        self.transport.write(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{head}\r\n".encode() + body)
        if len(self.leaving) < FAREWELLS and self.transport.can_write_eof():
            self.leaving.add(self)
            self.transport.write_eof()
            self._set(FAREWELL, self.transport.abort)
        else:
            self.transport.close()
            self._watch()

    def _set(self, seconds: float, then: Callable[[], None]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, then)


class _Joining:
    """A transport that sends the head of an answer together with its body: what is written is held for one more write.

    Nothing is held beyond the turn of the loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold the first, send the second with it."""
        if self._held:
            self._held += data
            self._send()
        elif data:
            self._held = data
            self._loop.call_soon(self._send)

    def write_eof(self) -> None:
        """Nothing more comes."""
        self._send()
        self._transport.write_eof()

    def close(self) -> None:
        """After what was written."""
        self._send()
        self._transport.close()

    def abort(self) -> None:
        """Whatever was written."""
        self._held = b""
        self._transport.abort()

    def _send(self) -> None:
        held, self._held = self._held, b""
        if held:
            self._transport.write(held)
