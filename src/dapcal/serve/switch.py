"""One application after another behind one address: requests that are under way end in the one that they began in."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)


class Switch:
    """ASGI application that hands on to the current one, which `reload` replaces.

    Args:
        app: the first, from `create_app`.
        again: makes another; None where there is none to be made. A ValueError or OSError says why it cannot.
    """

    def __init__(self, app: FastAPI, again: Callable[[], FastAPI] | None = None) -> None:
        self.app = app
        self._again = again
        self._inside: Counter[FastAPI] = Counter()
        self._reloading: asyncio.Task[None] | None = None
        self._asked = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        app = self.app
        self._inside[app] += 1
        try:
            await app(scope, receive, send)
        finally:
            self._inside[app] -= 1
            if app is not self.app and not self._inside[app]:
                self._retire(app)

    def reload(self) -> None:
        """Have another application made, in a thread; asked once more meanwhile, one more after it."""
        self._asked = True
        if self._again is not None and (self._reloading is None or self._reloading.done()):
            self._reloading = asyncio.get_running_loop().create_task(self._reload(self._again))

    async def _reload(self, again: Callable[[], FastAPI]) -> None:
        while self._asked:
            self._asked = False
            try:
                fresh = await asyncio.to_thread(again)
            except (ValueError, OSError) as error:
                logger.error("Not reloaded, and the model of before goes on: %s", error)
            except Exception:
                logger.exception("Not reloaded, and the model of before goes on")
            else:
                old, self.app = self.app, fresh
                if not self._inside[old]:
                    self._retire(old)

    def _retire(self, app: FastAPI) -> None:
        """Nobody asks it any more: end its thread, which has nothing left to do."""
        del self._inside[app]
        app.state.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Uvicorn's word for the start and the end of the service."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._reloading is not None:
                    self._reloading.cancel()
                await asyncio.to_thread(self.app.state.close)
                await send({"type": "lifespan.shutdown.complete"})
                return
