"""Recipes: from a matrix and targets to a calibrated posterior, with nothing left to choose.

rows ──► train │ held-out ──► networks ──► posterior ──► `dapcal.calibrate` ──► Fitted
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from dapcal.adjust import Inflate
from dapcal.adjust.base import is_closed
from dapcal.calibrate import Calibrated, calibrate, in_domain
from dapcal.data import Data, Labelled, batch_sizes, gather, split
from dapcal.distances import Space
from dapcal.ensembles import base_of
from dapcal.likelihoods import ClassLikelihood, Likelihood
from dapcal.ood_inputs import FEWEST, Around
from dapcal.posteriors import dropout, ensemble, laplace, swag, variational
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Epoch, Options, cosine
from dapcal.types import DapcalWarning, Posterior

FEWEST_ROWS = 8
FEWEST_HELD_OUT = 4
WANTED_HELD_OUT = 40  # half of them give p-values: with 20 the smallest possible is 1/21, under 0.05
STEPS = 1000  # minibatches that a network sees, where `epochs` is left open
PATIENCE = 0.25  # share of the epochs after which training stops, if the held-out NLL has not fallen
SWAG_RATE = 1e-3  # of the SGD that wanders around the trained network

Report = Callable[[str, int, int], None]
"""Told (stage, done, total): epochs of all networks while "training", 0 and 1 of 1 while "calibrating", and with
`refit` epochs again while "training on all rows"."""


@dataclass(frozen=True)
class Recipe:
    """How a posterior is fitted to a table: all that a file needs to build the network again.

    Args:
        posterior: a key of `POSTERIORS`.
        hidden: widths of the hidden layers.
        epochs: passes over the training rows, of every network; None: as many as make 1,000 steps, at least 20.
        learning_rate: of Adam, at the start.
        batch_size: rows in a step; None: a tenth of the training rows, from 16 to 256.
        prior_scale: σ0 of the weights; smaller regularises more.
        members: networks of an ensemble.
        draws: S, of the other posteriors.
        dropout: rate after every hidden layer, of the posterior of that name.
        validation: share of the rows that is held out of training, for calibration.
        refit: train an ensemble once more, on all rows, for as many epochs as were best; calibration stays as it is.
            Predictions gain from more rows, but `Fitted.held_out` no longer shows how good they are.
        seed: of the split, initial weights, batches and draws.
        device: where training and predictions run.
    """

    posterior: str = "ensemble"
    hidden: tuple[int, ...] = (64, 64)
    epochs: int | None = None
    learning_rate: float = 3e-3
    batch_size: int | None = None
    prior_scale: float = 1.0
    members: int = 5
    draws: int = 50
    dropout: float = 0.1
    validation: float = 0.2
    refit: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.posterior not in POSTERIORS:
            raise ValueError(f"Expected `posterior` as one of {', '.join(POSTERIORS)}, got {self.posterior!r}")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"Expected `hidden` as the widths of one hidden layer or more, got {self.hidden}")
        if not 0 < self.validation < 1:
            raise ValueError(f"Expected `validation` between 0 and 1 (the share held out), got {self.validation}")
        if self.members < 2 or self.draws < 2:
            raise ValueError(
                f"Expected `members` and `draws` >= 2, got {self.members} and {self.draws}; one network has no spread"
            )
        if not 0 < self.dropout < 1:
            raise ValueError(f"Expected `dropout` between 0 and 1, got {self.dropout}")


class Fitted(NamedTuple):
    """A calibrated posterior and the rows it was made from."""

    calibrated: Calibrated
    train: Labelled
    held_out: Labelled


def fit(
    x: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    outputs: int,
    recipe: Recipe,
    progress: Report | None = None,
) -> Fitted:
    """Hold out rows, train what the recipe names on the others, and calibrate it.

    The half of the held-out rows that chooses φ also stops training, where its NLL falls no more; nothing sees the half
    that gives p-values before. Warnings of the calibration become `calibrated.notes`: on tables with few rows, few
    errors or many equal rows they are the rule.

    Args:
        x: standardised inputs, (N, P); the network has their dtype.
        y: targets as the likelihood wants them: classes 0 to K − 1, or numbers (standardised).
        likelihood: p(y | outputs).
        outputs: C, of the network.
        recipe: how.
        progress: told of every epoch.
    """
    data = gather((x.to(recipe.device), y.to(recipe.device)), "x")
    _check_rows(data, likelihood)
    data = data._replace(y=likelihood.check(data.x.new_zeros(len(data.x), outputs), data.y))
    train, held_out = divide(data, recipe, isinstance(likelihood, ClassLikelihood))

    def make() -> nn.Module:
        return network(x.shape[1], outputs, recipe).to(data.x)

    chooses = held_out.subset(split(len(held_out.x), torch.Generator().manual_seed(recipe.seed))[0].to(data.x.device))
    watch = _Watch(progress, "training", _RUNS.get(recipe.posterior, recipe.members))
    task = Task(make, likelihood, (train.x, train.y), recipe, _options(recipe, len(train.x), chooses, watch))
    posterior = POSTERIORS[recipe.posterior](task)
    if progress is not None:
        progress("calibrating", 0, 1)
    calibrated = _calibrated(posterior, train, held_out, chooses, recipe.seed)
    if progress is not None:
        progress("calibrating", 1, 1)
    if recipe.refit and recipe.posterior == "ensemble":
        calibrated = _refitted(calibrated, task._replace(train=(data.x, data.y)), watch)
    return Fitted(calibrated, train, held_out)


def network(inputs: int, outputs: int, recipe: Recipe) -> nn.Module:
    """The recipe's network, with random weights.

    >>> network(4, 3, Recipe(hidden=(8,)))
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=3, bias=True)
    )
    """
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *recipe.hidden)):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if recipe.posterior == "dropout":
            layers.append(nn.Dropout(recipe.dropout))
    return nn.Sequential(*layers, nn.Linear(recipe.hidden[-1], outputs))


def divide(data: Labelled, recipe: Recipe, classes: bool) -> tuple[Labelled, Labelled]:
    """Training and held-out rows, in random order; of every class a like share, and at least one row in training."""
    n = len(data.x)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(recipe.seed))
    wanted = max(round(recipe.validation * n), min(WANTED_HELD_OUT, n // 3), FEWEST_HELD_OUT)
    shares = _shares(data.y.cpu()[order], wanted) if classes else torch.arange(n) < wanted
    if int(shares.sum()) < FEWEST_HELD_OUT:
        raise ValueError(
            f"Only {int(shares.sum())} of {n} rows can be held out (at least {FEWEST_HELD_OUT} are needed), as every "
            "class keeps a row to train on; merge rare classes, or bring more rows of them"
        )
    train, held_out = (data.subset(rows.to(data.x.device)) for rows in (order[~shares], order[shares]))
    return train, held_out


def _shares(y: Tensor, wanted: int) -> Tensor:
    """Which rows are held out, (N,): of each class its share of `wanted`, by largest remainder, but never all rows."""
    classes, label, count = y.unique(return_inverse=True, return_counts=True)
    quota = wanted * count / len(y)
    taken = torch.minimum(quota.floor().long(), count - 1)
    for best in (quota - quota.floor()).argsort(descending=True, stable=True).repeat(2).tolist():
        if int(taken.sum()) < wanted and taken[best] < count[best] - 1:
            taken[best] += 1
    held = torch.zeros(len(y), dtype=torch.bool)
    for number in range(len(classes)):
        held[(label == number).nonzero().flatten()[: taken[number]]] = True
    return held


def _check_rows(data: Labelled, likelihood: Likelihood) -> None:
    """What no network can learn from is refused in words of the table."""
    if len(data.x) < FEWEST_ROWS:
        raise ValueError(
            f"Expected at least {FEWEST_ROWS} rows, got n_samples = {len(data.x)}; half a dozen train the networks and "
            f"{FEWEST_HELD_OUT} calibrate them, a hundred or more are a good start"
        )
    if (data.x == data.x[:1]).all():
        raise ValueError("Expected rows that differ, but all inputs are the same; nothing can be learnt from them")
    if len(data.y.unique(dim=0)) < 2:
        kind = "at least 2 classes, got 1 class" if isinstance(likelihood, ClassLikelihood) else "targets that differ"
        raise ValueError(f"Expected {kind}: all {len(data.y)} targets are the same, so there is nothing to predict")


def _options(recipe: Recipe, rows: int, watched: Labelled, watch: _Watch) -> Options:
    """Of training; what the recipe leaves open follows from the number of training rows."""
    batch = min(max(rows // 10, 16), 256) if recipe.batch_size is None else recipe.batch_size
    steps = len(batch_sizes(rows, batch))
    epochs = max(math.ceil(STEPS / steps), 20) if recipe.epochs is None else recipe.epochs
    return {
        "epochs": epochs,
        "batch_size": batch,
        "learning_rate": recipe.learning_rate,
        "held_out": (watched.x, watched.y),
        "patience": max(round(PATIENCE * epochs), 1),
        "progress": watch,
    }


@dataclass
class _Watch:
    """Counts the epochs of one network after the other, and remembers which was each network's best."""

    progress: Report | None
    stage: str
    runs: int
    best: list[tuple[float, int]] = field(default_factory=list)  # held-out NLL and epoch

    def __call__(self, epoch: Epoch) -> None:
        if epoch.number == 1:
            self.best.append((math.inf, 1))
        if epoch.held_out_nll is not None:
            self.best[-1] = min(self.best[-1], (epoch.held_out_nll, epoch.number))
        if self.progress is not None:  # a network that has stopped early is as good as done
            done = (len(self.best) - 1) * epoch.total + epoch.number
            self.progress(self.stage, done, self.runs * epoch.total)


class Task(NamedTuple):
    """What a posterior is fitted to, and how."""

    make: Callable[[], nn.Module]
    likelihood: Likelihood
    train: Data
    recipe: Recipe
    options: Options


def _networks(task: Task, members: int) -> NetworkPosterior:
    """Networks trained by the log joint, each from initial weights of its own."""
    recipe = task.recipe
    return ensemble.fit(
        task.make,
        task.likelihood,
        task.train,
        members=members,
        prior_scale=recipe.prior_scale,
        seed=recipe.seed,
        **task.options,
    )


def _ensemble(task: Task) -> Posterior:
    return _networks(task, task.recipe.members)


def _laplace(task: Task) -> Posterior:
    one, recipe = _networks(task, 1), task.recipe
    return laplace.fit(
        one.network,
        one.likelihood,
        task.train,
        prior_scale=recipe.prior_scale,
        draws=recipe.draws,
        seed=recipe.seed,
    )


def _variational(task: Task) -> Posterior:
    one, recipe = _networks(task, 1), task.recipe
    return variational.fit(
        one.network,
        one.likelihood,
        task.train,
        prior_scale=recipe.prior_scale,
        draws=recipe.draws,
        seed=recipe.seed,
        **task.options,
    )


def _swag(task: Task) -> Posterior:
    one, recipe = _networks(task, 1), task.recipe
    options: Options = {**task.options, "learning_rate": SWAG_RATE, "patience": None}
    return swag.fit(
        one.network,
        one.likelihood,
        task.train,
        prior_scale=recipe.prior_scale,
        draws=recipe.draws,
        seed=recipe.seed,
        **options,
    )


def _dropout(task: Task) -> Posterior:
    one = _networks(task, 1)
    return dropout.wrap(one.network, one.likelihood, draws=task.recipe.draws, seed=task.recipe.seed)


POSTERIORS: dict[str, Callable[[Task], Posterior]] = {
    "ensemble": _ensemble,
    "laplace": _laplace,
    "variational": _variational,
    "swag": _swag,
    "dropout": _dropout,
}
"""By the name that a recipe has for it."""

_RUNS = {"laplace": 1, "variational": 2, "swag": 2, "dropout": 1}  # times that a network is trained


def _refitted(calibrated: Calibrated, task: Task, watch: _Watch) -> Calibrated:
    """Members trained on all rows in place of the old ones; `center`, whose features give distances, stays.

    Networks that have seen more rows are surer of new ones, so that p-values from the old ones' scores are cautious.
    """
    epochs = sorted(epoch for _, epoch in watch.best)[len(watch.best) // 2]
    share = epochs / task.options["epochs"]
    again: Options = {
        "epochs": epochs,
        "schedule": lambda optimiser, steps: cosine(optimiser, round(steps / share)),  # stops where the old ones did
        "held_out": None,
        "patience": None,
        "progress": _Watch(watch.progress, "training on all rows", watch.runs),
    }
    members = _networks(task._replace(options={**task.options, **again}), task.recipe.members)
    posterior = calibrated.posterior
    assert isinstance(posterior, NetworkPosterior)
    note = f"networks trained again on all rows, {epochs} epochs each"
    return replace(calibrated, posterior=replace(posterior, draws=members.draws), notes=(*calibrated.notes, note))


class _Given(TypedDict, total=False):
    train: Data
    held_out: Data
    seed: int
    temperature: bool


def _calibrated(posterior: Posterior, train: Labelled, held_out: Labelled, chooses: Labelled, seed: int) -> Calibrated:
    """`calibrate` with its defaults; warnings as notes."""
    given: _Given = {"train": (train.x, train.y), "held_out": (held_out.x, held_out.y), "seed": seed}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        given["temperature"] = _temperature_helps(posterior, chooses)
        try:
            calibrated = calibrate(posterior, **given)
        except ValueError:
            # nearly every held-out row has a twin in training, or all have one and the same distance: the table has no
            # typical distance to start a radius at, and no row away from the data
            around = Around(deviation=1.0, seed=seed)
            calibrated = calibrate(posterior, distance=Space(radius=None, name="inputs"), ood=around, **given)
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, DapcalWarning)]
    return replace(calibrated, notes=(*calibrated.notes, *notes))


def _temperature_helps(posterior: Posterior, held_out: Labelled, folds: int = 5) -> bool:
    """Whether in-domain calibration lowers the NLL of rows that it has not seen, by more than one standard error.

    Rows that are hardly ever misclassified do not say how sure to be: the sharpest probabilities would seem the best.
    """
    closed = is_closed(Inflate(), posterior)
    base, n = base_of(posterior, held_out.x, closed), len(held_out.x)
    if isinstance(posterior.likelihood, ClassLikelihood):
        wrong = posterior.likelihood.mean(base).argmax(-1) != held_out.y
        if int(wrong.sum()) < FEWEST:
            return False
    if n < 2 * folds:
        return False
    before = -posterior.likelihood.log_prob(base, held_out.y)
    after = torch.empty_like(before)
    for number in range(folds):
        own = torch.arange(n, device=before.device) % folds == number
        tempered = in_domain(posterior, held_out.subset(~own), closed)
        after[own] = -tempered.likelihood.log_prob(base_of(tempered, held_out.x[own], closed), held_out.y[own])
    gain = before - after
    return bool(gain.mean() > gain.std() / math.sqrt(n))
