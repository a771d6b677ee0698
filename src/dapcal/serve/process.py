"""A process that serves until it is told to stop, and takes up a new model when it is told to."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dapcal.serve.access import AccessLog
from dapcal.serve.served import Limits, Served
from dapcal.serve.server import QUEUE, Security, Server


def run(
    served: Served,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    started: Callable[[str], None] | None = None,
    *,
    security: Security | None = None,
    access: AccessLog | None = None,
    again: Callable[[], Served] | None = None,
    is_stale: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until SIGTERM, after which it returns, or Ctrl-C, after which it raises KeyboardInterrupt.

    Requests that are under way are finished first. Set torch to one thread before: the event loop wants a core too.

    Args:
        served: the model.
        host: the address to listen at; "0.0.0.0" lets other machines in.
        port: 0 takes one that is free.
        limits: what is refused; by default `Limits()`.
        started: called with the service's address as soon as it listens.
        security: token and TLS.
        access: told of every answer; reopened on SIGHUP.
        again: gives the model to go on with, on SIGHUP; called in a thread. A ValueError or OSError of it leaves all
            as it is.
        is_stale: whether a SIGHUP has come before this could hear it, while the model was loaded.
    """
    security = security or Security()
    server = Server(served, limits or Limits(), security, access, again)
    with listening(host, port) as listener, signals(server):
        if is_stale():
            server.reload()
        if started is not None:
            started(address(host, listener, security))
        server.run(sockets=[listener])


def address(host: str, listener: socket.socket, security: Security) -> str:
    """Where a service is found."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if security.cert is None else 'https'}://{shown}:{listener.getsockname()[1]}"


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=QUEUE)
    except (OSError, OverflowError) as error:
        raise OSError(
            f"Cannot listen at {host}, port {port} ({error}); choose another with `host` and `port`"
        ) from error
    # connections inherit it: an answer's head and body are two writes, and without it the second waits until the client
    # acknowledges the first, which it delays by 40 ms (asyncio sets it only where a socket was made for TCP by name)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextmanager
def signals(server: Server) -> Iterator[None]:
    """Have SIGHUP reload, and SIGTERM end the server alone: uvicorn raises it once more, which would kill us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        server.should_exit = True

    handlers = {signal.SIGTERM: stop, signal.SIGHUP: server.reload}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
