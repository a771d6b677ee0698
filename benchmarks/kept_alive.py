"""Requests one after another on a kept-alive connection, with TCP_NODELAY on the service's listener and without it.

Without it the body of an answer waits for the client's delayed acknowledgement of its head.

Run: python benchmarks/kept_alive.py [--requests 100]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from json import dumps, loads
from pathlib import Path
from urllib.parse import urlsplit

from service import NAMES, fitted

SERVE = "from dapcal.cli import main; main()"
WITHOUT = """
import socket
honest = socket.socket.setsockopt
socket.socket.setsockopt = lambda own, *rest: None if rest[1] == socket.TCP_NODELAY else honest(own, *rest)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as folder:
        model = fitted(Path(folder))
        medians = {name: median(code, model, count) for name, code in (("without", WITHOUT + SERVE), ("with", SERVE))}
    for name, seconds in medians.items():
        print(f"{name:>8} TCP_NODELAY: median of {count} requests {1000 * seconds:.1f} ms")
    print(f"ratio {medians['with'] / medians['without']:.2f}")


def median(code: str, model: str, count: int) -> float:
    command = [sys.executable, "-c", code, "serve", model, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            address = urlsplit(loads(server.stdout.readline())["address"])
            connection = HTTPConnection(address.hostname, address.port)
            ask(connection)  # warm
            return statistics.median(ask(connection) for _ in range(count))
        finally:
            server.terminate()


def ask(connection: HTTPConnection) -> float:
    """Seconds from the request to the last byte of its answer."""
    start = time.perf_counter()
    body = dumps(dict.fromkeys(NAMES, 0.5))
    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, text
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
