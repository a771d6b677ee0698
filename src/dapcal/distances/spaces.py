"""Where distances are measured: spaces before and after fitting, and their combination.

    x ──projector──► z ──metric──► raw distance ──radius──► d0;  several spaces: the largest d0.

A `Space` says where and how to measure, `FittedSpace` measures, and `Distance` holds the fitted spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dapcal.distances.metrics import NearestNeighbor, nearest
from dapcal.distances.once import once
from dapcal.distances.projectors import Features, ProjectorRecipe, fitted, project
from dapcal.distances.quality import Judged
from dapcal.distances.radius import Radius, fit_radius
from dapcal.networks import reads
from dapcal.storing import Stores
from dapcal.types import Metric, Posterior, Projector


@runtime_checkable
class MetricRecipe(Protocol):
    """A metric that is fitted to training points and their targets."""

    def fit_metric(self, points: Tensor, y: Tensor | None) -> Metric:
        """The fitted metric; refuses targets that it cannot use."""
        ...


@dataclass(frozen=True)
class Space:
    """Where and how a distance is measured, before fitting.

    Args:
        projector: a callable x -> z, or a recipe of `dapcal.distances.projectors`.
        metric: a function from training points to a `Metric`, e.g. `functools.partial(nearest, k=5)`, or a recipe that
            looks at training targets, too, e.g. `ClassGaussian()`.
        radius: quantile of held-out distances inside which d0 = 0; None is the paper.
        name: how reports call it.
    """

    projector: Projector | ProjectorRecipe = field(default_factory=Features)
    metric: Callable[[Tensor], Metric] | MetricRecipe = nearest
    radius: float | None = 0.9
    name: str = ""

    def fit(self, train: Tensor, held_out: Tensor, posterior: Posterior, y: Tensor | None = None) -> FittedSpace:
        """Project the training inputs, fit the metric to them, and the radius to held-out inputs.

        Args:
            train: training inputs.
            held_out: in-distribution inputs that the posterior was not fitted to.
            posterior: whose network gives features.
            y: training targets, for metrics that look at them.
        """
        fields = reads(posterior.network)
        if fields is not None and not isinstance(self.projector, Features):
            raise ValueError(
                f"Expected features as the space of a network with several inputs {list(fields.names)}: packed side by "
                "side, they have no distance; use Space(Features())"
            )
        projector = fitted(self.projector, train, posterior)
        points, recipe = project(projector, train), self.metric
        metric = recipe.fit_metric(points, y) if isinstance(recipe, MetricRecipe) else recipe(points)
        name = self.name or type(self.projector).__name__.lower()
        space = FittedSpace(name, projector, metric, None)
        if self.radius is None:
            return space
        return FittedSpace(name, projector, metric, fit_radius(space.raw(held_out), self.radius, name))


@dataclass(frozen=True, eq=False)
class FittedSpace:
    """One projector, one metric, one radius."""

    stores = Stores(given={"projector": "projector"})

    name: str
    projector: Projector
    metric: Metric
    radius: Radius | None

    def raw(self, x: Tensor) -> Tensor:
        """Distance before the radius, (N,)."""
        return once(self.metric, x, lambda: self.metric(project(self.projector, x)))

    def excess(self, raw: Tensor) -> Tensor:
        """d0 from a raw distance."""
        return raw if self.radius is None else self.radius(raw)

    def joint(self, x: Tensor) -> Tensor:
        """d0 of a set, a scalar. Nearest neighbours: each point's excess, then max or sum.

        The radius is fitted to single inputs. Hausdorff and MMD distances of a set are on another scale (they depend on
        its size): use them with radius=None for joint predictions.
        """
        if isinstance(self.metric, NearestNeighbor):
            return self.metric.combine(self.excess(self.raw(x)))
        return self.excess(self.metric.joint(project(self.projector, x)))


@dataclass(frozen=True, eq=False)
class Distance:
    """The largest d0 over the fitted spaces; without any, nothing is far and d0 = 0."""

    stores = Stores()

    spaces: tuple[FittedSpace, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """d0 of every input, (N,)."""
        return self.combine(self.raw(x))

    def raw(self, x: Tensor) -> Tensor:
        """Raw distances in every space, (spaces, N)."""
        return raw_in(self.spaces, x)

    def combine(self, raw: Tensor) -> Tensor:
        """d0 (N,) from raw distances (spaces, N)."""
        if not self.spaces:
            return raw.new_zeros(raw.shape[1])
        return torch.stack([s.excess(r) for s, r in zip(self.spaces, raw, strict=True)]).max(0).values

    def joint(self, x: Tensor) -> Tensor:
        """d0 of the inputs as one set, a scalar."""
        return _stack([space.joint(x) for space in self.spaces]).max() if self.spaces else torch.zeros(())


def raw_in(spaces: tuple[FittedSpace, ...], x: Tensor) -> Tensor:
    """Raw distances in some spaces, (spaces, N)."""
    return _stack([space.raw(x) for space in spaces]) if spaces else torch.empty(0, len(x), device=x.device)


def indexes_in_words(spaces: Sequence[FittedSpace]) -> tuple[str, ...]:
    """How good the indexes of these spaces are, where they are not exact."""
    found = ((space.name, space.metric.index) for space in spaces if isinstance(space.metric, NearestNeighbor))
    return tuple(f"{name}: {index.note}" for name, index in found if isinstance(index, Judged))


def fit_distance(
    spaces: Space | tuple[Space, ...] | list[Space],
    train: Tensor,
    held_out: Tensor,
    posterior: Posterior,
    y: Tensor | None = None,
) -> Distance:
    """Fit one space, or several of which the largest d0 counts; arguments as in `Space.fit`."""
    several = (spaces,) if isinstance(spaces, Space) else tuple(spaces)
    if not several:
        raise ValueError("Expected at least one space to measure distances in, got none")
    return Distance(tuple(space.fit(train, held_out, posterior, y) for space in several))


def _stack(values: list[Tensor]) -> Tensor:
    """Stacked on the device of the first: features live where the model is, inputs where the data are."""
    return torch.stack([value.to(values[0].device) for value in values])
