"""Pre-distances d0 to the training inputs, the radius inside which nothing is far, and their combination.

    x ──projector──► z ──metric──► raw distance ──radius──► d0;  several spaces: the largest d0.

A metric is fitted by a function of the training points (`nearest`, `hausdorff`, `mmd`, or your own), a `Space` says
where and how to measure, and `Distance` holds the fitted spaces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapcal.errors import NothingToCalibrate
from dapcal.neighbors import TorchIndex
from dapcal.projectors import Features, ProjectorRecipe, fitted, median_distance, project
from dapcal.storing import Stores
from dapcal.types import DapcalWarning, Metric, NeighborIndex, Posterior, Projector

UNIT_QUANTILE = 0.95
SMALLEST_UNIT = 0.01  # of the radius: ties among held-out distances would give a unit of rounding size


def nearest(
    points: Tensor, *, k: int = 1, over: str = "max", index: Callable[[Tensor], NeighborIndex] = TorchIndex
) -> NearestNeighbor:
    """Distance to the k-th nearest training point; a set counts by its farthest point or by the sum.

    Args:
        points: training points (T, P).
        k: which neighbour. For k > 1 training points are at zero only if the radius covers them.
        over: "max" (the paper) or "sum" over the points of a set.
        index: how neighbours are found.
    """
    if over not in ("max", "sum"):
        raise ValueError(f"Expected `over` as 'max' or 'sum', got {over!r}")
    if not 1 <= k <= len(points):
        raise ValueError(f"Expected `k` between 1 and {len(points)} (training inputs), got {k}")
    return NearestNeighbor(index(points), k, over)


def hausdorff(points: Tensor, *, memory: int = 2**28) -> Hausdorff:
    """Symmetric Hausdorff distance: the nearest neighbour for one input, for a set also the training points' way."""
    return Hausdorff(TorchIndex(points, memory))


def mmd(points: Tensor, *, length_scale: float | None = None, seed: int = 0, memory: int = 2**28) -> MMD:
    """Biased maximum mean discrepancy with a Gaussian kernel between [ξ, training set] and the training set.

    Args:
        points: training points (T, P).
        length_scale: of the kernel; by default the median distance between training points.
        seed: of the pairs that the median is taken over.
        memory: bytes for one block of kernel values, about.
    """
    length = length_scale
    if length is None:
        length = median_distance(points, torch.Generator().manual_seed(seed))
    sums = MMD(points, length, 0.0, memory).kernel_sums(points)
    return MMD(points, length, float(sums.sum()) / len(points) ** 2, memory)


@dataclass(frozen=True, eq=False)
class NearestNeighbor:
    """d0(x*) = ‖z* − z_(k)‖, and for sets max or Σ over their points (paper, eq. d0_nn)."""

    stores = Stores()

    index: NeighborIndex
    k: int
    over: str

    def __call__(self, points: Tensor) -> Tensor:
        """(N,)."""
        return self.index.query(points, self.k)[0][:, -1]

    def joint(self, points: Tensor) -> Tensor:
        """Scalar."""
        return self.combine(self(points))

    def combine(self, distances: Tensor) -> Tensor:
        """Max or sum over the set."""
        return distances.max() if self.over == "max" else distances.sum()


@dataclass(frozen=True, eq=False)
class Hausdorff:
    """max(max_ξ min_x ‖ξ − x‖, max_x min_ξ ‖ξ − x‖). With ξ = [x*, training set] the second term vanishes."""

    stores = Stores()

    index: TorchIndex

    def __call__(self, points: Tensor) -> Tensor:
        """(N,)."""
        return self.index.query(points, 1)[0][:, 0]

    def joint(self, points: Tensor) -> Tensor:
        """Scalar, symmetric in the set and the training points."""
        there = self(points).max()
        back = TorchIndex(points.to(self.index.points), self.index.memory).query(self.index.points, 1)[0].max()
        return torch.maximum(there, back)


@dataclass(frozen=True, eq=False)
class MMD:
    """‖μ[ξ, x] − μ[x]‖ in the kernel's space; zero for ξ = x as a whole, not for each training input alone.

    For m new points among N training points the difference of means is m/(N + m) · (μ[ξ] − μ[x]).
    """

    stores = Stores()

    points: Tensor
    length_scale: float
    mean_kernel: float  # mean of k over all pairs of training points
    memory: int

    def __call__(self, points: Tensor) -> Tensor:
        """1/(N + 1) · √(1 − 2 mean_i k(x_i, x*) + mean k), (N,)."""
        n = len(self.points)
        squared = 1 - 2 * self.kernel_sums(points) / n + self.mean_kernel
        return (squared.clamp_min(0).sqrt() / (n + 1)).to(points.dtype)

    def joint(self, points: Tensor) -> Tensor:
        """Scalar."""
        n, m = len(self.points), len(points)
        own = MMD(points, self.length_scale, 0.0, self.memory).kernel_sums(points).sum() / m**2
        squared = own - 2 * self.kernel_sums(points).sum() / (n * m) + self.mean_kernel
        return (m / (n + m) * squared.clamp_min(0).sqrt()).to(points.dtype)

    def kernel_sums(self, points: Tensor) -> Tensor:
        """Σ_i exp(−‖x_i − z‖²/(2ℓ²)), (N,) in float64, by blocks."""
        columns = max(1, self.memory // (4 * 8 * max(64, self.points.shape[1])))
        rows = max(1, self.memory // (4 * 8 * min(columns, len(self.points))))
        sums = torch.zeros(len(points), dtype=torch.float64, device=self.points.device)
        for training in self.points.split(columns):
            for block, part in zip(points.to(self.points).split(rows), sums.split(rows), strict=True):
                squared = torch.cdist(block.double(), training.double()) ** 2
                part += torch.exp(-squared / (2 * self.length_scale**2)).sum(1)
        return sums


@dataclass(frozen=True)
class Radius:
    """d0 = max(0, (raw − start)/unit): nothing inside a typical in-distribution distance is far."""

    stores = Stores()

    start: float
    unit: float

    def __call__(self, raw: Tensor) -> Tensor:
        """Excess over the radius, in units of a typical distance."""
        return ((raw - self.start) / self.unit).clamp_min(0)


def fit_radius(raw: Tensor, quantile: float, name: str) -> Radius:
    """Start at a quantile of held-out distances; the unit is what lies between it and their 95 % quantile.

    The unit is at least a hundredth of the start: two quantiles this close differ by rounding alone, or nearly so
    (inputs on a grid). Two equal ones, or duplicates beyond 95 %, tell no spread at all; the unit is then the start.
    """
    if not 0 <= quantile < UNIT_QUANTILE:
        raise ValueError(f"Expected `radius` between 0 and {UNIT_QUANTILE} (or None), got {quantile}")
    raw = raw.double()
    positive = raw[raw > 0]
    if not len(positive):
        raise NothingToCalibrate(
            f"All held-out inputs have distance 0 to the training inputs in the {name} space: there is no typical "
            "distance; hold out inputs that are not in the training set, or use radius=None"
        )
    start, upper = float(raw.quantile(quantile)), float(raw.quantile(UNIT_QUANTILE))
    if start == 0:
        start = float(positive.min())
        warnings.warn(
            f"{100 * quantile:.0f} % of the held-out inputs have distance 0 in the {name} space (duplicate rows?): the "
            f"radius starts at the smallest positive distance, {start:.3g}",
            DapcalWarning,
            stacklevel=2,
        )
    return Radius(start, max(upper - start, SMALLEST_UNIT * start) if upper > start else start)


@dataclass(frozen=True)
class Space:
    """Where and how a distance is measured, before fitting.

    Args:
        projector: a callable x -> z, or a recipe of `dapcal.projectors`.
        metric: a function from training points to a `Metric`, e.g. `functools.partial(nearest, k=5)`.
        radius: quantile of held-out distances inside which d0 = 0; None is the paper.
        name: how reports call it.
    """

    projector: Projector | ProjectorRecipe = field(default_factory=Features)
    metric: Callable[[Tensor], Metric] = nearest
    radius: float | None = 0.9
    name: str = ""

    def fit(self, train: Tensor, held_out: Tensor, posterior: Posterior) -> FittedSpace:
        """Project the training inputs, fit the metric to them, and the radius to held-out inputs."""
        projector = fitted(self.projector, train, posterior)
        metric = self.metric(project(projector, train))
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
        return self.metric(project(self.projector, x))

    def excess(self, raw: Tensor) -> Tensor:
        """d0 from a raw distance."""
        return raw if self.radius is None else self.radius(raw)

    def joint(self, x: Tensor) -> Tensor:
        """d0 of a set, a scalar. Nearest neighbours: each point's excess, then max or sum.

        The radius is fitted to single inputs. Hausdorff and MMD distances of a set are on another scale (they depend on
        its size): use them with radius=None for joint predictions.
        """
        points = project(self.projector, x)
        if isinstance(self.metric, NearestNeighbor):
            return self.metric.combine(self.excess(self.metric(points)))
        return self.excess(self.metric.joint(points))


@dataclass(frozen=True, eq=False)
class Distance:
    """The largest d0 over one or more fitted spaces."""

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
        return torch.stack([s.excess(r) for s, r in zip(self.spaces, raw, strict=True)]).max(0).values

    def joint(self, x: Tensor) -> Tensor:
        """d0 of the inputs as one set, a scalar."""
        return _stack([space.joint(x) for space in self.spaces]).max()


def raw_in(spaces: tuple[FittedSpace, ...], x: Tensor) -> Tensor:
    """Raw distances in some spaces, (spaces, N)."""
    return _stack([space.raw(x) for space in spaces]) if spaces else torch.empty(0, len(x))


def fit_distance(
    spaces: Space | tuple[Space, ...] | list[Space], train: Tensor, held_out: Tensor, posterior: Posterior
) -> Distance:
    """Fit one space, or several of which the largest d0 counts."""
    several = (spaces,) if isinstance(spaces, Space) else tuple(spaces)
    if not several:
        raise ValueError("Expected at least one space to measure distances in, got none")
    return Distance(tuple(space.fit(train, held_out, posterior) for space in several))


def _stack(values: list[Tensor]) -> Tensor:
    """Stacked on the device of the first: features live where the model is, inputs where the data are."""
    return torch.stack([value.to(values[0].device) for value in values])
