"""`dapcal serve` over a model of a table: the same answers as in Python, and a service that survives odd requests."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dapcal.cli import app
from dapcal.data import Labelled
from dapcal.models.network_fitting import fit as fit_network
from dapcal.models.table import TableModel
from dapcal.models.table_fitting import fit as fit_table
from dapcal.recipes import Recipe
from dapcal.serve import Served, create_app

ROW = {"area": 80.0, "rooms": 3.0, "city": "Rome"}


def fitted(target: str) -> TableModel:
    random = np.random.default_rng(0)
    area, rooms = random.normal(80, 20, 220), random.integers(1, 6, 220).astype(float)
    city = random.choice(["Rome", "Oslo"], 220)
    price = 3 * area + 10 * rooms + 40 * (city == "Rome")
    table = pa.table({"area": area, "rooms": rooms, "city": city, "price": price, "dear": price > 300})
    drop = ["dear" if target == "price" else "price"]
    return fit_table(table, target, recipe=Recipe(hidden=(8,), epochs=4, members=2), drop=drop)


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
    assert client.predict({"city": None, "area": 80}).status_code == 200


@pytest.mark.parametrize("row", [{**ROW, "area": 1e300}, {**ROW, "area": "80"}, {**ROW, "extra": 1}, []])
def test_rows_that_no_model_takes_are_refused(row: object, client: Client):
    answer = client.predict(row)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]


def test_the_command_serves_until_it_is_told_to_stop(price: TableModel, tmp_path: Path):
    price.save(tmp_path / "house.dap")
    command = [sys.executable, "-m", "dapcal", "serve", str(tmp_path / "house.dap"), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        assert httpx.post(f"{address}/predict", json=ROW, timeout=60).status_code == 200
        assert httpx.get(f"{address}/health", timeout=60).json()["model"] == "house.dap"
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


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
