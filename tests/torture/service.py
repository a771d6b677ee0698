"""The service under load, floods and signals: known answers, slow clients, too many of them, no files left."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from dapcal.models.table import TableModel
from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe
from torture.questions import Line, Question, Questions
from torture.tally import Tally

CONNECTIONS = 8
GROWTH = 0.05  # of memory, at most
WARM = 1000  # requests before memory is first looked at
FLOOD = 2000
FILES = FLOOD + 200  # that this process opens at a time, at most
ENOUGH = 2000  # requests after which memory is compared, and a service without files is tried


def run(requests: int, seed: int) -> Tally:
    """Ask about so many mixed requests, and do the rest once; gives how many things were tried, and what failed."""
    tally = Tally("service")
    with tempfile.TemporaryDirectory() as name, many_files():
        folder = Path(name)
        models = [fitted(number) for number in (0, 1)]
        for number, model in enumerate(models):
            model.save(folder / f"{number}.dap")
        questions = Questions(models, seed)
        with serving(folder, tally) as service:
            clients = slow(service)
            asyncio.run(reloads(service, questions, max(requests // 10, 100), tally))
            mixed(service, questions, requests, tally)
            schemathesis(service, min(max(requests // 250, 5), 200), seed, tally)
            given_up(clients, tally)
            flood(service, tally)
            asyncio.run(ended(service, questions, max(requests // 50, 100), tally))
        if requests >= ENOUGH:
            with serving(folder, tally, files=128) as service:
                out_of_files(service, tally)
    return tally


class Service:
    """A process of `dapcal serve`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])  # type: ignore[union-attr]

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu(self) -> float:
        """Seconds of processor time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self, timeout: float = 30) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def is_well(self) -> bool:
        """Whether a newcomer is answered."""
        try:
            with self.connect() as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                return b" 200 " in client.recv(1000)
        except OSError:
            return False


@contextmanager
def many_files() -> Iterator[None]:
    """As many open files as a flood takes, or the system allows; also for a service that is begun meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(FILES, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fitted(number: int) -> TableModel:
    """Two models of the same columns that predict differently."""
    draws = np.random.default_rng(number)
    area, rooms = draws.normal(80, 20, 240), draws.integers(1, 6, 240).astype(float)
    city = draws.choice(["Rome", "Oslo"], 240)
    price = (3 + 4 * number) * area + 10 * rooms + 40 * (city == "Rome")
    table = pa.table({"area": area, "rooms": rooms, "city": city, "price": price})
    return fit(table, "price", recipe=Recipe(hidden=(8,), epochs=4, members=2, fast=True))


@contextmanager
def serving(folder: Path, tally: Tally, files: int | None = None) -> Iterator[Service]:
    """A service of the first model, which must end well and without a traceback."""
    current = folder / "current.dap"
    current.write_bytes((folder / "0.dap").read_bytes())
    command = [sys.executable, "-m", "dapcal", "serve", str(current), "--port", "0", "--json"]
    limit = None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=limit)
        try:
            yield Service(process, folder)
        finally:
            process.terminate()
            try:
                code = process.wait(timeout=60)  # 143: where it was told twice
                tally.check(code in (0, 143), f"ended with exit code {code}")
            except subprocess.TimeoutExpired:
                process.kill()
                tally.check(False, "did not end within a minute")
            process.stdout.close()  # type: ignore[union-attr]
    said = (folder / "errors").read_text()
    tally.check("Traceback" not in said, f"a traceback: {said[-300:]}")
    tally.check(len(said) < 10_000, f"{len(said)} bytes of errors")


def mixed(service: Service, questions: Questions, requests: int, tally: Tally) -> None:
    """Requests over several connections, each with the one answer that is right; memory stays as it is, once warm."""
    asyncio.run(asked(service, questions, min(WARM, requests), tally, {0}))
    before = service.memory()
    asyncio.run(asked(service, questions, requests, tally, {0}))
    growth = service.memory() / before - 1
    if requests >= ENOUGH:
        tally.measured["memory_growth_percent"] = round(100 * growth, 2)
        tally.check(growth < GROWTH, f"memory grew by {100 * growth:.1f} % over {requests} requests")


async def asked(service: Service, questions: Questions, requests: int, tally: Tally, allowed: set[int]) -> None:
    async def many(count: int) -> None:
        line = await Line.open(service.port)
        for _ in range(count):
            question = questions.next()
            answer = await line.ask(question)
            tally.check(*_answered(question, answer, allowed))
            if not answer[0]:
                line.close()
                line = await Line.open(service.port)
        line.close()

    await asyncio.gather(*(many(requests // CONNECTIONS) for _ in range(CONNECTIONS)))


async def reloads(service: Service, questions: Questions, requests: int, tally: Tally) -> None:
    """One model after the other, while requests go on; at the end the first."""
    asking = asyncio.create_task(asked(service, questions, requests, tally, {0, 1}))
    for number in (1, 0, 1, 0):
        fresh = service.folder / "fresh.dap"
        fresh.write_bytes((service.folder / f"{number}.dap").read_bytes())
        fresh.replace(service.folder / "current.dap")
        service.process.send_signal(signal.SIGHUP)
        known, deadline = questions.telling(), time.monotonic() + 30
        line = await Line.open(service.port)
        while not (taken := known.is_right(await line.ask(known), {number})) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        line.close()
        tally.check(taken, f"model {number} was not taken up")
    await asking


async def ended(service: Service, questions: Questions, requests: int, tally: Tally) -> None:
    """SIGTERM amid requests: each that was answered is answered well, and the others not at all."""

    async def many() -> None:
        with suppress(OSError):  # refused: it has ended
            line = await Line.open(service.port)
            status = 1
            while status and line.asked < requests:
                question = questions.next()
                status, body = await line.ask(question)
                if status:
                    tally.check(*_answered(question, (status, body), {0}))
                else:
                    tally.check(not body, f"half an answer: {body[:100]!r}")
            line.close()

    asking = [asyncio.create_task(many()) for _ in range(CONNECTIONS)]
    await asyncio.sleep(0.3)
    service.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*asking)


def slow(service: Service) -> list[socket.socket]:
    """Clients whose heads or bodies never end; all else goes on beside them."""
    post = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    clients = [service.connect(40) for _ in range(60)]
    for number, client in enumerate(clients):
        client.sendall((b"GET /hea", post, b"GET / HTTP/1.1\r\nX: ")[number % 3])
    return clients


def given_up(clients: list[socket.socket], tally: Tally) -> None:
    """Each of them has heard 408."""
    for client in clients:
        try:
            tally.check(b" 408 " in client.recv(1000), "a slow request was not answered with 408")
        except OSError as error:
            tally.check(False, f"a slow request was not given up ({error})")
        client.close()


def flood(service: Service, tally: Tally) -> None:
    """Thousands of silent connections: those beyond the limit hear 503, and afterwards all is well."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < FILES:
        tally.skip(f"a flood of {FLOOD:,} connections: {FILES:,} open files are needed, and {files:,} allowed", 2)
        return
    clients = [service.connect() for _ in range(FLOOD)]
    time.sleep(2)
    refused = 0
    for client in clients:
        client.setblocking(False)
        with suppress(BlockingIOError, ConnectionResetError):
            refused += client.recv(100).startswith(b"HTTP/1.1 503")
    tally.check(refused > 0, f"none of {FLOOD} connections heard 503")
    for client in clients:
        client.close()
    time.sleep(1)
    tally.check(service.is_well(), f"not well after {FLOOD} connections")


def out_of_files(service: Service, tally: Tally) -> None:
    """More clients than files: no busy loop, no flood of errors (`serving` looks at those), and an end of it."""
    clients = [service.connect() for _ in range(300)]
    time.sleep(0.5)
    before = service.cpu()
    time.sleep(3)
    tally.check(service.cpu() - before < 1, "a busy loop without files")
    for client in clients:
        client.close()
    time.sleep(1)
    tally.check(service.is_well(), "not well after it had no files")


def schemathesis(service: Service, examples: int, seed: int, tally: Tally) -> None:
    """Whatever the schema allows or forbids is answered as the schema says."""
    import hypothesis
    import schemathesis as library

    schema = library.openapi.from_url(f"http://127.0.0.1:{service.port}/openapi.json")
    health = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=health)
    for operation in schema.get_all_operations():

        def validate(case: library.Case) -> None:
            tally.tried += 1
            case.call_and_validate()

        strategy = operation.ok().as_strategy()
        try:
            hypothesis.seed(seed)(settings(hypothesis.given(strategy)(validate)))()
        except Exception as error:
            tally.check(False, f"schemathesis, {operation.ok().label}: {error}")


def _answered(question: Question, answer: tuple[int, bytes], allowed: set[int]) -> tuple[bool, str]:
    return question.is_right(answer, allowed), f"{question.name}: {answer[0]} {answer[1][:200]!r}"
