"""Connections of the service: slow, silent, too many, not HTTP; no files left; a new model; TLS, token, access log."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from dapcal.serve import AccessLog, Field, Limits, Security, Served, create_app, process, run
from dapcal.serve.connection import _Joining
from dapcal.serve.server import Server
from forks import Fork, forked

TOKEN = "a token of many letters".replace(" ", "-")
LIMITS = Limits(seconds=0.6, body_seconds=0.3, head_seconds=0.3, idle_seconds=0.4, connections=4)
RECORD = {"prediction": 1.0, "interval": {"lower": 0.0, "upper": 2.0, "level": 0.9}, "epistemic": 0.1}
RECORD |= {"aleatoric": 0.1, "distance": 0.0, "ood_p_value": 1.0, "ood": False}
HEALTH = b"GET /health HTTP/1.1\r\nHost: service\r\n"


def served(name: str = "toy") -> Served:
    return Served(name, "regression", (Field("x", "number"),), (), lambda rows: [RECORD for _ in rows])


@contextmanager
def serving(limits: Limits = LIMITS, **options: object) -> Iterator[int]:
    """The port of a service in a thread of this process."""
    server = Server(served(), limits, **options)
    with process.listening("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as found:
        yield found


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    """All that the service says; an error after five seconds of silence."""
    answer = b""
    while True:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return answer
        if not piece:
            return answer
        answer += piece


def problem(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b"onnection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def one_answer(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    answer = connection.recv(65536)
    while not answer.endswith(b"}"):
        answer += connection.recv(65536)
    return answer


def test_a_head_that_does_not_come_is_given_up_however_it_trickles(port):
    with connected(port) as connection:
        connection.sendall(HEALTH)
        assert problem(until_closed(connection)) == (408, "head_too_slow")
    with connected(port) as connection:
        for _ in range(60):
            connection.sendall(b"G")
            if select.select([connection], [], [], 0.05)[0]:  # it says something
                break
        else:
            pytest.fail("no end after three seconds")


def test_the_head_of_an_answer_and_its_body_are_sent_at_once():
    class Transport:
        sent: ClassVar[list[bytes | str]] = []

        def write(self, data: bytes) -> None:
            self.sent.append(data)

        def close(self) -> None:
            self.sent.append("closed")

    async def answers() -> list[bytes | str]:
        joining = _Joining(Transport(), asyncio.get_running_loop())
        for part in (b"head ", b"body", b""):
            joining.write(part)
        joining.write(b"a head alone")
        await asyncio.sleep(0)
        joining.write(b"the last")
        joining.close()
        await asyncio.sleep(0)
        return Transport.sent

    assert asyncio.run(answers()) == [b"head body", b"a head alone", b"the last", "closed"]


def test_connections_without_a_word_are_closed(port):
    with connected(port) as silent, connected(port) as kept:
        assert b" 200 " in one_answer(kept, HEALTH + b"\r\n")
        assert until_closed(silent) == b""
        assert until_closed(kept) == b""


def test_a_byte_does_not_keep_a_connection_that_was_answered(port):
    with connected(port) as connection:
        one_answer(connection, HEALTH + b"\r\n")
        connection.sendall(b"P")
        assert problem(until_closed(connection)) == (408, "head_too_slow")


def test_the_rest_of_a_body_that_nobody_wants_is_not_read_for_long(port):
    with connected(port) as connection:
        one_answer(connection, HEALTH + b"Content-Length: 1000\r\n\r\n")
        for _ in range(3):
            time.sleep(0.05)
            connection.sendall(b".")
        assert until_closed(connection) == b""


def test_a_slow_body_is_given_up(port):
    head = b"POST /predict HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with connected(port) as connection:
        connection.sendall(head + b"{")
        assert problem(until_closed(connection)) == (408, "body_too_slow")


def test_a_client_that_does_not_read_is_hung_up_on(port):
    with connected(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(0.2)
        requests = 2000 * b"GET /openapi.json HTTP/1.1\r\nHost: service\r\n\r\n"
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(60):
                time.sleep(0.05)
                with suppress(TimeoutError):
                    connection.sendall(requests)


@pytest.mark.parametrize("length", [b"Content-Length: 5\r\n", b"content-length:0\r\n"])
def test_a_body_with_two_lengths_is_refused_and_nothing_after_it_is_read(port, length):
    request = HEALTH + length + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH + b"\r\n"
    with connected(port) as connection:
        connection.sendall(request)
        answer = until_closed(connection)
    assert problem(answer) == (400, "length_ambiguous")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("what", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", HEALTH + 70_000 * b"a"])
def test_what_is_not_http_is_told_so_in_the_one_shape(port, what):
    with connected(port) as connection:
        connection.sendall(what)
        assert problem(until_closed(connection)) == (400, "not_http")


def test_more_connections_than_may_be_open_get_503_and_later_ones_do_not(port):
    with ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(connected(port))
        time.sleep(0.1)
        with connected(port) as one_more:
            one_more.sendall(HEALTH + b"\r\n")
            answer = until_closed(one_more)
    assert problem(answer) == (503, "overloaded")
    assert b"Retry-After: 1" in answer
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def test_fewer_connections_are_taken_than_files_can_be_opened(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (200, 200))
    assert 0 < Server(served(), Limits(connections=1000))._limits.connections < 170
    monkeypatch.setattr(resource, "getrlimit", lambda which: (30, 200))
    with pytest.raises(OSError, match="too few for a service"):
        Server(served(), Limits())


# a process of its own: files, signals, the access log


def service_of_few_files(access: Path) -> None:
    """Takes all files that are left where x is 7, and gives them back where it is 8; the third model is damaged."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    loads, held = [], []

    def predict(rows: list) -> list:
        for row in rows:
            with suppress(OSError):
                while row["x"] == 7:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            if row["x"] == 8:
                while held:
                    os.close(held.pop())
        return [RECORD | {"prediction": row["x"]} for row in rows]

    def model() -> Served:
        loads.append(0)
        if len(loads) == 3:
            raise ValueError("the file is damaged; save it again")
        return Served(f"model {len(loads)}", "regression", (Field("x", "number"),), (), predict)

    def started(address: str) -> None:
        print(address, flush=True)

    run(model(), port=0, limits=Limits(connections=1000), started=started, again=model, access=AccessLog(access))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def text(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Iterator[tuple[Fork, str, Path]]:
    folder = tmp_path_factory.mktemp("own")

    def program() -> None:
        os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        service_of_few_files(folder / "access.log")

    with forked(program) as process:
        yield process, process.stdout.readline().strip(), folder


def test_without_a_file_to_open_it_neither_spins_nor_fills_the_log(own):
    """Before: tens of thousands of tracebacks a second, and a core for them."""
    process, address, folder = own
    port = int(address.rpartition(":")[2])
    with httpx.Client(timeout=5) as client, ExitStack() as stack:
        assert client.post(f"{address}/predict", json={"x": 7}).status_code == 200  # it takes all files that are left
        for _ in range(20):
            stack.enter_context(connected(port))
        used = cpu_seconds(process.pid)
        time.sleep(1.3)
        assert client.get(f"{address}/health").status_code == 200  # who is in is served
        assert cpu_seconds(process.pid) - used < 0.4
        assert client.post(f"{address}/predict", json={"x": 8}).status_code == 200
        late = stack.enter_context(connected(port))
        late.sendall(HEALTH + b"Connection: close\r\n\r\n")
        assert b" 200 " in until_closed(late)  # they were waiting, and are accepted after a second
    lines = (folder / "errors").read_text().splitlines()
    assert len(lines) == 1, lines
    assert "ulimit -n" in lines[0]


def test_another_model_is_taken_up_with_no_request_failing(own):
    process, address, folder = own
    stop, answers = threading.Event(), []

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                x = float(len(answers) % 5)
                answer = client.post(f"{address}/predict", json={"x": x})
                answers.append(answer.status_code == 200 and answer.json()["prediction"] == x)

    def model() -> str:
        return httpx.get(f"{address}/health").json()["model"]

    before = sum('"/predict"' in line for line in text(folder / "access.log"))  # of another test
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        (folder / "access.log").rename(folder / "access.old")
        os.kill(process.pid, signal.SIGHUP)
        deadline = time.monotonic() + 60
        while model() != "model 2" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert model() == "model 2"
        os.kill(process.pid, signal.SIGHUP)  # to a file that is damaged: nothing changes
        while "damaged" not in (folder / "errors").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert model() == "model 2"
        while len(answers) <= 10 and time.monotonic() < deadline:  # a busy machine is slow to ask
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(answers) > 10
    assert all(answers)
    assert "Traceback" not in (folder / "errors").read_text()
    lines: list[dict] = []

    def answered() -> int:
        return sum(line["path"] == "/predict" and line["status"] == 200 for line in lines)

    while answered() < len(answers) + before and time.monotonic() < deadline:  # a line comes after its answer
        lines = [json.loads(line) for name in ("access.old", "access.log") for line in text(folder / name)]
    assert {tuple(line) for line in lines} == {("time", "client", "method", "path", "status", "seconds", "bytes")}
    assert answered() == len(answers) + before
    os.kill(process.pid, signal.SIGTERM)
    assert process.ended() == 0


# who may ask, and how


def test_a_token_is_asked_for_but_by_health_and_ready():
    app = create_app(served(), token=TOKEN)

    async def statuses(headers: dict[str, str]) -> dict[str, int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers) as client:
            answers = {path: await client.get(path) for path in ("/", "/metrics", "/openapi.json", "/health", "/ready")}
            answers["/predict"] = await client.post("/predict", json={"x": 1})
        refused = [answer for answer in answers.values() if answer.status_code == 401]
        assert all(answer.headers["www-authenticate"] == "Bearer" for answer in refused)
        assert all(answer.json()["error"]["code"] == "token_needed" for answer in refused)
        return {path: answer.status_code for path, answer in answers.items()}

    for wrong in ({}, {"authorization": f"Basic {TOKEN}"}, {"authorization": f"Bearer {TOKEN}x"}):
        found = asyncio.run(statuses(wrong))
        assert {path for path, status in found.items() if status == 200} == {"/health", "/ready"}
        assert set(found.values()) == {200, 401}
    assert set(asyncio.run(statuses({"authorization": f"bearer {TOKEN}"})).values()) == {200}
    schema = app.openapi()
    assert schema["paths"]["/predict"]["post"]["security"] == [{"HTTPBearer": []}]
    assert "401" in schema["paths"]["/predict"]["post"]["responses"]
    assert "security" not in schema["paths"]["/health"]["get"]


def test_with_a_certificate_it_speaks_tls_alone(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    with serving(security=Security(cert=cert, key=key)) as port:
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(verify=trusting) as client:
            assert client.get(f"https://127.0.0.1:{port}/health").status_code == 200
        with connected(port) as plain:
            plain.sendall(HEALTH + b"\r\n")
            assert b"200" not in until_closed(plain)
        with connected(port) as silent:  # no handshake
            assert until_closed(silent) == b""
    with pytest.raises(ValueError, match="certificate and its private key in PEM"):
        Server(served(), LIMITS, Security(cert=key, key=cert))
    with pytest.raises(ValueError, match="the key alone"):
        Security(key=key)


def test_it_is_not_ready_when_full_or_about_to_end():
    app = create_app(served(), Limits(waiting=2))

    async def ready() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
            return await client.get("/ready")

    assert asyncio.run(ready()).json() == {"ready": True}
    app.state.traffic.inside = 2
    assert asyncio.run(ready()).json()["error"]["code"] == "not_ready"
    app.state.traffic.inside, app.state.traffic.is_ending = 0, True
    assert asyncio.run(ready()).status_code == 503


def test_the_access_log_has_one_line_of_json_whatever_a_path_holds(tmp_path):
    log = AccessLog(tmp_path / "access.log")
    app = create_app(served(), access=log)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
            await client.get("/a%0a%1b[31mbé" + 300 * "x")
            await client.post("/predict", json={"x": 1})

    asyncio.run(ask())
    log.close()
    first, second = (tmp_path / "access.log").read_bytes().split(b"\n")[:2]
    assert first.isascii()
    assert b"\x1b" not in first
    assert len(json.loads(first)["path"]) == 200
    assert json.loads(second)["status"] == 200
    assert json.loads(second)["bytes"] > 100


def test_a_full_disk_costs_lines_of_the_access_log_and_nothing_else(caplog):
    log = AccessLog(Path("/dev/full"))
    for _ in range(3):
        log("127.0.0.1", "GET", "/", 200, 0.1, 10)
    log.close()
    assert caplog.text.count("are lost") == 1
