"""Explanations of the estimators: targets in the unit of y, rows by the index of X, words and a table for notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from dapcal.sklearn import DistanceAwareClassifier, DistanceAwareRegressor

TINY = {"members": 2, "hidden": (8,), "epochs": 8, "fast": True, "random_state": 0}


@pytest.fixture(scope="module")
def houses():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"area": random.normal(80, 15, 300).round(), "city": random.choice(["Rome", "Oslo"], 300)},
        index=[f"h{row}" for row in range(300)],
    )
    price = 3000 * frame["area"] + 50000 * (frame["city"] == "Rome")
    return frame, price.rename("price")


@pytest.fixture(scope="module")
def regressor(houses):
    return DistanceAwareRegressor(**TINY).fit(*houses)


def test_answers_are_those_of_predict(houses, regressor):
    frame = houses[0][:3].assign(area=[80.0, 300.0, 90.0])
    told = regressor.predict_frame(frame)
    for row, one in enumerate(regressor.explain(frame)):
        (mean,), (deviation,), (lower,), (upper,), (epistemic,) = (
            getattr(one.after, name) for name in ("mean", "deviation", "lower", "upper", "epistemic")
        )
        expected = told.iloc[row][["prediction", "std", "lower", "upper"]].astype(float)
        np.testing.assert_allclose([mean, deviation, lower, upper], expected)
        assert epistemic**0.5 == pytest.approx(told.iloc[row].epistemic)
        assert one.row == frame.index[row]
        assert one.reason == told.iloc[row].reason
        assert one.before.deviation[0] <= deviation


def test_neighbours_are_rows_of_the_training_table(houses, regressor):
    """By brute force: the label, the target and the cells of every neighbour are one row of what was fitted."""
    frame, price = houses
    for one in regressor.explain(frame[:20], neighbours=3):
        assert len(one.neighbours) == 3
        assert [near.distance for near in one.neighbours] == list(one.nearest.distances)
        for near in one.neighbours:
            assert near.target == price[near.row]
            assert dict(near.values) == {"area": f"{frame.area[near.row]:g}", "city": frame.city[near.row]}


def test_an_own_training_row_is_its_nearest_neighbour(houses):
    frame, price = houses
    numbers = frame[["area"]].assign(year=np.arange(300.0))
    model = DistanceAwareRegressor(**TINY).fit(numbers, price)
    label = model.train_index_[7]
    (one,) = model.explain(numbers.loc[[label]], neighbours=2)
    assert (one.neighbours[0].row, one.neighbours[0].distance) == (label, 0)
    assert one.neighbours[0].target == price[label]
    assert float(one.neighbours[0].values["year"]) == numbers.year[label]


def test_words(houses, regressor):
    (one,) = regressor.explain(houses[0][:1].assign(area=900.0), neighbours=2)
    text = str(one)
    assert text.startswith("Row h0: `price` ")
    assert "Out of distribution: yes, " in text
    assert "Far columns: `area` = 900" in text
    table = text.splitlines()[-4:]
    assert table[0].split() == ["area", "city", "price"]
    assert table[1].split() == ["row", "h0", "900", houses[0].city.iloc[0], "?"]
    assert table[2].startswith(f"training row {one.neighbours[0].row} at ")
    assert "explanation of row h0" in repr(one)
    assert len(repr(one).splitlines()) == 1


def test_a_notebook_shows_a_table_and_runs_nothing_of_it(houses):
    frame = houses[0].rename(columns={"city": "<script>"})
    classes = np.where(houses[1] > houses[1].median(), "<b>dear", "cheap")
    (one,) = DistanceAwareClassifier(**TINY).fit(frame, classes).explain(frame[:1], neighbours=2)
    tags: list[str] = []
    cells: list[str] = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, _: tags.append(tag)  # type: ignore[method-assign]
    reader.handle_data = cells.append  # type: ignore[method-assign]
    reader.feed(one._repr_html_())
    assert set(tags) == {"ul", "li", "table", "thead", "tbody", "tr", "th", "td"}
    assert tags.count("tr") == 4
    assert {"<script>", "target", "row h0"} <= set(cells)
    assert "dear" in str(one)


def test_rows_without_an_index_have_places(houses):
    x, price = houses[0][["area"]].to_numpy().tolist(), houses[1].tolist()
    model = DistanceAwareRegressor(**TINY).fit(x, price)
    one = model.explain(x[:2])[1]
    assert one.row == 1
    assert one.target == "target"
    assert all(
        near.target == price[near.row] and float(near.values["column 1"]) == x[near.row][0] for near in one.neighbours
    )
    assert model.predict_frame(x[:2]).index.tolist() == [0, 1]  # lists have an `index` of another kind


def test_the_verdict_is_that_of_the_estimator(houses):
    model = DistanceAwareRegressor(**TINY, alpha=1.0).fit(*houses)
    assert "Out of distribution: yes" in str(model.explain(houses[0][:1])[0])
