"""The seams: records and protocols that the modules share. Read it first: words mean the same everywhere.

draw             one set of a network's parameters, or of its outputs, from a posterior
member           a draw that was trained by itself (of an ensemble)
posterior        p(θ | data), seen through draws or closed-form moments of the outputs
adjustment       what widens, moves or weights a posterior with distance
space            where distances are measured: a projector, a metric
pre-distance d0  distance to the training inputs, beyond the radius and in its unit; distance d = g(φ) d0
radius           a typical in-distribution distance, inside which d0 = 0
guard            nats by which calibration may raise the held-out negative log-likelihood
chooses, judges  the half of the held-out data that chooses φ, radius and scales; the half that p-values are read from
calibration inputs   inputs x* that φ is chosen on
evidence piece   a number that speaks for "out of distribution"; their sum, standardised, is the OOD score
p-value, flag    share of the judging inputs with a score as high; flagged where it is at most ALPHA
reason           the piece that a flag is put down to, in words: "ambiguous" (doubt), "far …" (a distance)
artefact         a file that holds a calibrated posterior; model: what a command hands around (table's, network's)

Letters in shape comments mean the same everywhere: S draws, N inputs, C network outputs, K classes or targets,
P parameters (or projected dimensions after a projector), G parameter groups, k neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from dapcal.gaussians import Gaussian
from dapcal.likelihoods import Likelihood
from dapcal.moments import OutputMoments
from dapcal.prior import Prior
from dapcal.records import ALPHA, LEVEL, Conditional, DapcalWarning, Ensemble

__all__ = [
    "ALPHA", "LEVEL", "Adjusted", "Adjustment", "Conditional", "DapcalWarning", "Ensemble", "Metric", "NeighborIndex",
    "Posterior", "Projector", "Scale",
]  # fmt: skip

Projector = Callable[[Tensor], Tensor]
"""Maps a batch of inputs (N, ...) to points (N, P) in the space where distances are measured."""


class Scale(Protocol):
    """g(φ): a smooth positive factor, increasing in φ."""

    def __call__(self, phi: Tensor) -> Tensor:
        """g(φ)."""
        ...

    def inverse(self, factor: Tensor) -> Tensor:
        """φ with g(φ) = factor; ±inf where g does not reach it."""
        ...


class NeighborIndex(Protocol):
    """Exact nearest-neighbour search over a fixed set of points."""

    def query(self, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Distances (N, k), ascending, and indices (N, k) of the k nearest training points."""
        ...


class Metric(Protocol):
    """A pre-distance d0 from points to a fixed training set; never negative, zero on the training set."""

    def __call__(self, points: Tensor) -> Tensor:
        """d0 of every point on its own, (N,)."""
        ...

    def joint(self, points: Tensor) -> Tensor:
        """d0 of the points as one set, a scalar."""
        ...


class Posterior(Protocol):
    """Draws from p(θ | data), fixed at construction, seen through the outputs they give.

    `outputs` is all that every posterior has. What else may be asked for is None where it is missing.
    """

    @property
    def likelihood(self) -> Likelihood:
        """p(y | outputs)."""
        ...

    @property
    def squared_norms(self) -> Tensor | None:
        """‖θ_s‖² per parameter group, (S, G) in float64."""
        ...

    @property
    def gaussian(self) -> Gaussian | None:
        """Moments, where the posterior is a Gaussian."""
        ...

    @property
    def prior(self) -> Prior | None:
        """The distance-aware prior: σ0 and the distance's scale per parameter group."""
        ...

    @property
    def network(self) -> nn.Module | None:
        """One network that stands for the posterior (MAP, posterior mean, first member), for its features."""
        ...

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all draws at a batch of inputs, (S, N, C)."""
        ...

    def moments(self, x: Tensor, moving: bool = False) -> OutputMoments | None:
        """Mean and variance of the outputs in closed form, where they are linear in the parameters; None elsewhere.

        `moving` prepares them for other distances, too.
        """
        ...


Adjusted = Callable[[Tensor], Ensemble]
"""Maps distances d (N,) to the posterior adjusted to them; d = 0 gives back the base posterior exactly."""


@runtime_checkable
class Adjustment(Protocol):
    """Adjusts a posterior to a distance, in two stages.

    What does not depend on the distance (forward passes, decompositions) happens in the call; the function that
    comes back does the rest, so that many values of φ cost little more than one. Your adjustment may derive from
    this class, and then says only what is different from here.
    """

    @property
    def closed_form(self) -> bool:
        """Whether it sees a posterior through closed-form moments, where the posterior has them."""
        return False

    @property
    def limited(self) -> bool:
        """Whether predictions stop changing at some distance."""
        return False

    @property
    def heeds_distance(self) -> bool:
        """Whether predictions depend on the distance at all; where they do not, φ is not searched for."""
        return True

    def fitted(self, likelihood: Likelihood, y: Tensor) -> Adjustment:  # noqa: ARG002
        """The adjustment with what it takes from the training targets."""
        return self

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """The posterior at inputs x, as a function of their distances."""
        ...
