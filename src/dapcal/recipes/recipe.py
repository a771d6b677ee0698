"""Recipe: what a network for a table looks like, and how its posterior is fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from dapcal.data import Labelled
from dapcal.networks import TableNetwork, Tempered
from dapcal.recipes.bins import EDGES, are_numbers

NAMES = ("ensemble", "tabm", "laplace", "variational", "swag", "dropout")
"""Of posteriors that are networks."""

ESTIMATOR = "estimator"
"""Of a posterior whose draws are those of an estimator that is given to `dapcal.recipes.fit`."""

_LEFT_OPEN: dict[str, dict[str, Any]] = {
    "tabm": {"hidden": (96, 96), "members": 8, "learning_rate": 2e-3},
}
_ELSE: dict[str, Any] = {"hidden": (64, 64), "members": 5, "learning_rate": 3e-3}


@dataclass(frozen=True)
class Recipe:
    """How a posterior is fitted to a table: all that a file needs to build the network again.

    Args:
        posterior: one of `NAMES`, or `ESTIMATOR`, which heeds nothing that is said of networks.
        hidden: widths of the hidden layers; None: 64, 64 (tabm: 96, 96).
        epochs: passes over the training rows, of every network; None: as many as make 1,000 steps, at least 20 (tabm:
            40 to 150, by the number of rows).
        learning_rate: of Adam, at the start; None: 0.003 (tabm: 0.002).
        batch_size: rows in a step; None: a tenth of the training rows, from 16 to 256 (tabm: a twentieth, to 128).
        prior_scale: σ0 of the weights; smaller regularises more.
        members: networks of an ensemble, or how often an estimator without members is fitted; None: 5 (tabm: 8).
        draws: S, of the other posteriors.
        dropout: rate after every hidden layer, of the posterior of that name and of tabm.
        bins: at most, that tabm places a number in.
        edges: where tabm has them: "quantiles" of a number, or splits of a "tree" that predicts the target from it.
        embedding: width of the vector that tabm makes of a number.
        weight_decay: of tabm's AdamW.
        trees: put boosted trees beside members, where the table has rows enough to say by how much.
        row_noise: let noise depend on the row, where held-out rows say that it does (regression by members).
        validation: share of the rows that is held out of training, for calibration.
        guard: nats by which the held-out negative log-likelihood may rise; half of what `dapcal.calibrate` allows, as
            tables have few held-out rows, and what few rows seem to allow costs more on new ones.
        refit: train members once more, on all rows, for as many epochs as were best; calibration stays as it is, and
            so do the members that p-values come from.
        fast: leave out gap cross-validation, which chooses among no adjustment, Inflate and Revert (classification:
            none and Inflate) and φ by what refits say where rows are missing; then Inflate, with φ by the rows that are
            predicted worst.
        points: training rows that distances are measured from, at most, spread over all of them (a coreset): new rows
            are then answered sooner, and notes say what that changes; None: all.
        logarithms: targets are logarithms, in which a line runs away far from the data: numbers enter networks
            `Tempered` (tabm bounds them anyway), and distance widens no further than the targets themselves spread.
        seed: of the split, initial weights, batches and draws.
        device: where training and predictions run.
    """

    posterior: str = "ensemble"
    hidden: tuple[int, ...] = None  # type: ignore[assignment]  # filled in below, as the next two
    epochs: int | None = None
    learning_rate: float = None  # type: ignore[assignment]
    batch_size: int | None = None
    prior_scale: float = 1.0
    members: int = None  # type: ignore[assignment]
    draws: int = 50
    dropout: float = 0.1
    bins: int = 32
    edges: str = "tree"
    embedding: int = 8
    weight_decay: float = 3e-4
    trees: bool = True
    row_noise: bool = True
    validation: float = 0.2
    guard: float = 0.005
    refit: bool = True
    fast: bool = False
    points: int | None = None
    logarithms: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.posterior not in (*NAMES, ESTIMATOR):
            raise ValueError(f"Expected `posterior` as one of {', '.join(NAMES)}, got {self.posterior!r}")
        for name, value in _LEFT_OPEN.get(self.posterior, _ELSE).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.hidden is not None and (not self.hidden or min(self.hidden) < 1):
            raise ValueError(f"Expected `hidden` as the widths of one hidden layer or more, got {self.hidden}")
        if not 0 < self.validation < 1:
            raise ValueError(f"Expected `validation` between 0 and 1 (the share held out), got {self.validation}")
        if (self.members is not None and self.members < 2) or self.draws < 2:
            raise ValueError(
                f"Expected `members` and `draws` >= 2, got {self.members} and {self.draws}; one network has no spread"
            )
        if self.points is not None and self.points < 1:
            raise ValueError(f"Expected `points` >= 1 (training rows that are kept for distances), got {self.points}")
        if not self.guard >= 0:
            raise ValueError(f"Expected `guard` >= 0 (nats), got {self.guard}")
        if not 0 < self.dropout < 1:
            raise ValueError(f"Expected `dropout` between 0 and 1, got {self.dropout}")
        if self.bins < 1 or self.embedding < 1 or self.edges not in EDGES:
            raise ValueError(
                f"Expected `bins` and `embedding` >= 1 and `edges` as one of {', '.join(EDGES)}, got {self.bins}, "
                f"{self.embedding} and {self.edges!r}"
            )


def network(inputs: int, outputs: int, recipe: Recipe, numbers: int = 0) -> nn.Module:
    """The recipe's network, with random weights; `numbers` of the inputs have bins, of tabm, which knows no edges yet.

    >>> network(4, 3, Recipe(posterior="ensemble", hidden=(8,)))
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=3, bias=True)
    )
    """
    if recipe.posterior == "tabm":
        shape = (numbers, recipe.bins, recipe.embedding)
        return TableNetwork(inputs, outputs, recipe.hidden, *shape, recipe.dropout)
    layers: list[nn.Module] = [Tempered()] if recipe.logarithms else []
    for before, after in pairwise((inputs, *recipe.hidden)):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if recipe.posterior == "dropout":
            layers.append(nn.Dropout(recipe.dropout))
    return nn.Sequential(*layers, nn.Linear(recipe.hidden[-1], outputs))


def size(inputs: int, outputs: int, recipe: Recipe, numbers: int = 0) -> int:
    """Parameters of the recipe's network, which is not made for it.

    >>> made = network(4, 3, Recipe(posterior="tabm", hidden=(8,)), 2)
    >>> sum(p.numel() for p in made.parameters()) == size(4, 3, Recipe(posterior="tabm", hidden=(8,)), 2)
    True
    """
    if recipe.posterior != "tabm":
        return sum((one + 1) * two for one, two in pairwise((inputs, *recipe.hidden, outputs)))
    widths = (numbers * recipe.embedding + inputs - numbers, *recipe.hidden)
    layers = sum(one * two + one + 2 * two for one, two in pairwise(widths))
    return numbers * (recipe.bins + 2) * recipe.embedding + layers + (widths[-1] + 1) * outputs


def numbers_of(model: nn.Module | None) -> int:
    """Inputs of a network that have bins: what `network` must be told to make it again."""
    return len(model.numbers) if isinstance(model, TableNetwork) else 0


def maker(data: Labelled, outputs: int, recipe: Recipe, numbers: Tensor | None = None) -> Callable[[], nn.Module]:
    """Makes the recipe's network again and again, of the type of the inputs; bins have the edges that rows say.

    Args:
        data: training rows.
        outputs: C.
        recipe: how.
        numbers: places of the inputs that have bins; by default those that take three values or more.
    """
    inputs = data.x.shape[1]
    if recipe.posterior != "tabm":
        return lambda: network(inputs, outputs, recipe).to(data.x)
    places = are_numbers(data.x).cpu() if numbers is None else numbers
    edges = EDGES[recipe.edges](data.x.cpu()[:, places], data.y, recipe.bins)

    def make() -> nn.Module:
        made = network(inputs, outputs, recipe, len(places))
        assert isinstance(made, TableNetwork)
        made.fit_inputs(places, edges)
        return made.to(data.x)

    return make
