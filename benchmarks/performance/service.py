"""`dapcal serve` beside FastAPI with the bare networks: single rows and batches."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from service import DAPCAL, Client, Result, fitted

from dapcal.experiments.performance import AS_FAST, Limit, Row
from performance.apart import resident

__all__ = ["rows"]

RATE, CONNECTIONS, BATCH, BATCHES = 200, 64, 1000, 4
PEER = "FastAPI with five bare networks"
NOTE = "the peer answers with probabilities alone: without distances, p-values, or checks of what a row holds"


def rows(repeats: int, small: bool) -> list[Row]:
    seconds = 1.0 if small else 3.0
    with tempfile.TemporaryDirectory() as folder:
        ours = [*DAPCAL, "serve", fitted(Path(folder)), "--port", "0", "--json"]
        bare = [sys.executable, "-m", "performance.bare_service"]
        with served(ours) as own, served(bare) as other:
            found = [[measured(client, seconds) for client in (own, other)] for _ in range(repeats)]
    limits = (Limit(4.0, "ours"), *(Limit(least, "ours", least=True) for least in (1500.0, 50_000.0)), AS_FAST)
    names = {
        f"single rows at {RATE}/s: median latency": "ms",
        f"single rows, {CONNECTIONS} connections that wait for each answer": "requests/s",
        f"batches of {BATCH:,} rows": "rows/s",
        "memory of the process at its peak, libraries and all": "MiB",
    }
    return [
        Row(name, unit, [one[place] for one, _ in found], PEER, [two[place] for _, two in found], limits[place], NOTE)
        for place, (name, unit) in enumerate(names.items())
    ]


def measured(client: Clients, seconds: float) -> tuple[float, float, float, float]:
    """Median latency in ms, requests a second, rows a second; MiB of the process at most so far."""
    spaced = checked(asyncio.run(client.single.open_loop(seconds, RATE)))
    dense = checked(asyncio.run(client.single.closed_loop(seconds, CONNECTIONS)))
    large = checked(asyncio.run(client.batches.closed_loop(seconds, BATCHES)))
    return (
        1000 * statistics.median(spaced.latencies),
        len(dense.latencies) / dense.seconds,
        BATCH * len(large.latencies) / large.seconds,
        resident("VmHWM", client.process),
    )


def checked(result: Result) -> Result:
    if result.errors:
        raise RuntimeError(f"Expected an answer to every request, got {result.errors} errors; look at the service")
    return result


class Clients:
    """Of one service: single rows, and batches of them."""

    def __init__(self, host: str, port: int, process: int) -> None:
        self.process = process
        self.single, self.batches = Client(host, port), Batches(host, port)


class Batches(Client):
    """Sends many rows in every request."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        bodies = [request.partition(b"\r\n\r\n")[2].decode() for request in self.requests]
        filled = [bodies[number % len(bodies)] for number in range(BATCH)]
        body = f'{{"rows": [{", ".join(filled)}]}}'.encode()
        head = f"POST /predict/batch HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.requests = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body]


@contextmanager
def served(command: list[str]) -> Iterator[Clients]:
    """A service in a process of its own, warm."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = urlsplit(json.loads(server.stdout.readline())["address"])
            clients = Clients(address.hostname, address.port, server.pid)
            measured(clients, 0.5)
            yield clients
        finally:
            server.terminate()
