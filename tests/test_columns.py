"""Columns as inputs of a network: against scikit-learn, back again, and what is refused, dropped or counted."""

from __future__ import annotations

import datetime
import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from dapcal.tables import Category, Encoder, Number, encoder_from_json, fit_encoder
from dapcal.tables.columns import LIMIT, MAX_LEVELS, UNKNOWN, readable
from dapcal.tables.dates import Date

COLOURS = ["red", "red", "blue", "red", "blue", "green"]


def fitted(column, name="a"):
    """An encoder of one column beside a target."""
    column = pa.array(column) if isinstance(column, list) else column
    return fit_encoder(pa.table({name: column, "y": pa.nulls(len(column))}), "y")


def encode(encoder, column, name="a"):
    return encoder(pa.table({name: pa.array(column) if isinstance(column, list) else column}))


@pytest.fixture
def mixed():
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "area": 50 + 20 * rng.normal(size=200),
            "colour": rng.choice(["red", "green", "blue"], 200, p=[0.5, 0.3, 0.2]),
            "rooms": rng.integers(1, 7, 200),
            "sold": rng.integers(0, 2, 200) == 1,
            "price": rng.normal(size=200),
        }
    )


def test_numbers_are_standardised_as_scikit_learn_does(mixed):
    encoder = fit_encoder(mixed, "price", drop=["colour", "sold"])
    values = np.stack([mixed["area"].to_numpy(), mixed["rooms"].to_numpy()], 1)
    scaler = StandardScaler().fit(values)
    np.testing.assert_allclose([c.center for c in encoder.columns], scaler.mean_, rtol=1e-12)
    np.testing.assert_allclose([c.scale for c in encoder.columns], scaler.scale_, rtol=1e-12)
    encoded = encoder(mixed)
    assert encoded.x.dtype == torch.float32
    np.testing.assert_allclose(encoded.x[:, ::2], scaler.transform(values), rtol=1e-5, atol=1e-6)
    assert not encoded.x[:, 1::2].any()  # nothing is missing


def test_categories_are_one_hot_as_scikit_learn_does(mixed):
    encoder = fit_encoder(mixed, "price", drop=["area", "rooms", "sold"])
    (colour,) = encoder.columns
    values = mixed["colour"].to_numpy()[:, None]
    reference = OneHotEncoder(categories=[list(colour.levels)], sparse_output=False).fit_transform(values)
    np.testing.assert_array_equal(encoder(mixed).x[:, :-2], reference)
    assert not encoder(mixed).x[:, -2:].any()  # the columns of missing and unknown levels


def test_levels_are_ordered_by_frequency_then_name():
    assert fitted([*COLOURS, "amber"]).columns[0].levels == ("red", "blue", "amber", "green")


def test_two_levels_are_as_far_apart_as_two_numbers_in_the_root_mean_square(mixed):
    x = fitted(COLOURS)(pa.table({"a": ["red", "blue"]})).x
    area = fit_encoder(mixed, "price", drop=["colour", "sold", "rooms"])(mixed).x[:, :1]
    differences = (area - area.T)[~torch.eye(len(area), dtype=torch.bool)]
    assert float((x[0] - x[1]).norm()) == pytest.approx(math.sqrt(2))
    assert float(differences.square().mean().sqrt()) == pytest.approx(math.sqrt(2), rel=0.01)


def test_an_unknown_level_is_far_from_all_others_and_counted():
    encoder = fitted(COLOURS)
    encoded = encode(encoder, ["violet", "red", "violet", None])
    assert encoded.unknown == {"a": {"violet": 2}}
    known = encode(encoder, ["red", "blue", "green"]).x
    distances = torch.cdist(encoded.x[:1], known)
    torch.testing.assert_close(distances, torch.full((1, 3), math.sqrt(1 + UNKNOWN**2)))
    assert distances.min() > 2 * torch.cdist(known, known).max()
    assert encoder.decode(encoded.x)[0] == {"a": "(new)"}, "a training row may hold `unknown`"


def test_rare_levels_count_as_one_and_are_known():
    names = [f"level {i:02d}" for i in range(MAX_LEVELS + 10)]
    column = [name for i, name in enumerate(names) for _ in range(100 - i)]
    encoder = fitted(column)
    (category,) = encoder.columns
    assert (category.levels, category.rare) == (tuple(names[:MAX_LEVELS]), tuple(names[MAX_LEVELS:]))
    assert f"`a` has {MAX_LEVELS + 10} levels" in encoder.notes[0]
    encoded = encode(encoder, [names[0], names[-1], names[-2], "new"])
    assert encoded.unknown == {"a": {"new": 1}}
    torch.testing.assert_close(encoded.x[1], encoded.x[2])
    assert [row["a"] for row in encoder.decode(encoded.x)] == [names[0], "other", "other", "(new)"]


def test_missing_numbers_count_as_the_mean_and_are_marked():
    encoder = fitted([1.0, None, 3.0, float("nan")])
    assert encoder.columns == (Number("a", 2.0, 1.0, missing=True),)
    encoded = encode(encoder, [None, 2.0, 4.0])
    torch.testing.assert_close(encoded.x, torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]]))
    assert encoded.imputed == {}
    assert [row["a"] for row in encoder.decode(encoded.x)] == ["missing", "2", "4"]


def test_missing_categories_are_a_level():
    encoder = fitted(["red", None, "red", "NA"])
    assert encoder.columns == (Category("a", ("red",), (), missing=True),)
    encoded = encode(encoder, ["", "red", "blue"])
    torch.testing.assert_close(encoded.x, torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, UNKNOWN]]))
    assert (encoded.imputed, encoded.unknown) == ({}, {"a": {"blue": 1}})
    assert [row["a"] for row in encoder.decode(encoded.x)] == ["missing", "red", "(new)"]


def test_values_missing_for_the_first_time_are_marked_and_counted():
    number, category = fitted([1.0, 3.0]), fitted(COLOURS)
    encoded = encode(number, pa.array([None, float("nan"), 3.0]))
    assert encoded.imputed == {"a": 2}
    assert encoded.x.tolist() == [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert number.missing(encoded.x) == [["a"], ["a"], []]
    encoded = encode(category, pa.array([None, "blue"]))
    assert encoded.imputed == {"a": 1}
    assert [row["a"] for row in category.decode(encoded.x)] == ["missing", "blue"]
    assert category.missing(encoded.x) == [["a"], []]


def test_columns_of_earlier_versions_fill_in_values_missing_for_the_first_time():
    described = {"target": "t", "dropped": [], "notes": []}
    number = {"kind": "number", "name": "a", "center": (2.0).hex(), "scale": (1.0).hex(), "missing": False}
    colour = {"kind": "category", "name": "b", "levels": ["red", "blue"], "rare": [], "missing": False}
    encoder = encoder_from_json(described | {"columns": [number, colour]})
    x = encoder(pa.table({"a": pa.array([None, 3.0]), "b": ["blue", None]})).x
    assert x.tolist() == [[0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    assert encoder.missing(x) == [[], []]  # nothing is left to tell it by


@pytest.mark.parametrize("value", [0.0, 7.0, -1e100, 0.1])
def test_a_constant_number_gets_scale_one_where_it_is_missing_at_times(value):
    encoder = fitted([value] * 7 + [None])
    assert encoder.columns[0].scale == 1
    if abs(value) < 10:
        assert float(encode(encoder, [value + 2]).x[0, 0]) == pytest.approx(2)


@pytest.mark.parametrize("value", [0.0, 7, "Oslo", True])
def test_a_column_that_is_the_same_in_every_row_stays_as_evidence_with_a_note(value):
    """A network learns nothing from it; a row that differs there is not like the others."""
    encoder = fit_encoder(pa.table({"a": [value] * 7, "b": list(range(7)), "y": [0.5] * 7}), "y")
    assert encoder.dropped == ()
    assert "column `a` is" in encoder.notes[0]
    assert "in every row: it tells nothing, and another value will count as unusual" in encoder.notes[0]


@pytest.mark.parametrize(
    ("value", "told"),
    [(1, "1"), (0.0, "0"), (1.0, "1"), (171234.56, "171,234.56"), ("Oslo", "'Oslo'"), ("1 a", "'1 a'")],
)
def test_the_value_of_a_constant_column_is_noted_as_people_write_it(value, told):
    encoder = fit_encoder(pa.table({"a": [value] * 7, "b": [0.1, 0.5] * 3 + [0.2], "y": [0.5] * 7}), "y")
    assert encoder.notes[0].startswith(f"column `a` is {told} in every row")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([True, False, True, None]),
        pa.array(["True", "FALSE", "true", ""]),
        pa.array(["true", "false", "true", None]).dictionary_encode(),
        pa.array(["true", "false", "true", None], pa.large_string()),
    ],
)
def test_booleans_and_dictionaries_are_categories(column):
    encoder = fitted(column)
    assert encoder.columns == (Category("a", ("true", "false"), (), missing=True),)
    assert encode(encoder, [True, False, None]).x[:, :3].tolist() == torch.eye(3).tolist()


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.decimal128(9, 2)])
def test_every_type_of_number_is_a_number(kind):
    encoder = fitted(pa.array([1, 2, 3], pa.int8()).cast(kind) if kind != pa.float16() else
                     pa.array(np.array([1, 2, 3], np.float16)))  # fmt: skip
    assert encoder.columns == (Number("a", 2.0, pytest.approx(math.sqrt(2 / 3)), missing=False),)


def test_texts_are_read_as_numbers_where_the_model_expects_them():
    encoder = fitted([1.0, 3.0])
    assert encode(encoder, [" 3 ", "NA"]).x.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    with pytest.raises(ValueError, match="Row 12: column `a` holds 'two', which is not a number; correct it"):
        encoder(pa.table({"a": ["1", "two"]}), first_row=11)


@pytest.mark.parametrize(
    ("column", "first"),
    [
        (pa.array([datetime.date(2024, 1, 31), None]), "2024-01-31"),
        (pa.array([datetime.datetime(2024, 1, 31, 12)]), "2024-01-31 12:00"),
        (["2024-01-31", "1999-12-01", None], "2024-01-31"),
        (["2024-01-31T10:00:00Z", "2024-01-31 10:00:00.123+02:00"], "2024-01-31 10:00"),
        (["31.12.2024", "1.2.24"], "2024-12-31"),
        (["1/2/2024", "31/12/2024"], "2024-02-01"),
        (["1/2/2024", "12/31/2024"], "2024-01-02"),
        (["12/31/2024 9:30"] * 10, "2024-12-31 09:30"),
    ],
)
def test_dates_are_days_with_the_cycles_of_year_week_and_day(column, first):
    encoder = fitted(column, "day")
    (date,) = encoder.columns
    assert isinstance(date, Date)
    x = encoder(pa.table({"day": column, "y": [0.0] * len(column)})).x
    assert encoder.decode(x)[0] == {"day": first}
    when = datetime.datetime.fromisoformat(first)
    angle = 2 * math.pi * (when.weekday() + (when.hour + when.minute / 60) / 24 - 3) / 7  # 1970 began on a Thursday
    assert x[0, 4:6].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-3)
    assert encoder_from_json(json.loads(json.dumps(encoder.as_json()))) == encoder


def test_dates_that_are_missing_late_or_spoilt():
    encoder = fitted([f"2020-01-{day:02d}" for day in range(1, 31)], "day")
    assert "`day` is read as dates; rows after 2020-01-30" in encoder.notes[0]
    x = encoder(pa.table({"day": [None, "2020-01-15", "2031-01-01"]})).x
    assert encoder.missing(x) == [["day"], [], []]
    assert float(x[2, 0]) > 100
    with pytest.raises(ValueError, match="Row 2: column `day` holds 'soon', which is not a date such as 2024-12-31"):
        encoder(pa.table({"day": ["2020-01-15", "soon"]}))
    with pytest.raises(ValueError, match="not a date such as 12/31/2024"):
        fitted(["12/31/2024 9:30"] * 10 + ["soon"], "day")
    with pytest.raises(ValueError, match="day and month in two orders"):
        fitted(["12/31/2024", "31/12/2024"], "day")
    assert "taken as day/month" in fitted(["1/2/2024", "3/4/2024"], "day").notes[0]


@pytest.mark.parametrize("column", [pa.array([1, 2], pa.duration("s")), pa.array([1, 2], pa.time32("s"))])
def test_times_are_refused_with_advice(column):
    with pytest.raises(ValueError, match=r"Column `day` holds times of the day or durations; .* --drop day"):
        fitted(column, "day")


def test_free_text_is_refused_with_advice():
    column = [f"a lovely house in street number {i}" for i in range(30)]
    with pytest.raises(
        ValueError, match=r"Column `a` holds free text \(30 different texts in 30 rows\).*--drop a; --drop-unusable"
    ):
        fitted(column)


def test_names_of_rows_and_empty_columns_are_dropped_with_a_note(mixed):
    table = mixed.append_column("id", pa.array([f"h{i}" for i in range(200)]))
    table = table.append_column("empty", pa.nulls(200)).append_column("nan", pa.array([float("nan")] * 200))
    encoder = fit_encoder(table, "price", drop=["rooms"])
    assert encoder.dropped == ("rooms", "id", "empty", "nan")
    assert encoder.notes == (
        "column `id` is different in every row, so it names rows: left out",
        "column `empty` has no values: left out",
        "column `nan` has no values: left out",
    )
    assert encoder(table).ignored == ()  # left out on purpose, so not reported again


def test_a_running_number_is_left_out_and_years_stay_with_a_note():
    for first, step in ((0, 1), (1, 1), (0, 7)):  # in any order
        numbers = [first + step * i % 30 for i in range(30)]
        encoder = fit_encoder(pa.table({"a": numbers, "b": [i % 3 for i in range(30)], "y": [0.5] * 30}), "y")
        assert encoder.notes == (
            "column `a` numbers the rows (whole numbers, none of them twice): left out; --number a learns it",
        )
    encoder = fitted([float(1990 + i) for i in range(30)])
    assert len(encoder.columns) == 1
    assert "one more from row to row: if it only names them, leave it out with --drop a" in encoder.notes[0]
    assert fitted([float(i) for i in range(5)]).notes == ()


@pytest.mark.parametrize(("first", "rows", "of"), [(1, 712, 891), (5000, 275, 400), (0, 61, 200)])
def test_ids_are_left_out_although_some_are_missing_and_in_any_order(first, rows, of):
    numbers = first + np.random.default_rng(0).permutation(of)[:rows]
    table = pa.table({"id": numbers, "b": np.arange(rows) % 3, "y": np.zeros(rows)})
    encoder = fit_encoder(table, "y")
    assert encoder.dropped == ("id",)
    note = "column `id` numbers the rows (whole numbers, none of them twice): left out; --number id learns it"
    assert encoder.notes[0] == note
    kept = fit_encoder(table, "y", numbers=["id"])
    assert [column.name for column in kept.columns] == ["id", "b"]
    with pytest.raises(ValueError, match="did you mean `id`"):
        fit_encoder(table, "y", numbers=["ids"])


@pytest.mark.parametrize(
    "numbers",
    [
        np.arange(1850, 2020),  # years
        np.append(np.arange(5000, 5200), 5000),  # one of them twice
        4.5 * np.arange(200),
        np.arange(5000, 5060),  # too few
        5 * np.arange(200),  # too far apart
        np.append(np.arange(5000, 5200.0), np.nan),
    ],
)
def test_numbers_that_may_be_amounts_are_learnt(numbers):
    assert len(fitted(np.random.default_rng(0).permutation(numbers).tolist()).columns) == 1


def test_an_option_in_an_error_can_be_copied_to_a_shell():
    table = pa.table({"sale time": ["10:30", "10:35"], "y": [1.0, 2.0]})
    with pytest.raises(ValueError, match="leave it out with --drop 'sale time'"):
        fit_encoder(table, "y")


def test_times_of_day_are_no_categories():
    with pytest.raises(ValueError, match="holds times of the day or durations; make numbers"):
        fitted(["09:30", "10:00", "23:59"] * 5)


def test_names_that_differ_in_capitals_alone_are_noted():
    assert fitted(["Rome", "rome", "Oslo"] * 5).notes == (
        "column `a` holds 'Rome', 'rome', which count as different; spell them alike if they are not",
    )
    assert fitted(["Rome", "Oslo"] * 5).notes == ()


def test_extra_columns_are_reported_and_the_target_may_be_there_or_not(mixed):
    encoder = fit_encoder(mixed, "price")
    extra = mixed.append_column("garden", pa.array([1] * 200))
    assert encoder(extra).ignored == ("garden",)
    torch.testing.assert_close(encoder(extra).x, encoder(mixed.drop_columns(["price"])).x)
    shuffled = mixed.select(["sold", "rooms", "price", "colour", "area"])
    torch.testing.assert_close(encoder(shuffled).x, encoder(mixed).x)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.rename_columns(["Area", *t.column_names[1:]]), "no column `area`; did you mean `Area`?"),
        (
            lambda t: t.drop_columns(["area", "rooms"]),
            "2 of the 4 columns that the model was fitted on are missing: area, rooms; the table has: colour, sold",
        ),
        (lambda t: t.drop_columns(["area"]), "no column `area`; the columns are: colour, rooms, sold, price"),
        (lambda t: t.append_column("area", t["area"]), "Expected one column `area`, got 2; rename all but one"),
    ],
)
def test_a_missing_column_is_named(mixed, change, match):
    with pytest.raises(ValueError, match=match.replace("?", r"\?")):
        fit_encoder(mixed, "price")(change(mixed))


def test_what_cannot_be_fitted(mixed):
    with pytest.raises(ValueError, match=r"no column `prize`; did you mean `price`\?"):
        fit_encoder(mixed, "prize")
    with pytest.raises(ValueError, match=r"no column `colours`; did you mean `colour`\?"):
        fit_encoder(mixed, "price", drop=["colours"])
    with pytest.raises(ValueError, match="`price` is the target and cannot be dropped"):
        fit_encoder(mixed, "price", drop=["price"])
    with pytest.raises(ValueError, match="No column is left to predict `price` from; column `a` has no values"):
        fit_encoder(pa.table({"a": pa.nulls(2), "price": [1, 2]}), "price")
    with pytest.raises(ValueError, match="at least one training row"):
        fit_encoder(mixed.slice(0, 0), "price")
    with pytest.raises(ValueError, match=r"Column `a` holds list.*--drop a"):
        fitted(pa.array([[1], [2]]))
    with pytest.raises(ValueError, match="Row 2: column `a` holds 'inf', which is not a finite number"):
        fitted([1.0, math.inf])
    with pytest.raises(ValueError, match=r"Column `a` holds numbers up to 1e\+308, too large to standardise; rescale"):
        fitted([1e308, -1e308])


@pytest.mark.parametrize("value", [1.5e300, -1.7e308, 3e6])
def test_a_value_beyond_reason_is_refused_by_its_row(value):
    encoder = fitted([1.0, 3.0])
    with pytest.raises(ValueError, match=r"Row 9: column `a` holds .*, over a million standard deviations"):
        encoder(pa.table({"a": [0.0, value]}), first_row=8)
    assert float(encode(encoder, [2 + LIMIT]).x[0, 0]) == pytest.approx(LIMIT)


def test_parts_and_wholes_agree(mixed):
    encoder = fit_encoder(mixed, "price")
    parts = torch.cat([encoder(mixed.slice(start, 33)).x for start in range(0, 200, 33)])
    assert torch.equal(parts, encoder(mixed).x)
    chunked = pa.concat_tables([mixed.slice(0, 70), mixed.slice(70)])
    assert torch.equal(encoder(chunked).x, encoder(mixed).x)
    assert encoder(mixed.slice(0, 0)).x.shape == (0, encoder.width)


def test_names_and_kinds(mixed):
    encoder = fit_encoder(mixed, "price")
    assert encoder.names == ("area", "area", *["colour"] * 5, "rooms", "rooms", *["sold"] * 4)
    assert encoder.expected == {"area": "number", "colour": "category", "rooms": "number", "sold": "category"}
    with pytest.raises(ValueError, match=r"Expected encoded rows of shape \(N, 13\), got \(2, 8\)"):
        encoder.decode(torch.zeros(2, 8))


def varied(rows: int) -> list[float]:
    """A column that stays, whatever their number."""
    return [math.sin(row) for row in range(rows)]


FINITE = st.floats(-1e15, 1e15, allow_nan=False).map(lambda value: float(f"{value:.4g}"))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), FINITE), min_size=2, max_size=20))
def test_numbers_survive_encoding_and_decoding(values):
    table = pa.table({"a": pa.array(values, pa.float64()), "b": varied(len(values)), "y": [0] * len(values)})
    encoder = fit_encoder(table, "y")
    if "a" in encoder.dropped:
        assert set(values) == {None}
        return
    encoded = encoder(table)
    assert encoded.x.isfinite().all()
    for row, value in zip(encoder.decode(encoded.x), values, strict=True):
        if value is None:
            assert row["a"] == "missing"
        else:
            scale = encoder.columns[0].scale
            assert float(row["a"]) == pytest.approx(
                value, abs=1e-5 * max(scale, abs(value - encoder.columns[0].center))
            )


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text("abcü ", max_size=3)), min_size=1, max_size=10))
def test_categories_survive_encoding_and_decoding(values):
    table = pa.table({"a": pa.array(values, pa.string()), "b": varied(len(values)), "y": [0] * len(values)})
    encoder = fit_encoder(table, "y")
    if "a" in encoder.dropped:
        assert not any(value and value.strip() for value in values)
        return
    encoded = encoder(table)
    assert (encoded.unknown, encoded.imputed) == ({}, {})
    for row, value in zip(encoder.decode(encoded.x), values, strict=True):
        assert row["a"] == ((value or "").strip() or "missing")


@pytest.mark.parametrize(
    ("value", "scale", "expected"),
    [
        (34.000001, 13.2, "34"),
        (208500.0037, 8e4, "208500"),
        (-0.0000001, 1.0, "0"),
        (0.12345678, 1.0, "0.12346"),
        (1.23456789e-12, 1e-12, "1.23457e-12"),
        (1600000000.25, 0.5, "1600000000.25"),
    ],
)
def test_readable_numbers(value, scale, expected):
    assert readable(value, scale) == expected


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    st.floats(-1e300, 1e300),
    st.floats(5e-324, 1e300, exclude_min=False),
    st.lists(st.text(max_size=5), min_size=1, max_size=5, unique=True),
    st.booleans(),
)
def test_json_round_trip_is_exact(center, scale, levels, missing):
    columns = (Number("ä", center, scale, missing), Category("b", tuple(levels[:1]), tuple(levels[1:]), not missing))
    encoder = Encoder(columns, "y", ("id",), ("a note",))
    assert encoder_from_json(json.loads(json.dumps(encoder.as_json()))) == encoder


NUMBER = {"kind": "number", "name": "a", "center": "0x0p+0", "scale": "0x1p+0", "missing": False}
CATEGORY = {"kind": "category", "name": "b", "levels": ["x"], "rare": [], "missing": False}
GOOD = {"target": "y", "dropped": [], "notes": [], "columns": [NUMBER, CATEGORY]}


@pytest.mark.parametrize(
    "bad",
    [
        [],
        None,
        {},
        {**GOOD, "more": 1},
        {**GOOD, "target": 3},
        {**GOOD, "target": "a"},
        {**GOOD, "dropped": "id"},
        {**GOOD, "notes": [1]},
        {**GOOD, "columns": []},
        {**GOOD, "columns": {"a": NUMBER}},
        {**GOOD, "columns": [NUMBER, NUMBER]},
        {**GOOD, "columns": [3]},
        {**GOOD, "columns": [{**NUMBER, "kind": "date"}]},
        {**GOOD, "columns": [{**NUMBER, "kind": ["number"]}]},
        {**GOOD, "columns": [{**NUMBER, "scale": "0x0p+0"}]},
        {**GOOD, "columns": [{**NUMBER, "scale": "-0x1p+0"}]},
        {**GOOD, "columns": [{**NUMBER, "center": "nan"}]},
        {**GOOD, "columns": [{**NUMBER, "center": "inf"}]},
        {**GOOD, "columns": [{**NUMBER, "center": 0.5}]},
        {**GOOD, "columns": [{**NUMBER, "center": "0x1p+99999"}]},
        {**GOOD, "columns": [{**NUMBER, "missing": 1}]},
        {**GOOD, "columns": [{**NUMBER, "name": None}]},
        {**GOOD, "columns": [{key: value for key, value in NUMBER.items() if key != "scale"}]},
        {**GOOD, "columns": [{**CATEGORY, "levels": []}]},
        {**GOOD, "columns": [{**CATEGORY, "levels": [1]}]},
        {**GOOD, "columns": [{**CATEGORY, "levels": "xyz"}]},
        {**GOOD, "columns": [{**CATEGORY, "rare": ["x"]}]},
    ],
)
def test_damaged_descriptions_are_refused(bad):
    assert encoder_from_json(GOOD).width == 3
    with pytest.raises(ValueError, match=r"is damaged .*; fit and save the model again") as error:
        encoder_from_json(bad)
    assert "\n" not in str(error.value)


def test_new_levels_are_rare_ones_where_they_are_to_be_expected():
    """Of 60 tickets half occur once, so that the next row has a new one with chance ½: that must not be far away."""
    tickets = [f"once {i}" for i in range(30)] + ["often"] * 24 + ["twice"] * 2 + ["four"] * 4
    encoder = fitted(tickets)
    (column,) = encoder.columns
    assert isinstance(column, Category)
    assert column.levels == ("often",)
    assert column.open
    assert "new ones with them" in encoder.notes[0]
    encoded = encoder(pa.table({"a": ["often", "twice", "never seen", None]}))
    assert encoded.x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert not encoded.unknown
    assert column.decode(encoded.x.numpy()) == ["often", "other", "other", "missing"]
    assert encoder_from_json(json.loads(json.dumps(encoder.as_json()))).columns == encoder.columns


def test_a_column_whose_levels_hardly_repeat_is_left_out():
    cabins = [f"cabin {i // 2 if i < 60 else i}" for i in range(90)]
    encoder = fit_encoder(pa.table({"cabin": cabins, "a": [i / 2 for i in range(90)], "y": [0.5] * 90}), "y")
    assert [column.name for column in encoder.columns] == ["a"]
    assert "none of them in 5 rows: left out" in encoder.notes[0]


def test_a_level_that_is_new_in_a_closed_column_stays_far():
    encoder = fitted(["red", "blue", "green"] * 30 + ["odd"])
    (column,) = encoder.columns
    assert not column.open
    assert encoder(pa.table({"a": ["mauve"]})).x.max() == UNKNOWN


@pytest.mark.parametrize(
    ("texts", "first"),
    [
        (["3 Mar 2021", "14 December 2020"], "2021-03-03"),
        (["March 3, 2021", "Dec 14 2020"], "2021-03-03"),
        (["2021-Mar-03", "2020-dec-14"], "2021-03-03"),
        (["03-MAR-21", "14-DEC-99"], "2021-03-03"),
        (["Wed, 03 Mar 2021 10:30:00 GMT", "Mon, 14 Dec 2020 09:00:00 +0000"], "2021-03-03 10:30"),
        (["Wednesday, March 3rd, 2021", "Monday, December 14th, 2020"], "2021-03-03"),
        (["3/14/2021 1:30 PM", "3/15/2021 12:00 AM"], "2021-03-14 13:30"),
        (["2021-03-03 12:05:00 am", "2021-03-03 12:05:00 p.m."], "2021-03-03 00:05"),
        (["31-12-2020", "03-01-2021"], "2020-12-31"),
        (["2021.03.03", "2020.12.14"], "2021-03-03"),
        (["3 Mar 2021", "04/13/2021", "4 May 2020"], "2021-03-03"),
    ],
)
def test_dates_by_the_names_of_months_and_by_halves_of_the_day(texts, first):
    encoder = fitted(texts, "day")
    (date,) = encoder.columns
    assert isinstance(date, Date)
    x = encoder(pa.table({"day": texts})).x
    assert encoder.decode(x)[0] == {"day": first}


@pytest.mark.parametrize("text", ["3 Mai 2021", "32 Mar 2021", "Mar", "2021-03-03 13:30 PM", "2021-03-03 0:30 AM"])
def test_what_is_no_date_is_refused_by_its_row(text):
    encoder = fitted(["3 Mar 2021", "14 December 2020"], "day")
    with pytest.raises(ValueError, match=r"Row 2: column `day` holds .*, which is not a date"):
        encoder(pa.table({"day": ["3 Mar 2021", text]}))


def test_a_column_of_times_with_halves_of_the_day_is_refused_with_advice():
    with pytest.raises(ValueError, match="times of the day"):
        fitted(["9:30 AM", "1:15 pm"], "day")


@pytest.mark.parametrize("word", ["n/a", "-", "?", "unknown", "Unknown", "NULL", "none", ".", "N.A.", "--"])
def test_words_among_dates_stand_for_missing_ones(word):
    encoder = fitted(["2020-01-01", word, "2020-03-01", word], "day")
    assert isinstance(encoder.columns[0], Date)
    assert encoder.columns[0].missing
    x = encoder(pa.table({"day": [word, "2020-01-01", None]})).x
    assert encoder.missing(x) == [["day"], [], ["day"]]
    assert ("taken as missing (2 rows)" in encoder.notes[0]) == (word not in ("n/a", "NULL"))
