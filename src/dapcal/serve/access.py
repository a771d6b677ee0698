"""The access log: one line of JSON for every answer."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)

LONGEST = 200  # characters of a path
_SILENCE = 60.0  # seconds between two complaints


class AccessLog:
    """Appends to a file, or writes to standard error; `reopen` after a rotation.

    A line is one write, so that those of several processes never mix. One that cannot be written is lost, and the
    service goes on.

    Args:
        path: None is standard error.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file = self._opened()
        self._complained = -_SILENCE

    def __call__(self, client: str, method: str, path: str, status: int, seconds: float, sent: int) -> None:
        """Write one line; `sent` counts the bytes of the answer's body."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": client,
            "method": method,
            "path": path[:LONGEST],
            "status": status,
            "seconds": round(seconds, 6),
            "bytes": sent,
        }
        with self._lock:
            try:
                os.write(self._file, json.dumps(line).encode() + b"\n")
            except OSError as error:
                self._complain(error)

    def reopen(self) -> None:
        """Open the path again: a file that was moved away is left as it is."""
        if self._path is None:
            return
        fresh = self._opened()
        with self._lock:
            old, self._file = self._file, fresh
        os.close(old)

    def close(self) -> None:
        """Close the file."""
        if self._path is not None:
            os.close(self._file)

    def _opened(self) -> int:
        if self._path is None:
            return sys.stderr.fileno()
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _complain(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._complained >= _SILENCE:
            self._complained = now
            logger.error("Lines of the access log are lost: %s", error)
