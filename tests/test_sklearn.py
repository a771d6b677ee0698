"""The estimators behave as scikit-learn's own, and say what lies away from their data."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings

import joblib
import numpy as np
import pytest
from scipy.stats import norm
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from dapcal.sklearn import DistanceAwareClassifier, DistanceAwareRegressor

QUICK = {"hidden": (16,), "epochs": 15, "members": 2, "learning_rate": 0.03, "batch_size": 32, "fast": True}
CHECKED = {**QUICK, "hidden": (8,), "epochs": 10, "learning_rate": 0.1, "batch_size": 256}  # some checks want a score


@parametrize_with_checks([DistanceAwareClassifier(**CHECKED), DistanceAwareRegressor(**CHECKED)])
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def flowers():
    return load_iris(return_X_y=True, as_frame=True)


@pytest.fixture(scope="module")
def classifier(flowers):
    X, y = flowers
    return DistanceAwareClassifier(**QUICK, random_state=0).fit(
        X, y.map({0: "setosa", 1: "versicolor", 2: "virginica"})
    )


@pytest.fixture(scope="module")
def line():
    """A noisy line in other units than standard ones, and its inputs far away."""
    rng = np.random.default_rng(0)
    X = rng.normal(100, 10, (400, 2))
    return X, 1000 + 50 * X[:, 0] + rng.normal(0, 100, 400)


@pytest.fixture(scope="module")
def regressor(line):
    return DistanceAwareRegressor(**{**QUICK, "epochs": 60}, random_state=0).fit(*line)


def test_the_verdict_counts_as_in_outlier_detectors(classifier, flowers):
    X = flowers[0]
    both = np.concatenate([X, 100 * X])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an array where a frame was fitted
        verdict = classifier.ood_decision_function(both)
        np.testing.assert_array_equal(verdict <= 0, classifier.is_ood(both))
        np.testing.assert_allclose(verdict, classifier.ood_p_value(both) - classifier.alpha)
    assert (verdict[len(X) :] < 0).all()


def test_labels_may_be_strings(classifier, flowers):
    assert classifier.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert classifier.feature_names_in_.tolist() == list(flowers[0])
    proba = classifier.predict_proba(flowers[0])
    assert np.array_equal(classifier.predict(flowers[0]), classifier.classes_[proba.argmax(1)])
    assert np.mean(classifier.predict(flowers[0]) == classifier.classes_[flowers[1]]) > 0.9
    np.testing.assert_allclose(np.exp(classifier.predict_log_proba(flowers[0])), proba)


@pytest.mark.parametrize("name", ["classifier", "regressor"])
def test_far_inputs_are_told_from_near_ones(name, request, flowers, line):
    model = request.getfixturevalue(name)
    X = np.asarray(flowers[0] if name == "classifier" else line[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X does not have valid feature names")
        near, far = (model.score_samples(x) for x in (X, 10 * X))
        assert far.max() < near.min()
        assert model.is_ood(10 * X).all()
        assert np.array_equal(model.is_ood(X, alpha=0.3), model.ood_p_value(X) <= 0.3)
        assert model.is_ood(X).mean() < 0.2


def test_far_probabilities_are_less_sure(classifier, flowers):
    sure = classifier.predict_proba(flowers[0]).max(1).mean()
    assert classifier.predict_proba(flowers[0] * 10).max(1).mean() < sure


def test_intervals_lie_around_the_mean_and_are_as_wide_as_the_noise_asks_for(regressor, line):
    X, y = line
    mean, std = regressor.predict(X, return_std=True)
    again, lower, upper = regressor.predict(X, interval=0.9)
    assert np.array_equal(mean, regressor.predict(X))
    np.testing.assert_allclose(again, mean)
    half = (upper - lower) / (2 * std)  # as wide as rows ask for that were left out, each by networks of its own (CV+)
    np.testing.assert_allclose(half, norm.ppf(0.95), rtol=0.3)
    np.testing.assert_allclose((lower + upper) / 2, mean, atol=0.2 * std.min())
    assert 0.8 < np.mean((lower < y) & (y < upper)) < 0.97
    assert 80 < std.min() < 130  # the noise is 100, in the units of y


def test_standard_deviations_grow_with_distance(regressor, line):
    _, near = regressor.predict(line[0], return_std=True)
    _, far = regressor.predict(line[0] + 1000, return_std=True)
    assert far.min() > near.max()


def test_shifted_and_scaled_targets_give_the_same_model(regressor, line):
    X, y = line
    other = clone(regressor).fit(X, 3 * y - 7)
    np.testing.assert_allclose(other.predict(X), 3 * regressor.predict(X) - 7, rtol=1e-6)
    frames = other.predict_frame(X), regressor.predict_frame(X)
    for column, factor in {"std": 3, "epistemic": 3, "aleatoric": 3, "distance": 1, "ood_p_value": 1}.items():
        np.testing.assert_allclose(frames[0][column], factor * frames[1][column], rtol=1e-4)


def test_a_frame_has_the_index_of_its_rows(classifier, flowers):
    X = flowers[0].set_index(np.arange(150) * 7).iloc[::-1]
    frame = classifier.predict_frame(X)
    assert frame.index.equals(X.index)
    assert list(frame) == [
        "prediction", "probability_setosa", "probability_versicolor", "probability_virginica",
        "epistemic", "aleatoric", "distance", "ood_p_value", "ood", "reason",
    ]  # fmt: skip
    probabilities = frame.filter(like="probability").to_numpy()
    np.testing.assert_allclose(probabilities, classifier.predict_proba(X))
    np.testing.assert_allclose(frame.epistemic + frame.aleatoric, 1 - (probabilities**2).sum(1))
    assert np.array_equal(frame.ood, classifier.is_ood(X))
    assert np.array_equal(frame.ood, frame.reason != "")
    assert np.array_equal(frame.prediction, classifier.predict(X))


def test_a_frame_of_numbers_splits_the_variance(regressor, line):
    frame = regressor.predict_frame(line[0], interval=0.5)
    np.testing.assert_allclose(frame["std"] ** 2, frame.epistemic**2 + frame.aleatoric**2)
    np.testing.assert_allclose(frame[["prediction", "lower", "upper"]].T, regressor.predict(line[0], interval=0.5))


def test_long_tables_are_predicted_in_chunks(regressor, line, monkeypatch):
    X = line[0] + np.random.default_rng(1).normal(size=line[0].shape)  # held-out rows would tie with their own scores
    whole = regressor.predict_frame(X)
    monkeypatch.setattr("dapcal.sklearn.base.CHUNK", 7)
    chunks = regressor.predict_frame(X)
    assert list(chunks.pop("reason")) == list(whole.pop("reason"))
    np.testing.assert_allclose(chunks.astype(float), whole.astype(float), rtol=1e-6)


@pytest.mark.parametrize("posterior", ["ensemble", "laplace", "variational", "swag", "dropout"])
def test_estimators_survive_a_file(posterior, flowers, tmp_path):
    X, y = flowers
    model = DistanceAwareClassifier(**QUICK, posterior=posterior, random_state=0).fit(X, y)
    joblib.dump(model, tmp_path / "model")
    for again in (pickle.loads(pickle.dumps(model)), joblib.load(tmp_path / "model")):
        assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
        assert np.array_equal(again.score_samples(X), model.score_samples(X))


def test_pipelines_and_grid_searches_take_them(flowers):
    X, y = flowers
    pipeline = make_pipeline(PCA(2), DistanceAwareClassifier(**QUICK, random_state=0))
    search = GridSearchCV(pipeline, {"distanceawareclassifier__prior_scale": [0.01, 1.0]}, cv=2, scoring="neg_log_loss")
    search.fit(X, y)
    assert search.best_params_ == {"distanceawareclassifier__prior_scale": 1.0}
    assert search.score_samples(X).shape == (150,)


def test_a_random_state_gives_the_same_model(flowers):
    X, y = flowers
    first, again, other = (
        DistanceAwareClassifier(**QUICK, random_state=seed).fit(X, y).predict_proba(X) for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)


def test_transformers_that_give_frames_change_nothing(regressor, line):
    with config_context(transform_output="pandas"):
        np.testing.assert_allclose(regressor.predict(line[0]), clone(regressor).fit(*line).predict(line[0]))


def test_both_kinds_of_width_at_once_are_refused(regressor, line):
    with pytest.raises(ValueError, match="got both; predict_frame"):
        regressor.predict(line[0], return_std=True, interval=0.9)


def test_bad_parameters_are_refused_by_fit(flowers):
    with pytest.raises(ValueError, match="`posterior` as one of ensemble"):
        DistanceAwareClassifier(posterior="magic").fit(*flowers)


class Absent:
    """Has imports of a package fail as where it is not installed; None in its place would trip scikit-learn 1.6."""

    def find_spec(self, name, *_):
        if name == "pandas":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_missing_extras_are_named(regressor, line, monkeypatch):
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ImportError, match="predict_frame needs pandas; install it with: pip install pandas"):
        regressor.predict_frame(line[0])
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "dapcal.sklearn")
    with pytest.raises(ImportError, match=r"install it with: pip install 'dapcal\[sklearn\]'"):
        importlib.import_module("dapcal.sklearn")


@pytest.fixture(scope="module")
def prices():
    """Amounts, of which a tenth of a straight line would go below 0."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    return X, np.maximum(0.0, X[:, 0]) + rng.uniform(0, 0.05, 300)


def test_what_is_never_below_0_is_never_predicted_below_it(prices):
    X, y = prices
    model = DistanceAwareRegressor(**QUICK, random_state=0).fit(X, y)
    away = 10 * X
    assert model.bounds_ == (0.0, np.inf)
    assert any("no target is below 0" in note and "bounds=(None, None)" in note for note in model.calibrated_.notes)
    frame = model.predict_frame(away)
    for values in (model.predict(away), model.predict_interval(away), frame[["prediction", "lower", "upper"]]):
        assert np.asarray(values).min() == 0
    free = clone(model).set_params(bounds=(None, None)).fit(X, y)
    assert free.bounds_ == (-np.inf, np.inf)
    assert not any("below 0" in note for note in free.calibrated_.notes)
    assert free.predict_interval(away).min() < 0


def test_bounds_are_those_given(prices):
    X, y = prices
    model = DistanceAwareRegressor(**QUICK, random_state=0, bounds=(-1, 4)).fit(X, y)
    assert model.bounds_ == (-1.0, 4.0)
    ends = model.predict_interval(30 * X)
    assert ends.min() == -1
    assert ends.max() == 4
    assert np.asarray(pickle.loads(pickle.dumps(model)).predict(30 * X)).max() <= 4


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((1, None), "The target goes from .*, beyond `bounds`; correct those rows, or widen them"),
        ((3, 1), "`bounds` as least,greatest, got 3,1; exchange them"),
        ((2e6, 1e6), "`bounds` as least,greatest, got 2000000,1000000; exchange them"),
        (5, r"Expected `bounds` as \(least, greatest\), None for no limit, e.g. \(0, None\), got 5"),
        ("ab", "Expected `bounds` as"),
        ((0, 1, 2), "Expected `bounds` as"),
    ],
)
def test_bounds_that_cannot_be_are_refused(bounds, words, prices):
    with pytest.raises(ValueError, match=words):
        DistanceAwareRegressor(**QUICK, bounds=bounds).fit(*prices)
