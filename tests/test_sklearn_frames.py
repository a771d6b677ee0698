"""Estimators on DataFrames as people have them: texts, categories, dates, missing cells."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dapcal.sklearn import DistanceAwareClassifier, DistanceAwareRegressor

TINY = {"members": 2, "hidden": (8,), "epochs": 8, "fast": True, "random_state": 0}


@pytest.fixture(scope="module")
def houses():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "area": random.normal(80, 15, 300).round(),
            "city": pd.Categorical(random.choice(["Rome", "Oslo"], 300)),
            "heating": random.choice(["gas", "oil", None], 300),
            "sold": pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 700, 300), "D"),
        },
        index=[f"h{row}" for row in range(300)],
    )
    return frame, 3 * frame["area"] + 50 * (frame["city"] == "Rome").to_numpy()


@pytest.fixture(scope="module")
def regressor(houses):
    return DistanceAwareRegressor(**TINY).fit(*houses)


def test_names_and_categories_are_kept(houses, regressor):
    frame = houses[0]
    assert regressor.feature_names_in_.tolist() == list(frame)
    assert regressor.n_features_in_ == 4
    assert regressor.predict(frame).shape == (300,)
    assert regressor.predict_frame(frame[:5]).index.tolist() == frame.index[:5].tolist()
    found = regressor.predict(frame.assign(city="Rome")) - regressor.predict(frame.assign(city="Oslo"))
    assert found.mean() > 10
    with pytest.raises(ValueError, match="feature names should match"):
        regressor.predict(frame.rename(columns={"area": "aera"}))
    with pytest.raises(ValueError, match="Expected a DataFrame with the columns"):
        regressor.predict(frame.to_numpy())


def test_one_wrong_cell_is_flagged_and_explained(houses, regressor):
    frame = houses[0][:20]
    assert regressor.is_ood(frame.assign(area=10 * frame["area"])).mean() > 0.9
    assert regressor.is_ood(frame.assign(city="Romulus")).mean() > 0.9
    (one,) = regressor.explain(frame[:1].assign(area=900.0), neighbours=2)
    assert one.columns[0].name == "area"
    assert one.columns[0].is_outside
    assert len(one.nearest.rows) == 2


def test_intervals_are_those_of_predict(houses, regressor):
    frame = houses[0][:10]
    _, lower, upper = regressor.predict(frame, interval=0.8)
    np.testing.assert_array_equal(regressor.predict_interval(frame, 0.8), np.stack([lower, upper], 1))


def test_pickling_and_cross_validation(houses, regressor):
    frame, y = houses
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(frame), regressor.predict(frame))
    classes = np.where(y > y.median(), "dear", "cheap")
    scores = cross_val_score(DistanceAwareClassifier(**TINY), frame, classes, cv=2)
    assert scores.mean() > 0.6


def test_plain_numbers_are_explained_too():
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 3))
    model = DistanceAwareRegressor(**TINY).fit(x, x[:, 0])
    assert [len(one.columns) for one in model.explain(x[:2])] == [3, 3]


def test_intervals_are_a_frame_where_output_is_set_so(houses, regressor):
    frame = houses[0][:10]
    plain = regressor.predict_interval(frame)
    model = pickle.loads(pickle.dumps(regressor))
    with config_context(transform_output="pandas"):
        everywhere = model.predict_interval(frame)
        assert isinstance(model.set_output(transform="default").predict_interval(frame), np.ndarray)
    shown = model.set_output(transform="pandas").set_output().predict_interval(frame)
    for found in (shown, everywhere):
        assert list(found) == ["lower", "upper"]
        assert found.index.equals(frame.index)
        np.testing.assert_array_equal(found, plain)
    assert isinstance(clone(model).fit(*houses).predict_interval(frame[:2]), pd.DataFrame)
    assert isinstance(model.predict(frame), np.ndarray)
    with pytest.raises(ValueError, match="`transform` as default or pandas, got 'polars'"):
        model.set_output(transform="polars")


def test_a_pipeline_of_frames_keeps_names_and_categories(houses):
    frame, y = houses
    scaled = make_column_transformer(
        (StandardScaler(), ["area"]), remainder="passthrough", verbose_feature_names_out=False
    )
    pipeline = make_pipeline(scaled, DistanceAwareRegressor(**TINY)).set_output(transform="pandas").fit(frame, y)
    assert pipeline[-1].feature_names_in_.tolist() == ["area", "city", "heating", "sold"]
    (one,) = pipeline[-1].explain(pipeline[:-1].transform(frame[:1].assign(city="Romulus")))
    assert one.row == "h0"
    assert {near.row for near in one.neighbours} < set(frame.index)
    assert next(column for column in one.columns if column.name == "city").is_outside


def test_arrays_of_texts_are_refused_with_the_way(houses):
    frame, y = houses
    words = r"could not convert string to float: .*; give texts as columns of a DataFrame, .* set_output\(transform="
    with pytest.raises(ValueError, match=words):
        DistanceAwareRegressor(**TINY).fit(frame[["area", "city"]].to_numpy(), y)
    model = DistanceAwareRegressor(**TINY).fit(frame[["area"]].to_numpy(), y)
    with pytest.raises(ValueError, match=words):
        model.predict([["Rome"]])
