"""`dapcal serve` over a model of a table: the same answers as in Python, and a service that survives odd requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dapcal import models
from dapcal.cli import app
from dapcal.data import Labelled
from dapcal.models.network_fitting import fit as fit_network
from dapcal.models.row_notes import notes
from dapcal.models.table import TableModel, _field
from dapcal.models.table_fitting import fit as fit_table
from dapcal.recipes import Recipe
from dapcal.serve import Served, create_app
from dapcal.tables.columns import Number
from forks import command, forked
from table_cases import refused, run

TOKEN = "0123456789abcdef"
ROW = {"area": 80.0, "rooms": 3.0, "city": "Rome"}


def fitted(target: str) -> TableModel:
    random = np.random.default_rng(0)
    area, rooms = random.normal(80, 20, 220), random.integers(1, 6, 220).astype(float)
    city = random.choice(["Rome", "Oslo"], 220)
    price = 3 * area + 10 * rooms + 40 * (city == "Rome")
    table = pa.table({"area": area, "rooms": rooms, "city": city, "price": price, "dear": price > 300})
    drop = ["dear" if target == "price" else "price"]
    return fit_table(table, target, recipe=Recipe(hidden=(8,), epochs=4, members=2, fast=True), drop=drop)


@pytest.fixture(scope="module")
def price() -> TableModel:
    return fitted("price")


class Client:
    """Asks the service in this process, one request after the other."""

    def __init__(self, what: Served) -> None:
        self.app = create_app(what)

    def ask(self, method: str, path: str, **options: object) -> httpx.Response:
        async def answer() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://service") as client:
                return await client.request(method, path, **options)

        return asyncio.run(answer())

    def predict(self, row: object) -> httpx.Response:
        return self.ask("POST", "/predict", json=row)


@pytest.fixture(scope="module")
def client(price: TableModel) -> Client:
    return Client(Served.of(price, "house.dap", level=0.8))


def test_a_row_gets_the_answer_of_python(price: TableModel, client: Client):
    answer = client.predict(ROW)
    assert answer.status_code == 200, answer.text
    direct = price.predict(pa.table({name: [value] for name, value in ROW.items()}), level=0.8).table.to_pylist()[0]
    record = answer.json()
    for name in ("prediction", "epistemic", "aleatoric", "distance", "ood_p_value"):
        assert record[name] == pytest.approx(direct[name], rel=1e-5)
    assert record["interval"] == {
        "lower": pytest.approx(direct["lower"], rel=1e-5),
        "upper": pytest.approx(direct["upper"], rel=1e-5),
        "level": 0.8,
    }


def test_classes_have_probabilities():
    record = Client(Served.of(fitted("dear"), "house.dap")).predict(ROW).json()
    assert record["prediction"] in ("true", "false")
    assert sum(record["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_far_rows_are_counted(client: Client):
    def far() -> int:
        lines = client.ask("GET", "/metrics").text.splitlines()
        return int(float(next(line for line in lines if "out_of_distribution" in line and line[0] != "#").split()[-1]))

    before = far()
    rows = [ROW, {**ROW, "area": 9000.0}, {**ROW, "area": -9000.0}]
    records = client.ask("POST", "/predict/batch", json={"rows": rows}).json()["predictions"]
    assert [record["ood"] for record in records][1:] == [True, True]
    assert far() - before == sum(record["ood"] for record in records)


def test_missing_values_and_unknown_cities_are_answered(client: Client):
    known = client.predict(ROW).json()
    unknown = client.predict({**ROW, "city": "Paris"}).json()
    assert unknown["ood_p_value"] <= known["ood_p_value"]
    assert client.predict({"city": None, "area": 80, "rooms": None}).status_code == 200


def test_what_is_missing_unknown_or_ignored_is_noted_in_the_words_of_predict(
    price: TableModel, client: Client, tmp_path: Path
):
    """Before: no word of it, and a row with the target was refused."""
    row = {"area": None, "rooms": 3.0, "city": "Paris", "nonsense": 1}
    text = "area,rooms,city,nonsense\n,3,Paris,1\n"
    (tmp_path / "new.csv").write_text(text)
    source = price.read(tmp_path / "new.csv")
    for _ in source.batches:
        pass
    answer = client.predict(row).json()
    assert answer["notes"] == source.notes()
    assert len(answer["notes"]) == 3
    assert client.predict(ROW).json()["notes"] == []
    batch = client.ask("POST", "/predict/batch", json={"rows": [row, ROW, row]}).json()
    assert [note.replace("2 rows", "1 row") for note in batch["notes"]] == answer["notes"]
    carried = client.predict({**ROW, "price": 250, "dear": True, "id": [7, {}]}).json()
    assert carried["prediction"] == client.predict(ROW).json()["prediction"]
    assert carried["notes"] == [
        "columns that the model does not know were ignored: id",
        "columns that nothing is predicted from were ignored: price, dear",
    ]


def test_columns_of_a_batch_that_differ_as_a_whole_are_noted_in_the_words_of_predict(
    price: TableModel, client: Client, tmp_path: Path
):
    """Before: no word of it."""

    def notes_on(rows: list[dict]) -> list[str]:
        return client.ask("POST", "/predict/batch", json={"rows": rows}).json()["notes"]

    random = np.random.default_rng(5)
    ordinary = [
        {"area": area, "rooms": rooms, "city": city, "id": 7}
        for area, rooms, city in zip(
            random.normal(80, 20, 40).tolist(), [1, 2, 3, 4, 5] * 8, ["Rome", "Oslo"] * 20, strict=True
        )
    ]
    ignored = "columns that the model does not know were ignored: id"
    assert notes_on(ordinary) == [ignored]
    moved = [{**row, "area": 1.5 * row["area"], "city": "Rome"} for row in ordinary]
    price.save(tmp_path / "m.dap")
    (tmp_path / "new.csv").write_text("area,rooms,city\n" + "".join(f"{r['area']},{r['rooms']},Rome\n" for r in moved))
    told = run("predict", tmp_path / "m.dap", tmp_path / "new.csv", "-o", tmp_path / "out.csv").stdout.splitlines()
    expected = [line for line in told if line.startswith("Column `")]
    assert [line.split("`")[1] for line in expected] == ["city", "area"]
    assert notes_on(moved) == [ignored, *expected]
    assert notes_on(moved[:19]) == [ignored]  # too few to tell
    assert client.predict(moved[0]).json()["notes"] == [ignored]


def test_a_field_that_training_never_lacked_is_required_and_a_misspelt_one_is_named(client: Client):
    assert client.ask("GET", "/openapi.json").json()["components"]["schemas"]["Row"]["required"] == list(ROW)
    answer = client.predict({"aera": 80.0, "rooms": 3.0, "city": "Rome"})
    assert answer.status_code == 422
    (problem,) = answer.json()["error"]["fields"]
    assert problem == {"path": ["area"], "message": "Field required; is `aera` meant for it?"}


def test_booleans_of_json_are_those_of_the_table():
    random = np.random.default_rng(0)
    parking, lift = random.random(120) < 0.5, random.choice(["yes", "no"], 120)
    table = pa.table({"parking": parking, "lift": lift, "rent": 500 + 80 * parking + random.normal(0, 9, 120)})
    model = fit_table(table, "rent", recipe=Recipe(hidden=(8,), epochs=4, members=2, fast=True))
    client = Client(Served.of(model, "rents.dap"))
    for given, same in (
        ({"parking": True, "lift": False}, ("true", "no")),
        ({"parking": False, "lift": True}, ("false", "yes")),
    ):
        answer, spelt = client.predict(given), client.predict(dict(zip(given, same, strict=True)))
        assert answer.status_code == 200, answer.text
        assert answer.json() == spelt.json()
        assert answer.json()["notes"] == []


@pytest.mark.parametrize("number", [Number("x", 3.1, 0.7, False), Number("x", 1e12, 1e-3, False)])
def test_the_bounds_of_a_number_are_taken_by_the_encoder(number: Number):
    """Before: rounding put some of them beyond its limit, and what the schema allowed was refused."""
    for shift in range(200):
        moved = Number("x", number.center + shift / 7, number.scale + shift / 1e5, False)
        for edge in _field(moved).bounds:
            moved.encode(pa.chunked_array([[edge]]), np.zeros((1, moved.width), np.float32), 1)


@pytest.mark.parametrize("value", ["Rome", " Oslo ", "paris", "", "NA", " ? ", "TRUE", "True", "true", None])
def test_notes_count_as_the_encoder_does(price: TableModel, value: str | None):
    encoded = price.encoder(pa.table({"area": [1.0], "rooms": [1.0], "city": pa.array([value], pa.string())}))
    expected = notes(price.encoder, encoded.unknown, encoded.imputed, encoded.ignored)
    assert price.notes_on([{"area": 1.0, "rooms": 1.0, "city": value}]) == expected


@pytest.mark.parametrize("row", [{**ROW, "area": 1e300}, {**ROW, "area": "80"}, {"area": 80.0}, []])
def test_rows_that_no_model_takes_are_refused(row: object, client: Client):
    answer = client.predict(row)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]


def test_the_command_serves_until_it_is_told_to_stop(price: TableModel, tmp_path: Path):
    price.save(tmp_path / "house.dap")
    (tmp_path / "token").write_text(TOKEN + "\n")
    program = command(
        "serve", tmp_path / "house.dap", "--port", 0, "--json",
        "--token-file", tmp_path / "token", "--access-log", tmp_path / "access.log",
    )  # fmt: skip
    with forked(program) as process:
        address = json.loads(process.stdout.readline())["address"]
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.post(f"{address}/predict", json=ROW, timeout=60).status_code == 401
        assert httpx.post(f"{address}/predict", json=ROW, headers=bearer, timeout=60).status_code == 200
        assert httpx.get(f"{address}/health", timeout=60).json()["model"] == "house.dap"
        os.kill(process.pid, signal.SIGHUP)
        assert any("as it is now" in line for line in process.stderr)  # bars have left an empty line
        assert httpx.get(f"{address}/ready", timeout=60).status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        assert process.ended() == 0
        assert "Traceback" not in process.stderr.read()
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert [line["status"] for line in lines] == [401, 200, 200, 200]


def test_a_model_that_is_replaced_while_it_is_first_loaded_is_loaded_again(price: TableModel, tmp_path: Path):
    """Before, the signal ended the process."""
    price.save(tmp_path / "house.dap")
    loads: list[object] = []

    def program() -> None:
        honest = models.load

        def load(*arguments: object, **named: object) -> object:
            found = honest(*arguments, **named)
            if not loads:
                os.kill(os.getpid(), signal.SIGHUP)
            loads.append(found)
            return found

        models.load = load
        command("serve", tmp_path / "house.dap", "--port", 0, "--json")()

    with forked(program) as process:
        assert "address" in json.loads(process.stdout.readline())
        assert any("as it is now" in line for line in process.stderr)
        os.kill(process.pid, signal.SIGTERM)
        assert process.ended() == 0


@pytest.mark.parametrize("what", ["missing", "empty", "a folder", "unreadable", "without end"])
def test_a_token_file_that_cannot_be_read_gives_one_line(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = {"a folder": tmp_path, "without end": Path("/dev/zero")}.get(what, tmp_path / "token")
    if what in ("empty", "unreadable"):
        path.touch()
    if what == "unreadable":  # which root may read all the same

        def denied(self: Path, *_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", denied)
    words = {
        "missing": "cannot be read (No such file or directory)",
        "empty": "got nothing",
        "a folder": "cannot be read (Is a directory)",
        "unreadable": "cannot be read (Permission denied)",
        "without end": "got more than 4096 characters",
    }
    refused(run("serve", "house.dap", "--token-file", path), f"--token-file {path}", words[what], "openssl rand")


@pytest.mark.parametrize("token", ["", "short", "with a space in it, though long", "ü" * 20])
def test_a_token_that_is_none_is_refused(token: str, tmp_path: Path):
    (tmp_path / "token").write_text(token, encoding="utf-8")
    result = CliRunner().invoke(app, ["serve", "house.dap", "--token-file", str(tmp_path / "token")])
    assert result.exit_code == 2
    assert "openssl rand" in result.stderr


def test_a_port_that_is_taken_is_named(price: TableModel, tmp_path: Path):
    price.save(tmp_path / "house.dap")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "house.dap"), "--port", port])
    assert result.exit_code == 2
    assert port in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # it has learnt nothing
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_network_is_served_by_its_inputs(outputs: int):
    x = torch.randn(300, 2, 3)
    y = x.flatten(1).sum(1) if outputs == 1 else x[:, 0].argmax(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))
    own = fit_network([network], Labelled(x[:200], y[:200]), Labelled(x[200:], y[200:]))
    client = Client(Served.of(own, "own.dap"))
    record = client.predict({"x": x[0].tolist()}).json()
    direct = own.calibrated(x[:1])
    assert record["distance"] == pytest.approx(float(direct.distance), rel=1e-4, abs=1e-6)
    assert record["ood_p_value"] == pytest.approx(float(direct.ood_p_value))
    if outputs == 1:
        assert record["prediction"] == pytest.approx(float(direct.mean), rel=1e-4)
        assert record["interval"]["upper"] == pytest.approx(float(direct.interval(0.95).upper), rel=1e-4)
        assert record["epistemic"] == pytest.approx(float(direct.epistemic.sqrt()), rel=1e-3)
    else:
        assert list(record["probabilities"].values()) == pytest.approx(direct.probs[0].tolist(), abs=1e-5)
        assert record["prediction"] == str(int(direct.probs.argmax()))
    assert client.predict({"x": (1000 * x[0]).tolist()}).json()["ood"] is True
    for wrong in ([[1.0, 2.0]], "text", [[1.0, 2.0, None]] * 2, 1.0):
        assert client.predict({"x": wrong}).status_code == 422
