"""Several processes at one address: all answer, one count, one that dies is replaced, signals reach all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dapcal.serve import Work, run_several
from served_cases import Toy

GONE = (urllib.error.URLError, ConnectionError)


def serve(file: str) -> None:
    run_several(Work(Toy(Path(file))), 2, port=0, started=lambda address: print(address, flush=True))


@contextmanager
def started(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own with two more: its end must reach them."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"if __name__ == '__main__':\n from test_serve_workers import serve; serve({str(file)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], text=True, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE
    ) as first:
        try:
            yield first
        finally:
            first.kill()


def answer(url: str, body: dict[str, Any] | None = None) -> Any:
    """Over a connection of its own."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as found:
        text = found.read().decode()
    return json.loads(text) if text.startswith("{") else text


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_answer_at_one_address_until_the_first_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "name"
    file.write_text("first")
    found: list[int] = []
    names: list[str] = []
    with started(file) as first:
        assert first.stdout is not None
        url = first.stdout.readline().strip()

        def processes() -> set[int]:
            found.append(int(answer(f"{url}/predict", {"x": 1.0})["prediction"]))
            return set(found[-100:])

        until(lambda: len(processes()) == 2)
        assert f"dapcal_rows_predicted_total {len(found)}.0" in answer(f"{url}/metrics")  # by both of them
        file.write_text("second")
        first.send_signal(signal.SIGHUP)

        def is_second() -> bool:
            names.append(answer(f"{url}/health")["model"])
            return len(names) > 30 and set(names[-30:]) == {"second"}

        until(is_second)
        killed = found[-1]
        os.kill(killed, signal.SIGKILL)

        def is_replaced() -> bool:
            try:
                return len(processes() - {killed}) == 2
            except GONE:  # it was at work on this one
                return False

        until(is_replaced)
        first.kill()

        def is_gone() -> bool:
            try:
                answer(f"{url}/health")
            except GONE:
                return True
            return False

        until(is_gone)


def test_a_signal_ends_the_processes_and_then_the_first(tmp_path: Path) -> None:
    (tmp_path / "name").write_text("toy")
    asked: list[str] = []

    def end(address: str) -> None:
        asked.append(address)
        assert answer(f"{address}/health")["model"] == "toy"
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    run_several(Work(Toy(tmp_path / "name")), 1, port=0, started=end)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(urllib.error.URLError):
        answer(f"{asked[0]}/health")


def test_a_process_that_cannot_begin_ends_the_service(tmp_path: Path) -> None:
    (tmp_path / "name").write_text("")
    with pytest.raises(RuntimeError, match="before it was ready"):
        run_several(Work(Toy(tmp_path / "name")), 1, port=0)


def test_there_is_one_process_at_least() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_several(Work(Toy(Path())), 0)
