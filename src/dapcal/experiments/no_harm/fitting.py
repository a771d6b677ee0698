"""What the user had, and what dapcal makes of it with all defaults: six kinds of posterior, and a table's recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from dapcal import recipes
from dapcal.calibrate import Calibrated, calibrate
from dapcal.data import Labelled, batch_sizes
from dapcal.experiments.no_harm.cases import Data
from dapcal.experiments.no_harm.problems import Problem
from dapcal.likelihoods import Likelihood
from dapcal.posteriors import dropout, ensemble, laplace, swag, variational
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options
from dapcal.recipes import Recipe
from dapcal.types import Posterior


class Fitted(NamedTuple):
    """Before and after."""

    had: Posterior
    calibrated: Calibrated


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


def before_and_after(posterior: str, task: Task) -> Fitted:
    """A trained network (as a posterior of one draw) or a posterior, and the same calibrated with all defaults."""
    return POSTERIORS[posterior](task)


def of_network(network: nn.Module, likelihood: Likelihood, train: Labelled, held_out: Labelled) -> Calibrated:
    """A plain network, calibrated."""
    return calibrate(network, likelihood, train=train, held_out=held_out)


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


def _one(task: Task) -> Fitted:
    had, problem = task.trained(), task.problem
    return Fitted(had, of_network(had.network, had.likelihood, problem.train, problem.held_out))


def _recipe(task: Task) -> Fitted:
    """As `dapcal fit` has its members, which holds out rows by itself; before are these, after in-domain scaling."""
    problem, share = task.problem, task.data["held_out"] / (1 - task.data["test"])
    x, y = (torch.cat(parts) for parts in zip(problem.train, problem.held_out, strict=True))
    recipe = Recipe(seed=task.seed, validation=share, trees=False, refit=False, **task.data["recipe"])
    calibrated = recipes.fit(x, y, problem.likelihood, problem.outputs, recipe).calibrated
    return Fitted(calibrated.posterior, calibrated)


def _calibrated(fit: Callable[[Task], Posterior]) -> Callable[[Task], Fitted]:
    def way(task: Task) -> Fitted:
        had, problem = fit(task), task.problem
        return Fitted(had, calibrate(had, train=problem.train, held_out=problem.held_out))

    return way


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


POSTERIORS: dict[str, Callable[[Task], Fitted]] = {
    "one network": _one,
    "ensemble": _calibrated(_ensemble),
    "MC dropout": _calibrated(_dropout),
    "last-layer Laplace": _calibrated(_last_layer),
    "VI": _calibrated(_variational),
    "SWAG": _calibrated(_swag),
    "table ensemble": _recipe,
}
"""By the name that `cases.toml` has for it."""
