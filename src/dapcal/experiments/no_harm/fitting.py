"""What the user had, and what `dapcal.calibrate` makes of it: six kinds of posterior, all else by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from dapcal.calibrate import Calibrated, calibrate
from dapcal.data import Labelled, batch_sizes
from dapcal.experiments.no_harm.cases import Data
from dapcal.experiments.no_harm.problems import Problem
from dapcal.likelihoods import Likelihood
from dapcal.posteriors import dropout, ensemble, laplace, swag, variational
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options
from dapcal.types import Posterior

ONE = "one network"


class Task(NamedTuple):
    """A problem, how networks are trained on it, and a seed."""

    problem: Problem
    data: Data
    seed: int

    def network(self, rate: float = 0.0) -> nn.Module:
        """A new network, by torch's present random state."""
        return network(self.problem, self.data, rate)

    @property
    def training(self) -> Options:
        """As many epochs as make the plan's number of steps."""
        steps = len(batch_sizes(len(self.problem.train.x), self.data["batch_size"]))
        return {
            "epochs": math.ceil(self.data["steps"] / steps),
            "batch_size": self.data["batch_size"],
            "learning_rate": self.data["learning_rate"],
        }

    def trained(self, rate: float = 0.0) -> NetworkPosterior:
        """One network, trained."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            made = self.network(rate)
        problem = self.problem
        return map_posterior.fit(made, problem.likelihood, problem.train, seed=self.seed, **self.training)


def before(posterior: str, task: Task) -> Posterior:
    """What the user had: a trained network, as a posterior of one draw, or a posterior."""
    return POSTERIORS[posterior](task)


def after(posterior: str, had: Posterior, problem: Problem) -> Calibrated:
    """The same, calibrated with all defaults."""
    if posterior == ONE:
        assert had.network is not None  # of a trained network
        return of_network(had.network, had.likelihood, problem.train, problem.held_out)
    return calibrate(had, train=problem.train, held_out=problem.held_out)


def of_network(network: nn.Module, likelihood: Likelihood, train: Labelled, held_out: Labelled) -> Calibrated:
    """A plain network, calibrated."""
    return calibrate(laplace.last_layer(network, likelihood, train), train=train, held_out=held_out)


def network(problem: Problem, data: Data, rate: float) -> nn.Module:
    """Hidden layers with ReLU, and dropout after each where a rate is given; for images maybe two convolutions first.

    Args:
        problem: whose inputs it takes.
        data: widths of the hidden layers, and whether there are convolutions.
        rate: of dropout.
    """
    inputs = problem.train.x.shape[1:].numel()
    layers: list[nn.Module] = [nn.Flatten()] if problem.train.x.ndim > 2 else []
    if data.get("convolutions"):
        steps = [nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()]
        layers, inputs = [*steps, nn.Flatten()], 16 * 4 * 4
    for width, following in pairwise((inputs, *data["hidden"])):
        layers += [nn.Linear(width, following), nn.ReLU()]
        if rate > 0:
            layers.append(nn.Dropout(rate))
    return nn.Sequential(*layers, nn.Linear(data["hidden"][-1], problem.outputs))


def _ensemble(task: Task) -> Posterior:
    problem = task.problem
    return ensemble.fit(
        task.network, problem.likelihood, problem.train, members=task.data["members"], seed=task.seed, **task.training
    )


def _dropout(task: Task) -> Posterior:
    one = task.trained(task.data["dropout"])
    return dropout.wrap(one.network, one.likelihood, draws=task.data["draws"], seed=task.seed)


def _last_layer(task: Task) -> Posterior:
    one = task.trained()
    return laplace.last_layer(
        one.network, one.likelihood, task.problem.train, draws=task.data["draws"], seed=task.seed
    )  # fmt: skip


def _variational(task: Task) -> Posterior:
    one = task.trained()
    return variational.fit(
        one.network, one.likelihood, task.problem.train, draws=task.data["draws"], seed=task.seed, **task.training
    )


def _swag(task: Task) -> Posterior:
    one, training = task.trained(), task.training
    training["learning_rate"] = task.data["swag_rate"]
    return swag.fit(
        one.network, one.likelihood, task.problem.train, draws=task.data["draws"], seed=task.seed, **training
    )


POSTERIORS: dict[str, Callable[[Task], Posterior]] = {
    ONE: Task.trained,
    "ensemble": _ensemble,
    "MC dropout": _dropout,
    "last-layer Laplace": _last_layer,
    "VI": _variational,
    "SWAG": _swag,
}
"""By the name that `cases.toml` has for it."""
