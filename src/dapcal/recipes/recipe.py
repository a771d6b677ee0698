"""Recipe: what a network for a table looks like, and how its posterior is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

NAMES = ("ensemble", "laplace", "variational", "swag", "dropout")
"""Of posteriors."""


@dataclass(frozen=True)
class Recipe:
    """How a posterior is fitted to a table: all that a file needs to build the network again.

    Args:
        posterior: one of `NAMES`.
        hidden: widths of the hidden layers.
        epochs: passes over the training rows, of every network; None: as many as make 1,000 steps, at least 20.
        learning_rate: of Adam, at the start.
        batch_size: rows in a step; None: a tenth of the training rows, from 16 to 256.
        prior_scale: σ0 of the weights; smaller regularises more.
        members: networks of an ensemble.
        draws: S, of the other posteriors.
        dropout: rate after every hidden layer, of the posterior of that name.
        validation: share of the rows that is held out of training, for calibration.
        guard: nats by which the held-out negative log-likelihood may rise; half of what `dapcal.calibrate` allows, as
            tables have few held-out rows, and what few rows seem to allow costs more on new ones.
        refit: train an ensemble once more, on all rows, for as many epochs as were best; calibration stays as it is.
            Predictions gain from more rows, but `Fitted.held_out` no longer shows how good they are, and the p-value of
            doubt alone no longer holds in regression (benchmarks/validity.py): hence off by default.
        fast: leave out gap cross-validation, which chooses among no adjustment, Inflate and Revert (classification:
            none and Inflate) and φ by what refits say where rows are missing; then Inflate, with φ by the rows that are
            predicted worst.
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
    guard: float = 0.005
    refit: bool = False
    fast: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.posterior not in NAMES:
            raise ValueError(f"Expected `posterior` as one of {', '.join(NAMES)}, got {self.posterior!r}")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"Expected `hidden` as the widths of one hidden layer or more, got {self.hidden}")
        if not 0 < self.validation < 1:
            raise ValueError(f"Expected `validation` between 0 and 1 (the share held out), got {self.validation}")
        if self.members < 2 or self.draws < 2:
            raise ValueError(
                f"Expected `members` and `draws` >= 2, got {self.members} and {self.draws}; one network has no spread"
            )
        if not self.guard >= 0:
            raise ValueError(f"Expected `guard` >= 0 (nats), got {self.guard}")
        if not 0 < self.dropout < 1:
            raise ValueError(f"Expected `dropout` between 0 and 1, got {self.dropout}")


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
