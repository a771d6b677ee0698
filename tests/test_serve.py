"""The service: shapes, errors, limits, micro-batching, metrics, and a process that ends well."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from dapcal import __version__
from dapcal.serve import Field, Limits, Served, create_app, process, run
from dapcal.serve.batching import Batcher
from dapcal.serve.metrics import SECONDS, Metrics
from forks import forked

JSON = {"content-type": "application/json"}
ODD = (
    "model_config",
    "class",
    "_hidden",
    "a b",
    "größe ♥",
    "<script>alert(1)</script>",
    "",
    "column_0",
    "a.b",
    '"',
    "$ref",
)


def record(row: dict) -> dict:
    """What a model might say of a row: out of distribution above 10, and as certain as x is large."""
    return {
        "prediction": "yes" if row["x"] > 0 else "no",
        "probabilities": {"yes": 0.75, "no": 0.25},
        "epistemic": 0.1,
        "aleatoric": 0.2,
        "distance": float(row["x"]),
        "ood_p_value": 0.5,
        "ood": row["x"] > 10,
        "reason": "ambiguous" if row["x"] > 10 else "",
        "missing": [],
        "unusual": {"x": "high"} if row["x"] > 10 else {},
    }


class Model:
    """Remembers its calls; fails where x is 13, as a whole."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls: list[list[dict]] = []
        self.seconds = seconds

    def __call__(self, rows: list[dict]) -> list[dict]:
        self.calls.append(rows)
        time.sleep(self.seconds)
        if any(row["x"] == 13 for row in rows):
            raise RuntimeError("secret detail")
        return [record(row) for row in rows]


FIELDS = (Field("x", "number"), Field("kind", "category", levels=("a", "b"), required=False))


def served(predict=None, fields=FIELDS) -> Served:
    return Served("toy", "classification", fields, ("yes", "no"), predict or Model())


def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service")


def ask(app, *requests: tuple) -> list[httpx.Response]:
    """Answers to (method, path, options), one after the other."""

    async def all_of_them():
        async with client(app) as connection:
            return [await connection.request(method, path, **options) for method, path, options in requests]

    return asyncio.run(all_of_them())


def post(app, path: str, **options) -> httpx.Response:
    return ask(app, ("POST", path, options))[0]


def at_once(app, *bodies) -> list[httpx.Response]:
    async def all_of_them():
        async with client(app) as connection:
            return await asyncio.gather(*(connection.post("/predict", json=body) for body in bodies))

    return asyncio.run(all_of_them())


def problem(answer: httpx.Response, status: int, code: str) -> dict:
    """The error of an answer, which has the one shape that there is."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert answer.json() == {"error": error}
    assert sorted(error) == ["code", "fields", "message"]
    assert error["code"] == code
    return error


def schema_of(app) -> dict:
    return ask(app, ("GET", "/openapi.json", {}))[0].json()


# predictions


def test_one_row_and_several_rows_give_the_records_of_the_model_in_order():
    app = create_app(served())
    one = post(app, "/predict", json={"x": 3})
    assert one.status_code == 200
    assert one.json() == record({"x": 3}) | {"notes": []}
    xs = [3, -1, 12, 0.5]
    several = post(app, "/predict/batch", json={"rows": [{"x": x} for x in xs]})
    assert several.json() == {"predictions": [record({"x": x}) for x in xs], "notes": []}


def test_the_model_gets_every_column_with_none_for_what_is_unknown():
    model = Model()
    app = create_app(served(model))
    for row in ({"x": 1}, {"x": 1, "kind": None}, {"x": 1, "kind": "never seen"}):
        assert post(app, "/predict", json=row).status_code == 200
    kinds = [call[0]["kind"] for call in model.calls]
    assert kinds == [None, None, "never seen"]
    assert all(list(call[0]) == ["x", "kind"] for call in model.calls)


def test_regression_has_an_interval():
    answer = {"prediction": 1.5, "interval": {"lower": 1.0, "upper": 2.0, "level": 0.9}}
    answer |= {"epistemic": 0.1, "aleatoric": 0.2, "distance": 0.0, "ood_p_value": 1.0, "ood": False}
    app = create_app(Served("toy", "regression", FIELDS, (), lambda rows: [answer for _ in rows]))
    assert post(app, "/predict", json={"x": 1}).json() == answer | {
        "reason": "",
        "missing": [],
        "unusual": {},
        "notes": [],
    }  # a model may leave it out


def test_numbers_that_overflowed_are_null():
    answer = record({"x": 1}) | {"distance": math.inf, "epistemic": math.nan}
    app = create_app(served(lambda rows: [answer]))
    assert post(app, "/predict", json={"x": 1}).json() == answer | {"distance": None, "epistemic": None, "notes": []}


@pytest.mark.parametrize("name", ODD)
def test_a_column_can_have_any_name(name):
    rows = []
    app = create_app(served(lambda got: rows.extend(got) or [record({"x": 1})], fields=(Field(name, "number"),)))
    assert post(app, "/predict", json={name: 2.5}).status_code == 200
    assert rows == [{name: 2.5}]
    assert problem(post(app, "/predict", json={}), 422, "body_invalid")["fields"][0]["path"] == [name]
    assert list(schema_of(app)["components"]["schemas"]["Row"]["properties"]) == [name]
    assert "<script" not in ask(app, ("GET", "/docs", {}))[0].text


def test_all_odd_names_and_odd_classes_live_together():
    rows = []
    model = Served(
        "<b>",
        "classification",
        tuple(Field(name, "number") for name in ODD),
        ODD,
        lambda got: (
            rows.extend(got) or [record({"x": 1}) | {"prediction": "", "probabilities": dict.fromkeys(ODD, 0.1)}]
        ),
    )
    row = {name: float(number) for number, name in enumerate(ODD)}
    answer = post(create_app(model), "/predict", json=row)
    assert rows == [row]
    assert answer.json()["probabilities"] == dict.fromkeys(ODD, 0.1)
    assert answer.json()["prediction"] == ""


def test_arrays_have_their_shape():
    rows = []
    fields = (Field("picture", "array", shape=(2, 3)),)
    app = create_app(served(lambda got: rows.extend(got) or [record({"x": 1})], fields))
    picture = [[1, 2, 3], [4, 5, 6.5]]
    assert post(app, "/predict", json={"picture": picture}).status_code == 200
    assert rows == [{"picture": picture}]
    for wrong in ([[1, 2], [3, 4], [5, 6]], [1, 2, 3, 4, 5, 6], [[1, 2, 3]], [[1, 2, 3], [4, 5, None]], "picture"):
        problem(post(app, "/predict", json={"picture": wrong}), 422, "body_invalid")


# what is refused


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{}", ["x"]),
        ('{"x": null}', ["x"]),
        ('{"x": "1"}', ["x"]),
        ('{"x": true}', ["x"]),
        ('{"x": NaN}', ["x"]),
        ('{"x": Infinity}', ["x"]),
        ('{"x": -1e999}', ["x"]),
        ('{"x": 1' + 400 * "0" + "}", ["x"]),
        ('{"x": [1]}', ["x"]),
        ('{"x": 1, "kind": 2}', ["kind"]),
        ('{"x": 1, "kind": NaN}', ["kind"]),
        ('{"x": 1, "kind": "\\ud800"}', ["kind"]),
        ('{"column_0": 1}', ["x"]),
        ('{"x": 1, "\\ud800": 2}', []),
        ("[]", []),
        ("null", []),
        ("7", []),
        ("", []),
    ],
)
def test_a_row_that_is_not_as_the_schema_says_is_refused_by_name(text, path):
    model = Model()
    error = problem(post(create_app(served(model)), "/predict", content=text, headers=JSON), 422, "body_invalid")
    assert error["fields"][0]["path"] == path
    assert error["fields"][0]["message"]
    assert model.calls == []


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\xff", b"x=1", b"[" * 100_000, b"9" * 5000, b'{"x": 1}}'])
def test_what_is_no_json_is_a_bad_request(content):
    problem(post(create_app(served()), "/predict", content=content, headers=JSON), 400, "body_not_json")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_another_media_type_is_refused(content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    answer = post(create_app(served()), "/predict", content=b'{"x": 1}', headers=headers)
    assert "application/json" in problem(answer, 415, "media_type_unsupported")["message"]


def test_a_media_type_may_have_parameters():
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert post(create_app(served()), "/predict", content=b'{"x": 1}', headers=headers).status_code == 200


def test_a_batch_has_between_one_row_and_the_limit():
    app = create_app(served(), Limits(rows=3))
    good = {"x": 1}
    assert post(app, "/predict/batch", json={"rows": 3 * [good]}).status_code == 200
    for rows in ([], 4 * [good], None, good, [good, 5]):
        problem(post(app, "/predict/batch", json={"rows": rows}), 422, "body_invalid")
    error = problem(post(app, "/predict/batch", json={"rows": [good, {"x": "1"}]}), 422, "body_invalid")
    assert error["fields"][0]["path"] == ["rows", 1, "x"]
    assert schema_of(app)["components"]["schemas"]["Rows"]["properties"]["rows"]["maxItems"] == 3


def test_no_more_than_twenty_problems_are_listed():
    error = problem(post(create_app(served()), "/predict/batch", json={"rows": 30 * [{}]}), 422, "body_invalid")
    assert len(error["fields"]) == 20
    assert "30 problems, the first 20" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/predict", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/predict/", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
    ],
)
def test_other_routes_and_methods_are_refused_in_the_same_shape(method, path, status, code):
    (answer,) = ask(create_app(served()), (method, path, {}))
    problem(answer, status, code)
    assert ("allow" in answer.headers) == (status == 405)


# limits


def chunks(size: int, count: int, taken: list[int]):
    async def stream():
        for _ in range(count):
            taken.append(size)
            yield size * b" "

    return stream()


def test_a_body_is_bounded_by_its_declared_length_and_by_what_arrives():
    limits = Limits(body_bytes=100)
    app = create_app(served(), limits)
    fits = json.dumps({"x": 1}).ljust(100).encode()
    assert post(app, "/predict", content=fits, headers=JSON).status_code == 200
    problem(post(app, "/predict", content=fits + b" ", headers=JSON), 413, "body_too_large")
    taken: list[int] = []
    answer = post(app, "/predict", content=chunks(30, 1000, taken), headers=JSON)  # no length is declared
    assert "100 bytes" in problem(answer, 413, "body_too_large")["message"]
    assert len(taken) == 4  # it was not read to its end
    lying = post(app, "/predict", content=chunks(30, 5, []), headers=JSON | {"content-length": "9"})
    problem(lying, 413, "body_too_large")


def test_a_body_that_does_not_end_is_given_up():
    async def stalled():
        yield b"{"
        await asyncio.sleep(60)

    app = create_app(served(), Limits(seconds=0.05))
    answer = post(app, "/predict", content=stalled(), headers=JSON)
    problem(answer, 408, "body_too_slow")
    assert answer.headers["connection"] == "close"


def test_a_prediction_that_takes_too_long_is_given_up():
    app = create_app(served(Model(seconds=0.3)), Limits(seconds=0.05))
    answer = post(app, "/predict", json={"x": 1})
    problem(answer, 503, "timeout")
    assert int(answer.headers["retry-after"]) >= 1


def test_more_requests_than_may_wait_are_turned_away_and_later_ones_are_not():
    app = create_app(served(Model(seconds=0.1)), Limits(waiting=3))
    answers = at_once(app, *(5 * [{"x": 1}]))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503, 503]
    for answer in answers:
        if answer.status_code == 503:
            problem(answer, 503, "overloaded")
            assert int(answer.headers["retry-after"]) >= 1
    assert post(app, "/predict", json={"x": 1}).status_code == 200


def test_health_is_answered_while_predictions_are_turned_away():
    free = threading.Event()

    def predict(rows):
        free.wait()
        return [record(row) for row in rows]

    async def both():
        async with client(create_app(served(predict), Limits(waiting=1))) as connection:
            busy = asyncio.create_task(connection.post("/predict", json={"x": 1}))
            await asyncio.sleep(0.05)
            health, refused = await connection.get("/health"), await connection.post("/predict", json={"x": 1})
            free.set()
            return health.status_code, refused.status_code, (await busy).status_code

    assert asyncio.run(both()) == (200, 503, 200)


def test_a_client_that_hangs_up_is_not_answered():
    app, sent = create_app(served()), []
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [(b"content-type", b"application/json")]}

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope | {"query_string": b"", "root_path": ""}, receive, send))
    assert sent == []


# failures


def test_a_model_that_fails_gives_an_error_without_details_and_a_log_with_them(caplog):
    app = create_app(served())
    with caplog.at_level(logging.ERROR):
        answer = post(app, "/predict", json={"x": 13})
    problem(answer, 500, "prediction_failed")
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text
    error = problem(post(app, "/predict/batch", json={"rows": [{"x": 1}, {"x": 13}]}), 500, "prediction_failed")
    assert [field["path"] for field in error["fields"]] == [["rows", 1]]


@pytest.mark.parametrize(
    "broken",
    [
        lambda rows: [],
        lambda rows: [record({"x": 1}) | {"prediction": "maybe"}],
        lambda rows: [record({"x": 1}) | {"further": 1}],
        lambda rows: [{"prediction": "yes"}],
        lambda rows: None,
    ],
)
def test_records_that_are_not_as_the_schema_says_are_failures(broken, caplog):
    problem(post(create_app(served(broken)), "/predict", json={"x": 1}), 500, "prediction_failed")
    assert "could not be predicted" in caplog.text


def test_a_failure_of_the_service_itself_has_no_traceback_in_its_answer(caplog):
    app = create_app(served())

    @app.get("/broken")
    async def broken():
        raise KeyError("secret detail")

    (answer,) = ask(app, ("GET", "/broken", {}))
    problem(answer, 500, "internal_error")
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


def test_a_row_that_the_model_refuses_is_the_clients_error_in_the_models_words(caplog):
    def predict(rows):
        if any(row["x"] == 99 for row in rows):
            raise ValueError("column `x` holds 99; correct it")
        return Model()(rows)

    app = create_app(served(predict))
    error = problem(post(app, "/predict", json={"x": 99}), 422, "row_refused")
    assert error["fields"] == [{"path": [], "message": "column `x` holds 99; correct it"}]
    error = problem(post(app, "/predict/batch", json={"rows": [{"x": 1}, {"x": 99}]}), 422, "row_refused")
    assert error["fields"][0]["path"] == ["rows", 1]
    assert "Traceback" not in caplog.text
    mixed = problem(post(app, "/predict/batch", json={"rows": [{"x": 99}, {"x": 13}]}), 500, "prediction_failed")
    assert [field["path"] for field in mixed["fields"]] == [["rows", 1]]


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (("true", "false"), ("false", "true")),
        (("Yes", "No", "maybe"), ("No", "Yes")),
        (("NO",), ("NO", "yes")),
    ],
)
def test_columns_of_true_and_false_take_those_of_json(levels, words):
    rows: list[dict[str, object]] = []
    fields = (Field("x", "category", levels=levels, nullable=True), Field("z", "category", levels=("a",)))
    app = create_app(served(lambda got: rows.extend(got) or [record({"x": 1})], fields=fields))
    for value in (False, True, "Maybe", None):
        assert post(app, "/predict", json={"x": value, "z": "a"}).status_code == 200
    assert [row["x"] for row in rows] == [*words, "Maybe", None]
    for odd in ({"x": 1, "z": "a"}, {"x": "a", "z": True}):  # a number is no boolean, other texts are none either
        error = problem(post(app, "/predict", json=odd), 422, "body_invalid")
        assert [field["path"] for field in error["fields"]] == [["x" if odd["x"] == 1 else "z"]]
    kinds = schema_of(app)["components"]["schemas"]["Row"]["properties"]["x"]["anyOf"]
    assert {kind["type"] for kind in kinds} == {"boolean", "string", "null"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", '{"x": 11, "more": [1]}'),
        ("/predict", '{"x": 1, "x": 2.5}'),
        ("/predict", '{"x": NaN}'),
        ("/predict", '{"x": "1"}'),
        ("/predict", '{"x": 13}'),
        ("/predict", "[" * 10_000),
        ("/predict", ""),
        ("/predict/batch", '{"rows": [{"x": 1}, {"x": 11}]}'),
        ("/predict/batch", '{"rows": [{"x": 1}, {"x": 13}]}'),
        ("/predict/batch", '{"rows": []}'),
    ],
)
def test_the_straight_way_answers_as_the_routes_do(path, body, monkeypatch, caplog):
    straight = post(create_app(served(Model())), path, content=body, headers=JSON)

    async def by_route(_: bytes) -> None:
        return None

    monkeypatch.setattr("dapcal.serve.app.direct", lambda *_: by_route)
    by_routes = post(create_app(served(Model())), path, content=body, headers=JSON)
    assert straight.status_code == by_routes.status_code
    assert straight.content == by_routes.content
    assert straight.headers == by_routes.headers
    assert ("could not be predicted" in caplog.text) == (straight.status_code == 500)


def test_a_number_may_have_bounds():
    app = create_app(served(fields=(Field("x", "number", bounds=(-2.5, 7.0), required=False),)))
    for x in (-2.5, 0, 7):
        assert post(app, "/predict", json={"x": x}).status_code == 200
    for x in (-2.500001, 8):
        error = problem(post(app, "/predict", json={"x": x}), 422, "body_invalid")
        assert error["fields"][0]["path"] == ["x"]
    number = schema_of(app)["components"]["schemas"]["Row"]["properties"]["x"]["anyOf"][0]
    assert (number["minimum"], number["maximum"]) == (-2.5, 7.0)


# micro-batching


def test_requests_at_once_share_calls_and_each_gets_its_own_answer():
    model = Model(seconds=0.05)
    answers = at_once(create_app(served(model)), *({"x": x} for x in range(1, 11)))
    assert [answer.json()["distance"] for answer in answers] == list(range(1, 11))
    assert sum(map(len, model.calls)) == 10
    assert len(model.calls) < 10


def test_all_that_waits_goes_into_the_next_call():
    calls, free = [], threading.Event()

    def predict(rows):
        calls.append([row["x"] for row in rows])
        free.wait()
        return calls[-1]

    async def several():
        batcher = Batcher(predict, 6)
        first = asyncio.create_task(batcher([{"x": 0}]))
        while not calls:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(batcher([{"x": x}])) for x in range(1, 10)]
        await asyncio.sleep(0)
        free.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(several()) == [[x] for x in range(10)]
    assert calls == [[0], [1, 2, 3, 4, 5, 6], [7, 8, 9]]


def test_a_failing_row_fails_alone():
    model = Model(seconds=0.02)
    answers = at_once(create_app(served(model)), *({"x": x} for x in range(8, 17)))
    assert [answer.status_code for answer in answers] == [200] * 5 + [500] + [200] * 3
    assert [answer.json()["distance"] for answer in answers if answer.status_code == 200] == [
        8,
        9,
        10,
        11,
        12,
        14,
        15,
        16,
    ]
    assert max(map(len, model.calls)) > 1


def test_invalid_rows_never_reach_those_that_wait():
    model = Model(seconds=0.02)
    answers = at_once(create_app(served(model)), {"x": 1}, {"x": "1"}, {"x": 2}, {})
    assert [answer.status_code for answer in answers] == [200, 422, 200, 422]
    assert sum(map(len, model.calls)) == 2


def test_calls_hold_no_more_rows_than_they_may():
    model = Model()
    app = create_app(served(model), Limits(rows_at_once=4))
    xs = [float(x) for x in range(1, 11)]
    answer = post(app, "/predict/batch", json={"rows": [{"x": x} for x in xs]})
    assert [found["distance"] for found in answer.json()["predictions"]] == xs
    assert max(map(len, model.calls)) == 4


def test_rows_are_predicted_in_one_thread_that_ends_with_the_service():
    threads = []

    def predict(rows):
        threads.append(threading.current_thread())
        return rows

    async def several():
        batcher = Batcher(predict, 2)
        await asyncio.gather(*(batcher([{"x": x}]) for x in range(9)))
        batcher.close()
        assert len(set(threads)) == 1
        assert not threads[0].is_alive()
        assert await batcher([{"x": 1}]) == [{"x": 1}]  # a service can be started again
        batcher.close()

    asyncio.run(several())
    assert len(set(threads)) == 2


def test_a_cancelled_request_is_not_predicted():
    calls, free = [], threading.Event()

    def predict(rows):
        calls.append(rows)
        free.wait()
        return rows

    async def cancel_the_second():
        batcher = Batcher(predict, 1)
        first, second = (asyncio.create_task(batcher([{"x": x}])) for x in (1, 2))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        free.set()
        assert await first == [{"x": 1}]
        batcher.close()

    asyncio.run(cancel_the_second())
    assert calls == [[{"x": 1}]]


@pytest.mark.parametrize("bad", [{0}, {6}, {3, 4}, set(range(7))])
def test_halving_finds_all_rows_that_fail_and_no_other(bad, caplog):
    def predict(rows):
        if any(row["x"] in bad for row in rows):
            raise ValueError
        return [row["x"] for row in rows]

    outcomes = asyncio.run(Batcher(predict, 100)([{"x": x} for x in range(7)]))
    assert {x for x, outcome in enumerate(outcomes) if isinstance(outcome, ValueError)} == bad
    assert [outcome for outcome in outcomes if not isinstance(outcome, ValueError)] == sorted(set(range(7)) - bad)


# metrics, health, pages


def numbers(text: str) -> dict[tuple[str, ...], float]:
    """Every series with its value, as Prometheus reads them: (name, values of its labels...)."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_metrics_count_requests_and_rows_exactly():
    app = create_app(served())
    answers = ask(
        app,
        ("POST", "/predict", {"json": {"x": 1}}),
        ("POST", "/predict", {"json": {"x": 11}}),
        ("POST", "/predict", {"json": {"x": "1"}}),
        ("POST", "/predict", {"json": {"x": 13}}),
        ("POST", "/predict/batch", {"json": {"rows": [{"x": 1}, {"x": 20}, {"x": 30}]}}),
        ("POST", "/predict/batch", {"json": {"rows": [{"x": 1}, {"x": 13}]}}),
        ("GET", "/health", {}),
        ("GET", '/a"b', {}),
        ("GET", "/metrics", {}),
    )
    found = numbers(answers[-1].text)
    assert answers[-1].headers["content-type"].startswith("text/plain; version=0.0.4")
    assert {series: value for series, value in found.items() if "seconds" not in series[0]} == {
        ("dapcal_requests_total", "/health", "200"): 1,
        ("dapcal_requests_total", "/predict", "200"): 2,
        ("dapcal_requests_total", "/predict", "422"): 1,
        ("dapcal_requests_total", "/predict", "500"): 1,
        ("dapcal_requests_total", "/predict/batch", "200"): 1,
        ("dapcal_requests_total", "/predict/batch", "500"): 1,
        ("dapcal_requests_total", "other", "404"): 1,
        ("dapcal_rows_predicted_total",): 6,
        ("dapcal_rows_out_of_distribution_total",): 3,
        ("dapcal_model_calls_total",): 4 + 3,  # the batch that fails is tried in halves
    }
    assert {name for name, *_ in found if "seconds" in name} == {
        "dapcal_request_seconds_bucket",
        "dapcal_request_seconds_count",
        "dapcal_request_seconds_sum",
    }
    assert found["dapcal_request_seconds_count", "/predict"] == 4
    assert found["dapcal_request_seconds_bucket", "+Inf", "/predict"] == 4


def test_two_services_count_apart():
    one, other = create_app(served()), create_app(served())
    post(one, "/predict", json={"x": 1})
    assert numbers(ask(other, ("GET", "/metrics", {}))[0].text) == {
        ("dapcal_rows_predicted_total",): 0,
        ("dapcal_rows_out_of_distribution_total",): 0,
        ("dapcal_model_calls_total",): 0,
    }
    assert not any(metric.name.startswith("dapcal") for metric in REGISTRY.collect())


def test_latencies_are_counted_up_to_each_limit():
    metrics = Metrics()
    times = (0.0005, 0.001, 0.0011, 0.3, 10.0, 99.0)
    for seconds in times:
        metrics.request("/predict", 200, seconds)
    found = numbers(metrics.text())
    for limit in SECONDS:
        assert found["dapcal_request_seconds_bucket", str(limit), "/predict"] == sum(s <= limit for s in times)
    assert found["dapcal_request_seconds_sum", "/predict"] == pytest.approx(sum(times))


def test_refusals_at_the_gate_are_counted_too():
    app = create_app(served(), Limits(body_bytes=10))
    answers = ask(
        app, ("POST", "/predict", {"json": {"x": 1.000001}}), ("POST", "/predict", {}), ("GET", "/metrics", {})
    )
    found = numbers(answers[-1].text)
    assert found["dapcal_requests_total", "/predict", "413"] == 1
    assert found["dapcal_requests_total", "/predict", "415"] == 1


def test_health_and_index_say_what_is_served():
    health, index = (answer.json() for answer in ask(create_app(served()), ("GET", "/health", {}), ("GET", "/", {})))
    uptime = health.pop("uptime_seconds")
    assert 0 <= uptime < 60
    assert health == {"ready": True, "model": "toy", "task": "classification", "version": __version__}
    assert index["docs"] == "/docs"
    assert index["model"] == "toy"


def test_the_schema_says_exactly_what_is_accepted_and_answered():
    schema = schema_of(create_app(served()))
    row = schema["components"]["schemas"]["Row"]
    assert row["additionalProperties"] is True
    assert row["required"] == ["x"]
    assert row["properties"]["x"]["type"] == "number"
    assert row["properties"]["kind"]["examples"] == ["a", "b"]
    assert {choice["type"] for choice in row["properties"]["kind"]["anyOf"]} == {"string", "null"}
    prediction = schema["components"]["schemas"]["Prediction"]
    assert prediction["properties"]["prediction"]["enum"] == ["yes", "no"]
    assert sorted([*prediction["required"], "reason", "missing", "unusual"]) == sorted(
        record({"x": 1})
    )  # a model may leave these out
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    for path in ("/predict", "/predict/batch"):
        responses = schema["paths"][path]["post"]["responses"]
        assert sorted(responses) == ["200", "400", "408", "413", "415", "422", "500", "503"]
        for status in set(responses) - {"200"}:
            content = responses[status]["content"]["application/json"]["schema"]
            assert content == {"$ref": "#/components/schemas/ErrorBody"}


def test_the_page_names_the_columns_and_loads_nothing():
    fields = (
        *FIELDS,
        Field("<img src=x onerror=alert(1)>", "category", levels=("<i>",)),
        Field("p", "array", shape=(40, 40)),
    )
    (answer,) = ask(create_app(served(fields=fields)), ("GET", "/docs", {}))
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "&lt;img src=x" in answer.text
    assert "list of 40 × list of 40 × number" in answer.text
    for forbidden in ("<img", "<i>", "<script", "http://", "https://", "src="):
        assert forbidden not in answer.text.replace("&lt;img src=x", "")
    assert len(answer.text) < 20_000


# what cannot be served


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Field("x", "text"), "one of number, category, array"),
        (lambda: Field("x", "array"), "lengths >= 1"),
        (lambda: Field("x", "array", shape=(2, 0)), "lengths >= 1"),
        (lambda: Field("x", "number", shape=(2,)), "none for others"),
        (lambda: Field("x", "number", bounds=(2, 1)), "`bounds` in order"),
        (lambda: Field("x", "category", bounds=(1, 2)), "for a number"),
        (
            lambda: Served("m", "ranking", FIELDS, (), record),
            "one of classification, multi-label, per-place, regression",
        ),
        (lambda: Served("m", "classification", FIELDS, (), record), "in classification alone"),
        (lambda: Served("m", "regression", FIELDS, ("a",), record), "in classification alone"),
        (lambda: Served("m", "regression", (), (), record), "at least one field"),
        (lambda: Served("m", "regression", (*FIELDS, FIELDS[0]), (), record), r"\['x'\] more than once"),
        (lambda: Served("m", "classification", FIELDS, ("a", "a"), record), r"\['a'\] more than once"),
        (lambda: Limits(rows=0), "`rows` > 0"),
        (lambda: Limits(seconds=math.nan), "`seconds` > 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("package", ["fastapi", "prometheus_client", "uvicorn"])
def test_a_missing_package_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "dapcal.serve")
    with pytest.raises(ImportError, match=rf"needs {package}; install it with: pip install 'dapcal\[serve\]'"):
        importlib.import_module("dapcal.serve")


# the process


def slow_service() -> None:
    def predict(rows: list) -> list:
        print("asked", flush=True)
        time.sleep(0.5)
        interval = {"lower": 0.0, "upper": 2.0, "level": 0.9}
        record = {"prediction": 1.0, "interval": interval, "epistemic": 0.1, "aleatoric": 0.1, "distance": 0.0}
        return [record | {"ood_p_value": 1.0, "ood": False} for _ in rows]

    try:
        toy = Served("toy", "regression", (Field("x", "number"),), (), predict)
        run(toy, port=0, started=lambda address: print(address, flush=True))
    except KeyboardInterrupt:
        sys.exit(130)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_service_after_what_is_under_way(number, code):
    with forked(slow_service) as process:
        address = process.stdout.readline().strip()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{address}/predict", json={"x": 1})))
        with httpx.Client() as idle:
            assert idle.get(f"{address}/health").json()["ready"]
            asking.start()
            assert process.stdout.readline() == "asked\n"
            os.kill(process.pid, number)
            assert process.ended() == code
        asking.join()
        assert process.stderr.read() == ""
    assert answers[0].json()["prediction"] == 1.0


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="choose another"):
        run(served(), port=taken.getsockname()[1])


def test_the_body_of_an_answer_does_not_wait_for_the_client():
    """An accepted connection has what the listener has; benchmarks/kept_alive.py measures what it is worth."""
    with process.listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
