"""Rows of a service are encoded as a table of them is."""

from __future__ import annotations

import random
import re

import pyarrow as pa
import pytest
import torch

from dapcal.models.row_notes import RowNotes
from dapcal.tables.encoder import Encoder, fit_encoder
from dapcal.tables.rows import RowEncoder

KINDS = {"a": pa.float64(), "b": pa.float64(), "city": pa.string(), "street": pa.string(), "day": pa.string()}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    draws = random.Random(0)
    streets = [f"street {draws.randint(0, 60)}" for _ in range(300)]
    days = [f"2024-{draws.randint(1, 12):02}-{draws.randint(1, 28):02}" for _ in range(300)]
    columns = {
        "a": [draws.gauss(3, 2) for _ in range(300)],
        "b": [draws.gauss(0, 1) if draws.random() > 0.1 else None for _ in range(300)],
        "city": [draws.choice(["Rome", "Oslo", "Bonn", "true", None]) for _ in range(300)],
        "street": streets,
        "day": days,
        "y": [draws.gauss(0, 1) for _ in range(300)],
    }
    return fit_encoder(pa.table(columns), "y")


def by_table(encoder: Encoder, rows: list[dict]) -> torch.Tensor:
    return encoder(pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in KINDS.items()})).x


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_encoded_as_a_table_of_them_is(encoder, count, seed):
    draws = random.Random(seed)
    rows = [
        {
            "a": draws.choice([1.5, -2e3, None, float("nan"), 7]),
            "b": draws.choice([0.25, None, 1e-30]),
            "city": draws.choice(["Rome", " Oslo ", "TRUE", "true", "", "NA", None, "Paris"]),
            "street": draws.choice(["street 1", "street 59", "nowhere", None]),
            "day": draws.choice(["2024-03-01", None]),
        }
        for _ in range(count)
    ]
    found = RowEncoder(encoder)(rows)
    assert found.dtype == torch.float32
    assert torch.equal(found, by_table(encoder, rows))


@pytest.mark.parametrize("odd", [{"a": 1e30}, {"b": float("inf")}, {"day": "yesterday"}])
def test_what_a_table_refuses_is_refused_in_its_words(encoder, odd):
    row = {"a": 1.0, "b": 1.0, "city": "Rome", "street": "street 1", "day": "2024-03-01"} | odd
    with pytest.raises(ValueError, match=f"column `{next(iter(odd))}`") as told:
        by_table(encoder, [row])
    with pytest.raises(ValueError, match=f"^{re.escape(str(told.value))}$"):
        RowEncoder(encoder)([row])


def test_one_row_is_answered_as_it_is_among_others(encoder):
    """To the last bit where rows are encoded; predictions differ by rounding alone (tests of the model)."""
    rows = [{"a": 0.5 * k, "b": None, "city": "Oslo", "street": "x", "day": "2024-01-02"} for k in range(9)]
    encode = RowEncoder(encoder)
    assert torch.equal(encode(rows), torch.cat([encode([row]) for row in rows]))


def test_a_blank_date_is_noted_as_a_blank_number_is(encoder):
    """It counts as the mean date, and was said to be a category of its own."""
    row = {"a": None, "b": 1.0, "city": "Rome", "street": None, "day": None}
    told = "1 row without a value, none in training"
    assert RowNotes(encoder)([row]) == [
        f"column `a`: {told}; there the mean stands for it",
        f"column `street`: {told}; it counts as a category of its own",
        f"column `day`: {told}; there the mean stands for it",
    ]
    x = RowEncoder(encoder)([row])
    assert x[0, encoder.names.index("day")] == 0
