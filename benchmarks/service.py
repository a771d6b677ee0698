"""Single-row requests to `dapcal serve`: an ensemble of five 20-64-64-3 networks of `dapcal fit`, 8,000 training rows.

Open loop: requests are sent at fixed times whatever happens, and latency counts from those times, so that a service
that stalls cannot hide it. Closed loop: every connection sends its next request when it has its answer: the most there
is. CPU time of the service stands beside, since it depends little on what else the machine does.

Run: python benchmarks/service.py [--seconds 60] [--rate 200] [--connections 32]
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

DAPCAL = [sys.executable, "-m", "dapcal"]
ROWS = 10_000  # a fifth of them is held out
NAMES = [f"x{number}" for number in range(20)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of either loop")
    parser.add_argument("--rate", type=float, default=200, help="requests per second of the open loop")
    parser.add_argument("--connections", type=int, default=32, help="of the closed loop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [*DAPCAL, "serve", fitted(Path(folder)), "--port", "0", "--json"]
        load_service(command, options)


def load_service(command: list[str], options: argparse.Namespace) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        address = urlsplit(json.loads(server.stdout.readline())["address"])
        client = Client(address.hostname, address.port)
        try:
            asyncio.run(client.closed_loop(2, 4))  # warm
            loops = {
                f"open loop at {options.rate:g}/s": client.open_loop(options.seconds, options.rate),
                f"closed loop of {options.connections}": client.closed_loop(options.seconds, options.connections),
            }
            for name, loop in loops.items():
                load, used = os.getloadavg()[0], cpu_seconds(server.pid)
                result = asyncio.run(loop)
                each = 1000 * (cpu_seconds(server.pid) - used) / len(result.latencies)
                print(f"{name}: {result.summary()}")
                print(
                    f"  {each:.2f} ms of CPU a request; load average {load:.2f} -> {os.getloadavg()[0]:.2f}", flush=True
                )
        finally:
            server.terminate()
        print(f"the service ended with exit code {server.wait()}")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fitted(folder: Path, *options: str) -> str:
    """A model of a table, as its users make it; the name of its file begins with the options."""
    draws = random.Random(0)
    with (folder / "train.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*NAMES, "class"])
        for _ in range(ROWS):
            row = [draws.gauss(0, 1) for _ in NAMES]
            table.writerow([*row, "abc"[max(range(3), key=lambda label: sum(row[label::3]))]])
    model = str(folder / ("".join(options) + "model.dap"))
    arguments = ["fit", str(folder / "train.csv"), "--target", "class", "--epochs", "5", "-o", model, "--quiet"]
    subprocess.run([*DAPCAL, *arguments, *options], check=True)
    return model


class Client:
    """Sends rows over connections that are kept alive, and notes status and latency of every answer."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        draws = random.Random(0)
        self.requests = [self._request([draws.gauss(0, 1) for _ in NAMES]) for _ in range(500)]

    async def open_loop(self, seconds: float, rate: float) -> Result:
        """Requests at fixed times, over as many connections as that takes."""
        result, idle, tasks = Result(), [], []

        async def one(number: int, due: float) -> None:
            while idle and idle[-1].transport.is_closing():  # by the service, having been idle for long
                idle.pop()
            connection = idle.pop() if idle else await self._connect()
            await connection.ask(self.requests[number % len(self.requests)], due, result)
            idle.append(connection)

        start = time.perf_counter()
        for number in range(round(seconds * rate)):
            due = start + number / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(number, due)))
        await asyncio.gather(*tasks)
        result.seconds = time.perf_counter() - start
        for connection in idle:
            connection.transport.close()
        return result

    async def closed_loop(self, seconds: float, connections: int) -> Result:
        """Every connection sends one request after the other."""
        result = Result()
        start = time.perf_counter()

        async def many(first: int) -> None:
            connection, number = await self._connect(), first
            while (now := time.perf_counter()) < start + seconds:
                await connection.ask(self.requests[number % len(self.requests)], now, result)
                number += connections
            connection.transport.close()

        await asyncio.gather(*(many(first) for first in range(connections)))
        result.seconds = time.perf_counter() - start
        return result

    async def _connect(self) -> Connection:
        return (await asyncio.get_running_loop().create_connection(Connection, self.host, self.port))[1]

    def _request(self, row: list[float]) -> bytes:
        body = json.dumps(dict(zip(NAMES, row, strict=True))).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One connection, one request at a time: cheaper than a library, so that the client takes little of two cores."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called once, at the start."""
        self.transport, self.received, self.answer = transport, b"", None

    def data_received(self, data: bytes) -> None:
        """Called with every piece of an answer."""
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if found and len(body) >= int(length):
            self.received = b""
            self.answer.set_result((int(head[9:12]), body))

    def connection_lost(self, _: Exception | None) -> None:
        """Called at the end; an answer that has not come then never will."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result((0, b""))

    async def ask(self, request: bytes, due: float, result: Result) -> None:
        """Send a request and note how it went."""
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        status, body = (0, b"") if self.transport.is_closing() else await self.answer
        result.latencies.append(time.perf_counter() - due)
        result.errors += status != 200 or b'"probabilities"' not in body


@dataclass
class Result:
    """What came back."""

    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    seconds: float = 0.0

    def summary(self) -> str:
        """In one line."""
        ordered = sorted(self.latencies)
        p50, p95, p99, last = (1000 * ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.95, 0.99, 1))
        return (
            f"{len(ordered)} requests in {self.seconds:.1f} s, {len(ordered) / self.seconds:.1f}/s, "
            f"{self.errors} errors; latency p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms, largest {last:.0f} ms"
        )


if __name__ == "__main__":
    main()
