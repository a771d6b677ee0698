"""The target column: its task, classes and amounts there and back, and what cannot be learnt."""

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
from sklearn.preprocessing import LabelEncoder, StandardScaler

from dapcal.tables import Classes, Numbers, fit_target, guess, target_from_json, with_target
from dapcal.tables.targets import MAX_CLASSES, without_single


def column(values, kind=None):
    return pa.chunked_array([pa.array(values, kind)])


@pytest.mark.parametrize(
    ("values", "task", "reason"),
    [
        (["a", "b"], "classification", "texts: classification"),
        ([True, False, None], "classification", "booleans: classification"),
        ([0, 1, 1], "classification", "2 distinct whole numbers among 3 rows: classification; use --task regression"),
        ([0.0, 1.0, None], "classification", "2 distinct whole numbers among 2 rows"),
        ([*range(12)] * 100, "classification", "12 distinct whole numbers among 1,200 rows"),
        ([*range(12)] * 5, "regression", "12 distinct whole numbers among 60 rows: regression; use --task class"),
        ([*range(30)] * 100, "regression", "30 distinct whole numbers among 3,000 rows"),
        ([1.5, 2.0], "regression", "numbers with fractions: regression; use --task classification if they are classes"),
    ],
)  # fmt: skip
def test_the_task_is_guessed_with_a_reason(values, task, reason):
    guessed = guess(column(values))
    assert guessed.name == task
    assert reason in guessed.reason
    if len(values) >= 60:
        assert isinstance(fit_target(column(values)), Classes if task == "classification" else Numbers)


def test_classes_are_sorted_and_encoded_as_scikit_learn_does():
    names = np.random.default_rng(0).choice(["red", "Blue", "ä", "green"], 50)
    classes = fit_target(column(names))
    reference = LabelEncoder().fit(names)
    assert classes.labels == tuple(reference.classes_)
    encoded = classes.encode(column(names))
    assert encoded.dtype == torch.int64
    np.testing.assert_array_equal(encoded, reference.transform(names))
    assert classes.decode(encoded) == list(names)


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.int8()])
def test_classes_that_are_numbers_are_sorted_by_value(kind):
    classes = fit_target(column([10, 9, -2, 10, 9, -2], kind), "classification")
    assert classes == Classes(("-2", "9", "10"), "number")
    assert classes.expected == "number"
    for values in ([9, -2], [9.0, -2.0], ["9.0", " -2 "], ["9", "-2"]):
        assert classes.encode(column(values)).tolist() == [1, 0]


def test_classes_with_fractions_and_booleans():
    assert fit_target(column([0.5, 1.0, 0.5, 1.0]), "classification").labels == ("0.5", "1")
    assert fit_target(column([-0.0, 0.0, 1.0, 1.0])).labels == ("0", "1")
    sold = fit_target(column([True, False, True, False]))
    assert sold == Classes(("false", "true"), "boolean")
    assert sold.encode(column(["TRUE", "false"])).tolist() == [1, 0]
    assert fit_target(column(["b", "a", "b", "a"]).dictionary_encode()).labels == ("a", "b")


def test_amounts_are_standardised_as_scikit_learn_does():
    values = 1e5 + 2e4 * np.random.default_rng(0).normal(size=100)
    target = fit_target(column([*values, None, math.nan]))
    reference = StandardScaler().fit(values[:, None])
    assert target.center == pytest.approx(reference.mean_[0], rel=1e-12)
    assert target.scale == pytest.approx(reference.scale_[0], rel=1e-12)
    encoded = target.encode(column(values))
    assert (encoded.shape, encoded.dtype) == ((100, 1), torch.float32)
    np.testing.assert_allclose(encoded, reference.transform(values[:, None]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(target.decode(encoded)[:, 0], values, rtol=1e-6)
    assert target.decode(torch.zeros(3, 2)).shape == (3, 2)
    assert (target.labels, target.expected) == ((), "number")


@pytest.mark.parametrize(
    ("values", "task", "match"),
    [
        (["a", "a", None], None, r"one class only \('a'\); give rows of at least two"),
        ([3, 3, 3], None, "The target is 3 in every row; there is nothing to predict"),
        ([3.5, 3.5, 3.5], None, "The target is 3.5 in every row; there is nothing to predict"),
        ([3, 3, 3], "regression", "The target is 3 in every row"),
        ([2_000_000] * 3, "regression", "The target is 2,000,000 in every row"),
        ([None, None], None, "The target has no values; choose another column"),
        ([math.nan, math.nan], None, "The target has no values; choose another column"),
        (["", "NA"], None, "The target has no values; choose another column"),
        (["a", "a", "b", "c"], None, r"2 of 3 classes have a single row \('b', 'c'\).*leave those rows out$"),
        ([0.5, 1.0, 0.5], "classification", r"1 of 2 classes have a single row \('1'\).*or use --task regression"),
        ([*map(str, range(MAX_CLASSES + 1))] * 2, None, "at most 1,000 classes, got 1,001; choose another target"),
        ([*range(MAX_CLASSES + 1)] * 2, "classification", "at most 1,000 classes, got 1,001; use --task regression"),
        (["a", "b"], "regression", "Expected numbers in the target for regression, got texts; use --task"),
        ([True, False], "regression", "got booleans; use --task classification"),
        ([datetime.date(2024, 1, 1)] * 3, None, "The target holds dates or times; make numbers of it"),
        (["2024-01-01", "2024-01-02", None], None, "The target holds dates or times; make numbers of it"),
        ([1e-200, 2e-200, 2.5e-200], "regression", "values differ by 1.5e-200 around 1e-200, too little"),
        ([1.0, math.inf], None, "holds 'inf', which is not a finite number"),
        ([1e308, -1e308, 1.5], None, "too large to standardise; rescale it"),
        ([2**53, 2**53 + 1] * 2, "classification", "numbers beyond 9007199254740992 as classes; write them as texts"),
        (["a", "b"], "ranking", "Expected `task` as classification or regression, got 'ranking'"),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt(values, task, match):
    with pytest.raises(ValueError, match=match) as error:
        fit_target(column(values), task)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "values", "match"),
    [
        (Classes(("blue", "red"), "text"), ["red", "rad"], r"Row 8: the target 'rad' is not a .*did you mean 'red'\?"),
        (Classes(("0", "1"), "number"), [1, 7], "Row 8: the target '7' is not a class of .*; these are: 0, 1"),
        (Classes(("0", "1"), "number"), ["1", "x"], "Row 8: column `target` holds 'x', which is not a number"),
        (Classes(("a", "b"), "text"), ["a", None], "Row 8: the target is missing; leave out such rows"),
        (Numbers(0.0, 1.0), [1.0, None], "Row 8: the target is missing; leave out such rows"),
        (Numbers(0.0, 1e-3), [1.0, 1.7e308], "Row 8: the target lies more than a million standard deviations"),
    ],
)  # fmt: skip
def test_what_cannot_be_encoded(target, values, match):
    with pytest.raises(ValueError, match=match):
        target.encode(column(values), first_row=7)


@pytest.mark.parametrize("values", [["a", None, "NA", "b"], [1.0, None, math.nan, 2.0], [True, None, None, False]])
def test_rows_without_a_target_are_left_out_with_a_note(values):
    table = pa.table({"x": [0, 1, 2, 3], "y": values})
    rows, note = with_target(table, "y")
    assert rows["x"].to_pylist() == [0, 3]
    assert note == "2 of 4 rows have no `y`: left out"
    assert with_target(rows, "y") == (rows, None)
    with pytest.raises(ValueError, match="No row has a value of `y`; choose another target"):
        with_target(table.slice(1, 2), "y")
    with pytest.raises(ValueError, match=r"There is no column `yy`; did you mean `y`\?"):
        with_target(table, "yy")


def test_errors_call_the_column_by_its_name():
    infinite, huge, mixed = column([1.0, math.inf]), column([1e308, -1e308, 1.5]), column(["1", "x"])
    refused = [
        lambda: with_target(pa.table({"price": infinite}), "price"),
        lambda: guess(infinite, "price"),
        lambda: fit_target(infinite, name="price"),
        lambda: fit_target(huge, "regression", "price"),
        lambda: Numbers(0.0, 1.0).encode(mixed, name="price"),
        lambda: Classes(("0", "1"), "number").encode(mixed, name="price"),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"[Cc]olumn `price` holds"):
            call()


def test_dates_reach_the_error_that_explains_them():
    table = pa.table({"y": [datetime.date(2024, 1, 1), None]})
    rows, _ = with_target(table, "y")
    with pytest.raises(ValueError, match="dates or times"):
        fit_target(rows["y"])


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.floats(-1e300, 1e300), st.floats(5e-324, 1e300), st.lists(st.text(max_size=4), min_size=2, unique=True))
def test_json_round_trip_is_exact(center, scale, labels):
    for target in (Numbers(center, scale), Classes(tuple(labels), "text")):
        assert target_from_json(json.loads(json.dumps(target.as_json()))) == target


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {"kind": "numbers", "center": "0x0p+0", "scale": "0x0p+0"},
        {"kind": "numbers", "center": "nan", "scale": "0x1p+0"},
        {"kind": "numbers", "center": 0.0, "scale": "0x1p+0"},
        {"kind": "numbers", "center": "0x0p+0"},
        {"kind": "classes", "labels": ["a"], "original": "text"},
        {"kind": "classes", "labels": ["a", "a"], "original": "text"},
        {"kind": "classes", "labels": ["a", 1], "original": "text"},
        {"kind": "classes", "labels": ["a", ["b"]], "original": "text"},
        {"kind": "classes", "labels": ["a", "b"], "original": "date"},
        {"kind": "classes", "labels": ["a", "b"], "original": ["text"]},
        {"kind": "classes", "labels": ["a", "b"], "original": "text", "more": 1},
        {"kind": "ranks", "labels": ["a", "b"], "original": "text"},
    ],
)
def test_damaged_descriptions_are_refused(bad):
    with pytest.raises(ValueError, match=r"is damaged.*; fit and save the model again"):
        target_from_json(bad)


def test_classes_of_a_single_row_are_left_out_with_a_note():
    table = pa.table({"x": range(9), "y": ["a", "b", "a", "b", "rare", "a", "b", "a", "odd"]})
    rows, note = without_single(table, "y")
    assert rows["y"].to_pylist() == ["a", "b", "a", "b", "a", "b", "a"]
    assert note is not None
    assert note.startswith("2 of 4 classes of `y` have a single row ('odd', 'rare')")
    numbers = pa.table({"y": [0.0, 1.0, 0.0, 1.0, 2.0]})
    rows, note = without_single(numbers, "y", "classification")
    assert rows["y"].to_pylist() == [0.0, 1.0, 0.0, 1.0]
    assert note is not None
    assert "1 of 3 classes of `y` has a single row ('2')" in note


@pytest.mark.parametrize(
    "values", [["a", "a", "b"], ["a", "a", "b", "b"], ["a", "a", "b", "b", "c", "d", "e", "f", "g"]]
)
def test_a_target_of_single_rows_stays_for_the_refusal(values):
    table = pa.table({"y": values})
    assert without_single(table, "y") == (table, None)


def test_amounts_have_no_classes_to_leave_out():
    table = pa.table({"y": [0.5, 1.5, 0.5, 2.5]})
    assert without_single(table, "y") == (table, None)
