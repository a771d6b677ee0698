"""Posteriors by the name that a recipe has for them, trained with what it leaves open filled in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dapcal.data import Data, Labelled, batch_sizes, gather
from dapcal.likelihoods import Likelihood
from dapcal.networks import TableNetwork
from dapcal.posteriors import dropout, ensemble, laplace, sharing, swag, variational
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options
from dapcal.posteriors.trees import TreePosterior
from dapcal.progress import Epoch, Stages
from dapcal.recipes.estimators import Brought
from dapcal.recipes.recipe import Recipe
from dapcal.types import Posterior

STEPS = 1000  # minibatches that a network sees, where `epochs` is left open
FEWEST_EPOCHS = 20
SHARED_ROWS = 200_000  # that members which share weights see, an epoch after the other, where `epochs` is left open
SHARED_EPOCHS = (40, 150)  # likewise, at least and at most
MANY = 20_000  # rows, of which half as many epochs do
FAST = 0.6  # share of the epochs with `fast`, of more than LARGE rows
LARGE = 4000
PATIENCE = 0.25  # share of the epochs after which training stops, if the held-out NLL has not fallen
SWAG_RATE = 1e-3  # of the SGD that wanders around the trained network


class Task(NamedTuple):
    """What a posterior is fitted to, and how."""

    make_for: Callable[[Labelled], Callable[[], nn.Module]]  # from training rows to new networks
    likelihood: Likelihood
    train: Data
    watched: Data  # held-out rows that training is stopped by
    recipe: Recipe
    options: Options
    weights: Tensor | None = None  # of the training rows
    brought: Brought | None = None  # estimators in place of networks

    @property
    def make(self) -> Callable[[], nn.Module]:
        """New networks for the training rows."""
        return self.make_for(gather(self.train, "train"))


def options_of(recipe: Recipe, rows: int, watched: Labelled, watch: Watch) -> Options:
    """Of training; what the recipe leaves open follows from the number of training rows."""
    batch, epochs = schedule_of(recipe, rows)
    return {
        "epochs": epochs,
        "batch_size": batch,
        "learning_rate": recipe.learning_rate,
        "held_out": (watched.x, watched.y),
        "patience": max(round(PATIENCE * epochs), 1),
        "progress": watch,
    }


def schedule_of(recipe: Recipe, rows: int) -> tuple[int, int]:
    """Rows in a step, and epochs.

    Members that share weights cost by the rows that they see, not by the step: small batches serve them better.
    """
    if recipe.posterior == "tabm":
        fewest, most = SHARED_EPOCHS
        batch, epochs = min(max(rows // 20, 16), 128), min(max(SHARED_ROWS // rows, fewest), most)
        epochs = round(epochs * (0.5 if rows > MANY else 1) * (FAST if recipe.fast and rows > LARGE else 1))
    else:
        batch = min(max(rows // 10, 16), 256)
        epochs = max(math.ceil(STEPS / len(batch_sizes(rows, recipe.batch_size or batch))), FEWEST_EPOCHS)
    return recipe.batch_size or batch, recipe.epochs or epochs


@dataclass
class Watch:
    """Counts the epochs of one network after the other, and remembers which was each network's best."""

    progress: Stages
    stage: str
    runs: int
    best: list[tuple[float, int]] = field(default_factory=list)  # held-out NLL and epoch
    total: int = 0

    def __call__(self, epoch: Epoch) -> None:
        """Take note of an epoch."""
        if epoch.number == 1:
            self.best.append((math.inf, 1))
        if epoch.held_out_nll is not None:
            self.best[-1] = min(self.best[-1], (epoch.held_out_nll, epoch.number))
        self.total = self.runs * epoch.total
        self.progress(self.stage, (len(self.best) - 1) * epoch.total + epoch.number, self.total)

    def count(self, done: int, total: int) -> None:
        """Take note of other steps than epochs."""
        self.total = total
        self.progress(self.stage, done, total)

    def end(self) -> None:
        """All is done, even where networks have stopped early."""
        self.progress(self.stage, self.total, self.total)


@contextmanager
def one_thread() -> Iterator[None]:
    """Steps of small networks are too short to share: two threads of a busy machine took ten times the CPU of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def networks(task: Task, members: int) -> NetworkPosterior:
    """Networks trained by the log joint, each from initial weights of its own."""
    recipe = task.recipe
    options: Options = {**task.options, "row_weights": task.weights}
    return ensemble.fit(
        task.make,
        task.likelihood,
        task.train,
        members=members,
        prior_scale=recipe.prior_scale,
        seed=recipe.seed,
        **options,
    )


def sharing_members(task: Task, last: int | None = None) -> NetworkPosterior:
    """Members that share weights, trained side by side; to an epoch that is the last, or by the watched rows."""
    recipe, options = task.recipe, task.options
    watch = options["progress"]
    (posterior,) = sharing.fit_each(
        [task.make],
        task.likelihood,
        [gather(task.train, "train")],
        None if last is not None else [gather(task.watched, "watched")],
        last=last,
        row_weights=None if task.weights is None else [task.weights],
        own=TableNetwork.is_own,
        members=recipe.members,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        epochs=options["epochs"],
        batch_size=options["batch_size"],
        learning_rate=options["learning_rate"],
        patience=options["patience"],
        progress=watch if callable(watch) else lambda epoch: None,  # noqa: ARG005
    )
    return posterior


def members_of(recipe: Recipe) -> int:
    """Networks that a posterior is made of, or one that it lies around."""
    return recipe.members if recipe.posterior == "ensemble" else 1


def around(task: Task, trained: NetworkPosterior) -> Posterior:
    """The recipe's posterior, of networks that are trained already."""
    return _AROUND[task.recipe.posterior](task, trained)


def brought(task: Task, watch: Watch) -> TreePosterior:
    """Estimators that were given, fitted to the training rows."""
    assert task.brought is not None
    rows, recipe = gather(task.train, "train"), task.recipe
    return task.brought.fit(rows, members=recipe.members, seed=recipe.seed, weights=task.weights, progress=watch.count)


def posterior_of(task: Task, watch: Watch) -> Posterior:
    """What the recipe names, or estimators in its place, with noise as the watched rows have it."""
    if task.brought is None:
        return POSTERIORS[task.recipe.posterior](task)
    return task.brought.with_noise(brought(task, watch), gather(task.watched, "watched"))


def _made(task: Task) -> Posterior:
    return around(task, networks(task, members_of(task.recipe)))


def _ensemble(task: Task, members: NetworkPosterior) -> Posterior:  # noqa: ARG001
    return members


def _laplace(task: Task, one: NetworkPosterior) -> Posterior:
    """Of the last layer, with σ0 by held-out NLL: that of training leaves too much to the prior on a table."""
    recipe = task.recipe
    return laplace.last_layer(
        one.network,
        one.likelihood,
        task.train,
        prior_scale=laplace.HeldOut(task.watched),
        draws=recipe.draws,
        seed=recipe.seed,
    )


def _variational(task: Task, one: NetworkPosterior) -> Posterior:
    return _from(variational.fit, task, one, task.options)


def _swag(task: Task, one: NetworkPosterior) -> Posterior:
    return _from(swag.fit, task, one, {**task.options, "learning_rate": SWAG_RATE, "patience": None})


def _from(fit: Callable[..., Posterior], task: Task, one: NetworkPosterior, options: Options) -> Posterior:
    """Trained from a network that is trained already."""
    recipe = task.recipe
    return fit(
        one.network,
        one.likelihood,
        task.train,
        prior_scale=recipe.prior_scale,
        draws=recipe.draws,
        seed=recipe.seed,
        **options,
    )


def _dropout(task: Task, one: NetworkPosterior) -> Posterior:
    return dropout.wrap(one.network, one.likelihood, draws=task.recipe.draws, seed=task.recipe.seed)


_AROUND: dict[str, Callable[[Task, NetworkPosterior], Posterior]] = {
    "ensemble": _ensemble,
    "laplace": _laplace,
    "variational": _variational,
    "swag": _swag,
    "dropout": _dropout,
}

POSTERIORS: dict[str, Callable[[Task], Posterior]] = {"tabm": sharing_members, **dict.fromkeys(_AROUND, _made)}
"""Of networks, by the name that a recipe has for it."""

RUNS = {"tabm": 1, "laplace": 1, "variational": 2, "swag": 2, "dropout": 1}  # times that a network is trained
