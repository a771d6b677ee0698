"""uvicorn's server with what it lacks: bounded connections, a calm way out of files, a new model while it runs."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from dapcal.serve.access import AccessLog
from dapcal.serve.app import create_app
from dapcal.serve.connection import FAREWELLS, bounded
from dapcal.serve.metrics import Metrics
from dapcal.serve.served import Limits, Served
from dapcal.serve.switch import Switch

logger = logging.getLogger(__name__)

QUEUE = 2048  # connections that the system holds until they are accepted
SPARE = 16 + FAREWELLS  # files beside connections: the access log, an artefact that is loaded again
_SILENCE = 60.0  # seconds between two complaints


@dataclass(frozen=True)
class Security:
    """Who may ask, and what lies on the wire; by default anybody who reaches the address, and plain HTTP.

    Args:
        token: that every request must carry as `Authorization: Bearer`, but for /health and /ready.
        cert: a file with the certificate chain, for TLS.
        key: a file with its private key; None where `cert` holds it too.
    """

    token: str | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.cert is None:
            raise ValueError("Expected a certificate with its private key, got the key alone; give both")


class Server(uvicorn.Server):
    """uvicorn's server with bounded connections; arguments as of `run`."""

    def __init__(
        self,
        served: Served,
        limits: Limits,
        security: Security | None = None,
        access: AccessLog | None = None,
        again: Callable[[], Served] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        security, metrics = security or Security(), metrics or Metrics()
        self._limits = limits = replace(limits, connections=_within_reach(limits.connections))
        self._access = access
        self._complained = -_SILENCE
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stale = False

        def app(what: Served) -> Any:
            return create_app(what, limits, token=security.token, access=access, metrics=metrics)

        def refused(status: int, client: str) -> None:
            metrics.request("other", status, 0.0)
            if access is not None:
                access(client, "", "", status, 0.0, 0)

        self._switch = Switch(app(served), None if again is None else lambda: app(again()))
        config = uvicorn.Config(
            self._switch,
            loop="asyncio",  # others accept connections by other rules
            http=bounded(limits, refused),
            ws="none",
            lifespan="on",
            log_config=None,  # the logging of the process stays as it is
            log_level="error",  # what clients do wrong is in the access log
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(limits.idle_seconds),
            timeout_graceful_shutdown=math.ceil(limits.seconds),
            ssl_certfile=security.cert,
            ssl_keyfile=security.key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"Expected a certificate and its private key in PEM format, got {security.cert} and {security.key} "
                f"({error})"
            ) from error
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen: asyncio accepts one connection at a time, and where no file can be opened it waits for a second."""
        await super().startup(sockets=[])
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        for listener in sockets or ():
            server = await loop.create_server(
                lambda: self.config.http_protocol_class(  # type: ignore[call-arg]
                    config=self.config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                sock=listener,
                ssl=self.config.ssl,
                backlog=1,  # it is also how often asyncio tries in vain, with a traceback each
                ssl_handshake_timeout=None if self.config.ssl is None else self._limits.head_seconds,
            )
            listener.listen(QUEUE)
            self.servers.append(server)
        if self._is_stale:
            self._reload()

    def reload(self, *_: object) -> None:
        """Go on with another model, and with the access log under its name; for a signal, at any time."""
        if self._loop is None:
            self._is_stale = True
        else:
            self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        if self._access is not None:
            try:
                self._access.reopen()
            except OSError as error:
                logger.error("The access log goes on in the file of before: %s", error)
        self._switch.reload()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, after the requests that are under way."""
        self._switch.app.state.traffic.is_ending = True
        await super().shutdown(sockets)
        self._loop = None

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket.accept()" not in context["message"]:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._complained >= _SILENCE:
            self._complained = time.monotonic()
            logger.error(
                "No connection can be accepted now (%s); they wait. Allow more files: ulimit -n", context["exception"]
            )


def _within_reach(connections: int) -> int:
    """As many connections as the process may open files for."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return connections
    folder = Path("/proc/self/fd")
    taken = len(list(folder.iterdir())) if folder.is_dir() else 64
    left = most - taken - SPARE
    if left < 1:
        raise OSError(f"The process may open {most} files, too few for a service; allow more: ulimit -n 1024")
    return min(connections, left)
