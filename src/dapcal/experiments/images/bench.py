"""A task of images under one seed: its data, and everything that is trained on them, once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dapcal.calibration.inputs import Given, Misclassified
from dapcal.calibration.reference import choose_reference
from dapcal.data import Labelled, split
from dapcal.detectors import spectral
from dapcal.distances import Distance, Space
from dapcal.distances.choosing import Measured, informative
from dapcal.distances.projectors import Features
from dapcal.ensembles import evaluated
from dapcal.experiments.datasets import fashion_mnist, like_mnist, mnist, omniglot, svhn
from dapcal.experiments.images.memory import Memory, remembering
from dapcal.likelihoods import Categorical
from dapcal.posteriors import dropout, ensemble, laplace, swag, variational
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options
from dapcal.types import Posterior

SWAG_RATE = 0.01
INSIDE = {"MNIST": mnist, "Fashion-MNIST": fashion_mnist}
OUTSIDE: dict[str, Callable[[], Tensor]] = {
    "MNIST": lambda: like_mnist(mnist("test")),
    "Fashion-MNIST": lambda: like_mnist(fashion_mnist("test")),
    "SVHN": lambda: like_mnist(svhn("test")),
    "Omniglot": lambda: like_mnist(omniglot("evaluation"), invert=True),
}


@dataclass(frozen=True)
class ImageTask:
    """What is learnt, what counts as out of distribution, and how networks are trained.

    Attributes:
        inside: data set that networks learn.
        outside: data sets that they should not know.
        network: makes a new one, with a dropout rate.
        epochs: of every training run.
        batch_size: of every training run.
        learning_rate: Adam's at the start, which falls to zero along a cosine.
        variational_rate: the same for the variational posterior; chosen by held-out NLL.
        swag_epochs: of SWAG, from the MAP network on.
        draws: of every posterior.
        members: of the ensemble.
        held_out: training images that are held out, to calibrate on.
        dropout: rate of the network for MC dropout.
        bound: of the layers' spectral norms, where they are normalised.
    """

    inside: str
    outside: tuple[str, ...]
    network: Callable[[float], nn.Module]
    epochs: int
    batch_size: int
    learning_rate: float
    variational_rate: float
    swag_epochs: int = 20
    draws: int = 50
    members: int = 5
    held_out: int = 1000
    dropout: float = 0.1
    bound: float = 3.0


Parts = tuple[Tensor, Tensor]
"""Images (N, C, H, W) and labels (N,)."""


class Readout(NamedTuple):
    """What detectors of features look at: a network with images, or its last layer with features, which is the same.

    Attributes:
        network: ends in a linear layer.
        train: what enters the network at the training images, and their labels.
        held_out: the same of held-out images.
        at: what enters the network at some images.
    """

    network: nn.Module
    train: Parts
    held_out: Parts
    at: Callable[[Tensor], Tensor]


class Bench:
    """Data and trained networks of a task under one seed; every training run goes on from its checkpoint.

    Args:
        task: what and how.
        seed: of the split, initial weights, batches and draws.
        work: folder of checkpoints.
        device: where all of it lives.
    """

    def __init__(self, task: ImageTask, seed: int, work: Path, device: str) -> None:
        self.task, self.seed, self.work, self.device = task, seed, work, device
        self.likelihood = Categorical()
        self.train, self.held_out, self.test = self._parts()

    @cached_property
    def outside(self) -> dict[str, Tensor]:
        """Images of every data set that networks should not know."""
        return {name: OUTSIDE[name]().to(self.device) for name in self.task.outside}

    @staticmethod
    def look_for_data(task: ImageTask) -> None:
        """Load all data once, so that what is missing is missed now and not after hours of training."""
        for part in ("train", "test"):
            INSIDE[task.inside](part)
        for name in task.outside:
            OUTSIDE[name]()

    @staticmethod
    def stages(task: ImageTask, parts: Collection[str] | None = None) -> list[list[str]]:
        """Names of the training runs that parts of the table need; each stage needs those before it alone."""
        members = [f"member-{number}" for number in range(task.members)]
        posteriors = [*members, "dropout", "variational", "swag"]
        needed = {
            "paper": [*members, "variational"], "ours": posteriors, "posteriors": posteriors, "newer": members[:1],
            "questions": [members[0], "variational", "spectral", "spectral-variational"],
            "oracle": [members[0], "variational"], "trained": [],
        }  # fmt: skip
        wanted = {name for part in (needed if parts is None else parts) for name in needed[part]}
        order = [[*members, "spectral", "dropout"], ["variational", "spectral-variational", "swag"]]
        return [[name for name in stage if name in wanted] for stage in order]

    def fit(self, name: str) -> None:
        """One training run by its name; what comes of it is in its checkpoint."""
        if name.startswith("member-"):
            self.member(int(name.removeprefix("member-")))
        else:
            getattr(self, name.replace("-", "_"))

    def member(self, number: int) -> NetworkPosterior:
        """A MAP network, from initial weights and batches of its own."""
        seed = self.seed * self.task.members + number
        return self._map(self.network(seed), f"member-{number}", seed)

    @cached_property
    def map(self) -> NetworkPosterior:
        """The first member, whose features are the paper's projector."""
        return self.member(0)

    @cached_property
    def variational(self) -> NetworkPosterior:
        """Mean-field posterior, started from the MAP network."""
        return self._variational(self.map.network, "variational")

    @cached_property
    def ensemble(self) -> NetworkPosterior:
        """All members."""
        members = [self.map, *(self.member(number) for number in range(1, self.task.members))]
        return ensemble.of([member.network for member in members], self.likelihood)

    @cached_property
    def laplace(self) -> NetworkPosterior:
        """Of the MAP network's last layer, full covariance."""
        return laplace.last_layer(self.map.network, self.likelihood, self.train, draws=self.task.draws, seed=self.seed)

    @cached_property
    def swag(self) -> NetworkPosterior:
        """From the MAP network on."""
        options: Options = {**self.options("swag"), "epochs": self.task.swag_epochs, "learning_rate": SWAG_RATE}
        return swag.fit(self.map.network, self.likelihood, self.train, draws=self.task.draws, seed=self.seed, **options)

    @cached_property
    def dropout(self) -> Posterior:
        """A MAP network trained with dropout."""
        trained = self._map(self.network(self.seed, self.task.dropout), "dropout", self.seed)
        return dropout.wrap(trained.network, self.likelihood, draws=self.task.draws, seed=self.seed)

    @cached_property
    def spectral(self) -> NetworkPosterior:
        """A MAP network trained with spectrally normalised layers, which are plain ones afterwards."""
        bounded = spectral.normalised(self.network(self.seed), self.task.bound, example=self.train[0][:1])
        trained = self._map(bounded, "spectral", self.seed)
        return map_posterior.point(spectral.plain(trained.network), self.likelihood)

    @cached_property
    def spectral_variational(self) -> NetworkPosterior:
        """Mean-field posterior, started from the spectrally normalised network."""
        return self._variational(self.spectral.network, "spectral-variational")

    @property
    def readout(self) -> Readout:
        """Of the MAP network."""
        return Readout(self.map.network, self.train, self.held_out, lambda x: x)

    def network(self, seed: int, rate: float = 0.0) -> nn.Module:
        """A new network with weights from a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.task.network(rate).to(self.device)

    def options(self, name: str) -> Options:
        """How a training run of that name goes."""
        return {
            "epochs": self.task.epochs,
            "batch_size": self.task.batch_size,
            "learning_rate": self.task.learning_rate,
            "checkpoint": self.work / f"{name}.checkpoint",
        }

    def features_of(self, point: NetworkPosterior) -> Measured:
        """Distances between the features of one network, without radius: of the MAP network, the paper's."""
        space = Space(Features().fit_projector(self.train[0][:1], point), radius=None, name="features")
        fitted = space.fit(self.train[0], self._first_half.x, point)
        return remembering(Measured((space,), Distance((fitted,)), (), ()), self.memory)

    def measured(self, posterior: Posterior) -> Measured:
        """The default distance of a posterior, as `calibrate` finds it."""
        reference = choose_reference(posterior, self._first_half)  # `calibrate` finds the same, and measures with it
        found = informative(reference.posterior, self.train[0], self._first_half, targets=self.train[1])
        return remembering(found, self.memory)

    def wrong(self, posterior: Posterior) -> Given:
        """Held-out images that are misclassified, of all that are held out: what the paper calibrates on."""
        chosen = Misclassified()(
            posterior, Labelled(*self.train), evaluated(posterior, Labelled(*self.held_out), drawn=True)
        )
        return Given(chosen.x, chosen.y)

    @cached_property
    def memory(self) -> Memory:
        """Of what is computed of test images and of those outside."""
        return Memory((self.test[0], *self.outside.values()))

    @cached_property
    def _first_half(self) -> Labelled:
        """The half of the held-out images that `calibrate` takes for radius and φ."""
        rows, _ = split(self.task.held_out, torch.Generator().manual_seed(0))
        return Labelled(*self.held_out).subset(rows)

    def _map(self, model: nn.Module, name: str, seed: int) -> NetworkPosterior:
        return map_posterior.fit(model, self.likelihood, self.train, seed=seed, **self.options(name))

    def _variational(self, model: nn.Module, name: str) -> NetworkPosterior:
        options: Options = {**self.options(name), "learning_rate": self.task.variational_rate}
        return variational.fit(model, self.likelihood, self.train, draws=self.task.draws, seed=self.seed, **options)

    def _parts(self) -> tuple[Parts, Parts, Parts]:
        """To train on, held out (drawn by the seed), and to test on."""
        (x, y), test = self._loaded("train"), self._loaded("test")
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        held, rest = order[: self.task.held_out], order[self.task.held_out :]
        return (x[rest], y[rest]), (x[held], y[held]), test

    def _loaded(self, part: str) -> Parts:
        found = INSIDE[self.task.inside](part)
        return like_mnist(found).to(self.device), found.y.to(self.device)
