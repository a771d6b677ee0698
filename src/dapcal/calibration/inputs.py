"""Where the calibration inputs x_j* come from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dapcal.data import Data, Inputs, Labelled, check_inputs, gather
from dapcal.distances import Distance
from dapcal.ensembles import Evaluated
from dapcal.errors import NothingToCalibrate
from dapcal.hardest import FEWEST, HARDEST, hardest
from dapcal.types import DapcalWarning, Posterior


class Chosen(NamedTuple):
    """Calibration inputs, their targets where known, where they come from in words, and which held-out rows."""

    x: Tensor
    y: Tensor | None
    origin: str
    rows: Tensor | None = None


OODInputs = Callable[[Posterior, Labelled, Evaluated], Chosen]
"""Posterior, training data and held-out data (with what the base posterior says of them) to calibration inputs."""


@dataclass(frozen=True, eq=False)
class Given:
    """Inputs known to be out of distribution."""

    x: Tensor
    y: Tensor | None = None

    def __call__(self, posterior: Posterior, train: Labelled, held_out: Evaluated) -> Chosen:  # noqa: ARG002
        """As they are."""
        return Chosen(self.x, self.y, f"{len(self.x)} given inputs")


@dataclass(frozen=True)
class HeldOut:
    """All held-out inputs of the half that chooses φ, with their targets."""

    origin: str = "all held-out inputs"

    def __call__(self, posterior: Posterior, train: Labelled, held_out: Evaluated) -> Chosen:  # noqa: ARG002
        """As they are."""
        return Chosen(held_out.x, held_out.y, self.origin, torch.arange(len(held_out.x)))


@dataclass(frozen=True, eq=False)
class Around:
    """Draws from Gaussians just outside the training domain, for inputs of few dimensions (the paper's toys).

    Args:
        centers: of the Gaussians, (M, ...). By default `directions` points of the convex hull's surface, pushed
            outwards by three standard deviations.
        deviation: standard deviation.
        number: of inputs drawn in all.
        directions: number of default centers.
        seed: of directions and draws.
    """

    centers: Tensor | None = None
    deviation: float = 0.1
    number: int = 200
    directions: int = 32
    seed: int = 0

    def __call__(self, posterior: Posterior, train: Labelled, held_out: Evaluated) -> Chosen:  # noqa: ARG002
        """Draw around the training inputs."""
        generator = torch.Generator().manual_seed(self.seed)
        centers = self.centers
        if centers is None:
            x = train.x.flatten(1)
            ways = torch.nn.functional.normalize(torch.randn(self.directions, x.shape[1], generator=generator))
            ways = ways.to(x)
            farthest = (x @ ways.T).argmax(0)  # support point in every direction
            centers = (x[farthest] + 3 * self.deviation * ways).reshape(-1, *train.x.shape[1:])
        picked = centers[torch.arange(self.number) % len(centers)].to(train.x)
        noise = torch.randn(picked.shape, generator=generator).to(picked)
        words = f"{self.number} draws from {len(centers)} Gaussians outside the training domain"
        return Chosen(picked + self.deviation * noise, None, words)


@dataclass(frozen=True)
class Hardest:
    """The held-out inputs that are predicted worst, by log predictive density.

    Args:
        fraction: of the held-out inputs.
    """

    fraction: float = HARDEST

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Expected `fraction` above 0 and at most 1, got {self.fraction}")

    def __call__(self, posterior: Posterior, train: Labelled, held_out: Evaluated) -> Chosen:  # noqa: ARG002
        """The worst fraction."""
        worst = hardest(posterior.likelihood, held_out, self.fraction)
        chosen = held_out.subset(worst.to(held_out.x.device))
        words = f"the hardest {100 * self.fraction:.0f} % of held-out inputs ({len(worst)})"
        return Chosen(chosen.x, chosen.y, words, worst)


@dataclass(frozen=True)
class Misclassified:
    """The held-out inputs that are misclassified; the hardest 30 % where they are fewer than 10, or in regression."""

    def __call__(self, posterior: Posterior, train: Labelled, held_out: Evaluated) -> Chosen:
        """Wrong ones, or the hardest."""
        error = posterior.likelihood.error(held_out.base, held_out.y.to(held_out.base.outputs.device))
        if error.dtype != torch.bool:  # of numbers none is simply wrong
            return Hardest()(posterior, train, held_out)
        wrong = torch.nonzero(error).flatten()
        if len(wrong) < FEWEST:
            warnings.warn(
                f"Only {len(wrong)} held-out inputs are misclassified (at least {FEWEST} are wanted): calibrating on "
                "the hardest 30 % instead; hold out more data, or give OOD inputs with `ood`",
                DapcalWarning,
                stacklevel=4,
            )
            return Hardest()(posterior, train, held_out)
        chosen = held_out.subset(wrong.to(held_out.x.device))
        return Chosen(chosen.x, chosen.y, f"{len(wrong)} misclassified held-out inputs", wrong)


def source_of(ood: Inputs | Data | OODInputs | None, train: Tensor) -> OODInputs | None:
    """Where the calibration inputs that were asked for come from."""
    if ood is None:
        return None
    if isinstance(ood, Tensor):
        return Given(check_inputs(ood, "ood", like=train))
    if isinstance(ood, tuple | list) or not callable(ood):
        data = gather(cast("Data", ood), "ood")
        return Given(check_inputs(data.x, "ood", like=train), data.y)
    return ood


def calibration_inputs(
    source: OODInputs,
    posterior: Posterior,
    train: Labelled,
    held_out: Evaluated,
    distance: Distance,
    d0_held_out: Tensor,
) -> tuple[Chosen, Tensor]:
    """Calibration inputs, of which at least one lies outside the radius, and their d0."""
    chosen = source(posterior, train, held_out)
    if chosen.rows is None:
        d0 = distance(check_inputs(chosen.x, "ood", like=train.x))
    else:  # measured already
        d0 = d0_held_out[chosen.rows.to(d0_held_out.device)]
    if d0.any() or not distance.spaces:
        return chosen, d0
    outside = torch.nonzero(d0_held_out > 0).flatten()
    if not len(outside):
        raise NothingToCalibrate(
            "All calibration inputs and held-out inputs are at distance 0: there is nothing to calibrate φ on; give "
            "inputs away from the training data with `ood`, or a smaller radius"
        )
    warnings.warn(
        f"The calibration inputs ({chosen.origin}) all lie inside the radius, at distance 0: calibrating on the "
        f"{len(outside)} held-out inputs outside it instead; give OOD inputs with `ood`, or a smaller radius",
        DapcalWarning,
        stacklevel=3,
    )
    rows = held_out.subset(outside.to(held_out.x.device))
    return Chosen(rows.x, rows.y, f"{len(outside)} held-out inputs outside the radius"), d0_held_out[outside]
