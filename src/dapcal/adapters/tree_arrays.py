"""Fitted ensembles of trees in scikit-learn's manner as plain arrays, draw by draw.

A single tree of a forest or of a bag is a draw, and so is a boosting model. Nothing of scikit-learn is imported: arrays
are read off fitted objects, and what they predict is compared with what these predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapcal.adapters.estimators import SMOOTHING
from dapcal.likelihoods import ClassLikelihood, Likelihood
from dapcal.networks.forest_layout import Draw, Tree, forest
from dapcal.posteriors.trees import TreePosterior

KINDS = {
    "BaseForest": "a random forest or extra trees",
    "BaseBagging": "bagging of trees",
    "BaseGradientBoosting": "gradient boosting",
    "BaseHistGradientBoosting": "histogram gradient boosting",
    "BaseDecisionTree": "a tree",
}
"""scikit-learn's classes whose fitted objects become arrays, by the name of their base class."""

_WITH_MEMBERS = ("BaseForest", "BaseBagging")
_NEVER = -1e3  # logit of a class that a model has not seen: its probability is 0
_MOST_COMPARED = 500  # rows
_ROUNDING = 1e-6


def of_estimators(fitted: Sequence[Any], likelihood: Likelihood, classes: int, x: Tensor) -> TreePosterior:
    """A posterior of fitted estimators: of one its members are the draws, of several each is one.

    Args:
        fitted: estimators of `KINDS`, fitted to classes 0 to K − 1 or to numbers.
        likelihood: of classes, or of numbers.
        classes: K; 0 for numbers.
        x: rows (N, P) that estimators and arrays are compared at.
    """
    each = [members(fitted[0], classes)] if len(fitted) == 1 else [[whole(one, classes)] for one in fitted]
    draws = [draw for own in each for draw in own]
    links = {draw.link for draw in draws}
    if len(links) > 1:
        raise ValueError(
            "Expected forests or boosting models alone in a list of classifiers, got both; their trees add up to "
            "probabilities and to logits: give a list of one kind"
        )
    by_histograms = all(_kind(one) == "BaseHistGradientBoosting" for one in fitted)
    dtype = x.dtype if by_histograms else torch.float32  # in which scikit-learn's other trees see rows
    posterior = TreePosterior(forest(draws, dtype), likelihood, links.pop(), SMOOTHING)
    posterior.check()
    first, rows = 0, x[:_MOST_COMPARED]
    sums = posterior.forest(rows) if not classes else posterior.probabilities(rows)
    for estimator, own in zip(fitted, each, strict=True):
        _compare(estimator, sums[first : first + len(own)].mean(0), rows, classes)
        first += len(own)
    return posterior


def is_storable(estimator: Any, likelihood: Likelihood) -> bool:
    """Whether its trees can be arrays, and it predicts what the likelihood is about; fitted or not."""
    mixin = "ClassifierMixin" if isinstance(likelihood, ClassLikelihood) else "RegressorMixin"
    inner = bagged(estimator)
    fine = _kind(estimator) is not None and _is(estimator, mixin)
    return fine and (inner is None or is_storable(inner, likelihood))


def bagged(estimator: Any) -> Any | None:
    """What a bag has copies of, where that is said; None for others, and for a bag of trees."""
    return estimator.estimator if _kind(estimator) == "BaseBagging" else None


def members_of(estimator: Any) -> int | None:
    """Of a forest or a bag, which are draws; None for others, of which one is one draw."""
    return int(estimator.n_estimators) if _kind(estimator) in _WITH_MEMBERS else None


def refusal(estimator: Any) -> TypeError:
    """What to do with an estimator that does not become arrays."""
    return TypeError(
        f"{type(estimator).__name__} cannot be stored as trees ({', '.join(KINDS.values())} can); calibrate it in "
        "Python with dapcal.adapters.estimators.from_estimators, and keep the estimator as you do now"
    )


def members(estimator: Any, classes: int) -> list[Draw]:
    """The trees of a forest or the members of a bag, a draw each; another estimator is one draw."""
    if _kind(estimator) not in _WITH_MEMBERS:
        return [whole(estimator, classes)]
    return [_seen_by(estimator, place, classes) for place in range(len(estimator.estimators_))]


def whole(estimator: Any, classes: int) -> Draw:
    """All of an estimator as one draw."""
    kind = _kind(estimator)
    if kind == "BaseDecisionTree":
        return _tree(estimator, _known(estimator, classes), classes)
    if kind in _WITH_MEMBERS:
        return _mean(members(estimator, classes), estimator)
    if kind == "BaseHistGradientBoosting":
        rounds = [[_of_histograms(one.nodes, estimator) for one in own] for own in estimator._predictors]
        return _boosted(estimator, rounds, classes)
    if kind == "BaseGradientBoosting":
        rate = estimator.learning_rate * (2 if estimator.loss == "exponential" else 1)  # p = 1/(1 + exp(-2 raw))
        rounds = [[_of_tree(one.tree_, rate) for one in own] for own in estimator.estimators_]
        return _boosted(estimator, rounds, classes)
    raise refusal(estimator)


def _tree(estimator: Any, known: np.ndarray, classes: int) -> Draw:
    """One tree; `known` are the classes that its columns are about."""
    tree = _of_tree(estimator.tree_, 1.0)
    if not classes:
        return Draw([tree], np.zeros(1), "numbers")
    value = np.zeros((len(tree.value), classes))
    value[:, known] = tree.value / tree.value.sum(1, keepdims=True)
    return Draw([tree._replace(value=value)], np.zeros(classes), "probabilities")


def _of_tree(tree: Any, scale: float) -> Tree:
    """Of scikit-learn's `tree_`, with one target."""
    missing = np.asarray(tree.missing_go_to_left, bool)
    value = scale * np.asarray(tree.value[:, 0], np.float64)
    return Tree(tree.feature, tree.threshold, tree.children_left, tree.children_right, ~missing, value)


def _of_histograms(nodes: np.ndarray, estimator: Any) -> Tree:
    if nodes["is_categorical"].any():
        raise refusal(estimator)
    left = np.where(nodes["is_leaf"], 0, nodes["left"].astype(np.int64))
    return Tree(
        nodes["feature_idx"].astype(np.int64),
        nodes["num_threshold"],
        left,
        nodes["right"].astype(np.int64),
        ~nodes["missing_go_to_left"].astype(bool),
        nodes["value"][:, None].astype(np.float64),
    )


def _boosted(estimator: Any, rounds: list[list[Tree]], classes: int) -> Draw:
    """Rounds of one tree for each of the outputs, those of two classes of one; `start` as it follows from one row."""
    known = _known(estimator, classes)
    outputs = known if len(rounds[0]) > 1 else known[-1:] if classes else np.zeros(1, np.int64)
    trees = [tree._replace(output=int(own)) for each in rounds for tree, own in zip(each, outputs, strict=True)]
    start = np.full(max(classes, 1), _NEVER if classes else 0.0)
    start[known] = 0.0
    draw = Draw(trees, start, "logits" if classes else "numbers")
    row = np.zeros((1, estimator.n_features_in_), np.float32)
    raw = np.reshape(estimator.decision_function(row) if classes else estimator.predict(row), -1)
    if getattr(estimator, "loss", None) == "exponential":
        raw = 2 * raw
    start[outputs] = (
        raw
        - forest([draw._replace(start=np.zeros_like(start))], torch.float32)(torch.from_numpy(row)).numpy()[
            0, 0, outputs
        ]
    )
    return draw._replace(start=start)


def _seen_by(ensemble: Any, place: int, classes: int) -> Draw:
    """A member of a forest or a bag: its classes are places among those of the ensemble, and so are a bag's inputs."""
    member, known = ensemble.estimators_[place], _known(ensemble, classes)
    if _kind(ensemble) == "BaseForest":
        return _tree(member, known, classes)
    draw = whole(member, len(known) if classes else 0)
    inputs = np.asarray(ensemble.estimators_features_[place])
    start = draw.start
    if classes:
        start = np.full(classes, _NEVER if draw.link == "logits" else 0.0)
        start[known] = draw.start
    return draw._replace(trees=[_placed(tree, inputs, known, classes) for tree in draw.trees], start=start)


def _placed(tree: Tree, inputs: np.ndarray, known: np.ndarray, classes: int) -> Tree:
    """A tree of some inputs and classes among all of them."""
    value, output = tree.value, tree.output
    if classes and value.shape[1] > 1:
        value = np.zeros((len(value), classes))
        value[:, known] = tree.value
    elif classes:
        output = int(known[output])
    return tree._replace(feature=inputs[np.maximum(tree.feature, 0)], value=value, output=output)


def _mean(draws: list[Draw], estimator: Any) -> Draw:
    """Trees that are averaged."""
    if draws[0].link == "logits":
        raise refusal(estimator)  # a mean of probabilities is not that of their logits
    trees = [tree._replace(value=tree.value / len(draws)) for draw in draws for tree in draw.trees]
    return Draw(trees, np.mean([draw.start for draw in draws], 0), draws[0].link)


def _known(estimator: Any, classes: int) -> np.ndarray:
    """Places of the classes that an estimator has seen; of numbers the one output."""
    return np.asarray(estimator.classes_).astype(np.int64) if classes else np.zeros(1, np.int64)


def _compare(estimator: Any, found: Tensor, x: Tensor, classes: int) -> None:
    """Refuse an estimator that predicts something else than its trees, such as one with another link or start."""
    rows = x.cpu().numpy()
    if classes:
        expected = np.zeros((len(rows), classes))
        expected[:, _known(estimator, classes)] = estimator.predict_proba(rows)
    else:
        expected = np.reshape(estimator.predict(rows), (len(rows), -1))
    if expected.shape != tuple(found.shape) or not np.allclose(found.numpy(), expected, _ROUNDING, _ROUNDING):
        raise refusal(estimator)


def _kind(estimator: Any) -> str | None:
    return next((name for name in KINDS if _is(estimator, name)), None)


def _is(estimator: Any, base: str) -> bool:
    return any(kind.__name__ == base and kind.__module__.startswith("sklearn.") for kind in type(estimator).__mro__)
