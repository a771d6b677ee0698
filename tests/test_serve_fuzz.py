"""The service, asked by schemathesis for everything that its own schema allows and for much that it forbids."""

from __future__ import annotations

import math

import pytest

from dapcal.serve import Field, Limits, Served, create_app

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

FIELDS = (
    Field("x", "number"),
    Field("größe <b>", "number", required=False, bounds=(-1e6, 2.5e6)),
    Field("class", "category", levels=("a", "b")),
    Field("model_", "array", shape=(2, 2), required=False),
)


def predict(rows: list[dict]) -> list[dict]:
    """Says something about anything that a row may hold, overflow included."""
    records = []
    for row in rows:
        square = row["x"] * row["x"]
        assert math.isfinite(row["x"])
        row["class"].encode()
        own = {"prediction": square, "interval": {"lower": -square, "upper": square, "level": 0.95}}
        far = {"epistemic": square, "aleatoric": 1.0, "distance": abs(row["x"]), "ood_p_value": 0.5, "ood": square > 9}
        records.append(own | far)
    return records


app = create_app(Served("toy", "regression", FIELDS, (), predict), Limits(rows=5))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@hypothesis.seed(0)
@hypothesis.settings(
    max_examples=100,
    deadline=None,
    derandomize=False,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_no_request_is_answered_otherwise_than_the_schema_says(case):
    case.call_and_validate()
