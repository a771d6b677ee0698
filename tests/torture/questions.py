"""Requests whose answers are known, and a connection that sends them one after the other."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from dapcal.models.table import TableModel

POOL = 200
TOLERANCE = 1e-4
Row = dict[str, object]


@dataclass(frozen=True)
class Question:
    """A request, the status of its answer, and where that is 200 the predictions of every model for its rows."""

    name: str
    status: int
    path: str = "/predict"
    method: str = "POST"
    body: bytes = b""
    media_type: str = "application/json"
    is_chunked: bool = False
    predictions: tuple[tuple[float, ...], ...] = ()  # of every model, for every row
    notes: tuple[tuple[str, ...], ...] = field(default=())  # of every model: columns differ from its own training rows

    def raw(self) -> bytes:
        """As it goes over the wire."""
        head = f"{self.method} {self.path} HTTP/1.1\r\nHost: service\r\nContent-Type: {self.media_type}\r\n"
        if not self.is_chunked:
            return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body
        half = len(self.body) // 2
        pieces = [piece for piece in (self.body[:half], self.body[half:]) if piece]
        chunks = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"

    def is_right(self, answer: tuple[int, bytes], allowed: set[int]) -> bool:
        """Whether the status is as expected, and all predictions are those of one of the allowed models."""
        status, body = answer
        if status != self.status:
            return False
        if not self.predictions:
            return status < 400 or set(json.loads(body)) == {"error"}
        found = json.loads(body)
        values = [one["prediction"] for one in found.get("predictions", [found])]
        told = tuple(found["notes"])
        return any(_close(values, self.predictions[model]) and told == self.notes[model] for model in allowed)


class Questions:
    """Draws requests of all kinds; the same seed draws the same ones."""

    def __init__(self, models: Sequence[TableModel], seed: int) -> None:
        self._draws = random.Random(seed)
        self._rows = [self._row() for _ in range(POOL)]
        kinds = {"area": pa.float64(), "rooms": pa.float64(), "city": pa.string()}
        table = pa.table({name: pa.array([row[name] for row in self._rows], kind) for name, kind in kinds.items()})
        self._known = [model.predict(table).table["prediction"].to_pylist() for model in models]
        self._models = models

    def next(self) -> Question:
        """Any request."""
        draw = self._draws.random()
        if draw < 0.55:
            return self.known()
        if draw < 0.75:
            return self._batch()
        return self._draws.choice(self._others())

    def telling(self) -> Question:
        """One row that every model answers otherwise; of far rows several may say 0, the least that a price can be."""
        while True:
            question = self.known()
            if not _close(*question.predictions):
                return question

    def known(self) -> Question:
        """One row."""
        place = self._draws.randrange(POOL)
        row = dict(self._rows[place])
        if self._draws.random() < 0.2:
            row["id"] = place
        return self._question("one row", "/predict", row, [place], [row])

    def _batch(self) -> Question:
        places = [self._draws.randrange(POOL) for _ in range(self._draws.randint(1, 20))]
        rows = [self._rows[place] for place in places]
        return self._question("several rows", "/predict/batch", {"rows": rows}, places, rows)

    def _question(self, name: str, path: str, body: object, places: list[int], rows: list[Row]) -> Question:
        return Question(
            name,
            200,
            path,
            body=json.dumps(body).encode(),
            is_chunked=self._draws.random() < 0.2,
            predictions=tuple(tuple(known[place] for place in places) for known in self._known),
            notes=tuple(tuple(model.notes_on(rows)) for model in self._models),
        )

    def _others(self) -> list[Question]:
        row = self._rows[0]
        return [
            Question("health", 200, "/health", "GET"),
            Question("ready", 200, "/ready", "GET"),
            Question("metrics", 200, "/metrics", "GET"),
            Question("schema", 200, "/openapi.json", "GET"),
            Question("page", 200, "/docs", "GET"),
            Question("nothing there", 404, f"/{self._draws.random()}", "GET"),
            Question("no such method", 405, "/predict", "GET"),
            Question("text for a number", 422, body=json.dumps({**row, "area": "80"}).encode()),
            Question("too large a number", 422, body=json.dumps({**row, "area": 1e300}).encode()),
            Question("a field is missing", 422, body=b'{"area": 80, "rooms": 3}'),
            Question("not an object", 422, body=b"[]"),
            Question("no rows", 422, "/predict/batch", body=b'{"rows": []}'),
            Question("half of JSON", 400, body=b'{"area": 80, '),
            Question("not text", 400, body=b"\xff\xfe\x00"),
            Question("deep", 400, body=5000 * b"[" + 5000 * b"]"),
            Question("another type", 415, body=b"area=80", media_type="application/x-www-form-urlencoded"),
            Question("too large a body", 413, body=3 * 2**20 * b" "),
        ]

    def _row(self) -> Row:
        draws = self._draws
        return {
            "area": draws.choice([round(draws.gauss(80, 20), 2), round(draws.gauss(80, 2000), 2), None]),
            "rooms": draws.choice([1.0, 2.0, 3.0, None]),
            "city": draws.choice(["Rome", "Oslo", "Paris", "", None]),
        }


class Line:
    """A connection, opened again where the service closed it as it should."""

    def __init__(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._port, self._reader, self._writer = port, reader, writer
        self.asked = 0

    @classmethod
    async def open(cls, port: int) -> Line:
        """Connect."""
        return cls(port, *await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, question: Question) -> tuple[int, bytes]:
        """Status and body of the answer; 0 and what came of it where the connection was closed."""
        head = b""
        self.asked += 1
        try:
            self._writer.write(question.raw())
            await self._writer.drain()
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if line)
            body = await self._reader.readexactly(int(headers["content-length"]))
        except asyncio.IncompleteReadError as error:
            return 0, head + error.partial
        except ConnectionError:
            return 0, head
        if headers.get("connection") == "close":
            self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return int(lines[0].split()[1]), body

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


def _close(values: Sequence[float], expected: Sequence[float]) -> bool:
    if len(values) != len(expected):
        return False
    return all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(values, expected, strict=True))
