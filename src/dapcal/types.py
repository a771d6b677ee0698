"""The seams: records and protocols that the modules share.

Letters in shape comments mean the same everywhere: S draws, N inputs, C network outputs, K classes or targets,
P parameters (or projected dimensions after a projector), G parameter groups, k neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

    from dapcal.gaussians import Gaussian
    from dapcal.likelihoods import Likelihood
    from dapcal.moments import OutputMoments
    from dapcal.prior import Prior

ALPHA = 0.05
"""Inputs with a p-value up to this are flagged, where nobody asks for another."""

LEVEL = 0.95
"""Probability that an interval holds the target, where nobody asks for another."""

Projector = Callable[[Tensor], Tensor]
"""Maps a batch of inputs (N, ...) to points (N, P) in the space where distances are measured."""


class DapcalWarning(UserWarning):
    """Something was decided or degraded that the user should know of; the message says what to do."""


class Conditional(NamedTuple):
    """Moments of p(y | θ_s, x_n) for every draw: all that predictions need of a likelihood, computed once."""

    mean: Tensor  # (S, N, K) class probabilities, or the expected target
    variance: Tensor  # (S, N) for classes: 1 − Σ p²; (S, N, K) for targets
    entropy: Tensor  # (S, N)


class Ensemble(NamedTuple):
    """Weighted draws of a network's outputs: an (adjusted) posterior seen at N inputs.

    A posterior expectation is `Σ_s exp(log_weights[s]) · f(outputs[s])`. The base posterior has weights 1/S.
    """

    outputs: Tensor  # (S, N, C)
    conditional: Conditional
    log_weights: Tensor  # (S, N), float64
    spread: Tensor  # (N, K) or (N, 1) variance of the location outputs still to be added analytically
    importance: Tensor | None = None  # (S, N) log weights before they were normalised or completed


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
    comes back does the rest, so that many values of φ cost little more than one. An adjustment of your own may derive
    from this class, and then says only what is different from here.
    """

    @property
    def closed_form(self) -> bool:
        """Whether it sees a posterior through closed-form moments, where the posterior has them."""
        return False

    @property
    def limited(self) -> bool:
        """Whether predictions stop changing at some distance."""
        return False

    def fitted(self, likelihood: Likelihood, y: Tensor) -> Adjustment:  # noqa: ARG002
        """The adjustment with what it takes from the training targets."""
        return self

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """The posterior at inputs x, as a function of their distances."""
        ...
