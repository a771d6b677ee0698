"""Raw distances as modules: what enters a network's layers, projectors, nearest neighbours and nearest classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor, nn

from dapcal.deploy.posteriors import every, posterior_module
from dapcal.distances import FittedSpace, NearestClass, NearestNeighbor
from dapcal.distances.column_checks import ColumnChecks
from dapcal.distances.features import features_of, features_of_each, side_by_side
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import FourierFeatures, Identity, LayerFeatures, MemberFeatures
from dapcal.distances.standardised import Scaled
from dapcal.moving import moved
from dapcal.networks import entering, frozen_copy, same_weights, unfused
from dapcal.types import Posterior

BLOCK = 2**14  # training points whose products with a batch are in memory at once
MORE = 8  # candidates beyond the k-th: rounding may have put them in a wrong order


class Entering(nn.Module):
    """What enters some layers of a network, all in one pass."""

    def __init__(self, network: nn.Module | None, layers: Iterable[str]) -> None:
        super().__init__()
        self.layers = sorted(layers)
        self.network = frozen_copy(network) if network is not None and self.layers else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Activations (N, ...) by the layer's name."""
        seen: dict[str, Tensor] = {}
        if self.network is None:
            return seen
        layers = {name: self.network.get_submodule(name) for name in self.layers}
        with unfused(), entering(layers, lambda name, z: seen.update({name: z})):
            self.network(x)
        return seen


class SpaceModule(nn.Module):
    """The distance of inputs to training points or classes in one space, before the radius."""

    def __init__(self, space: FittedSpace, posterior: Posterior, example: Tensor) -> None:
        super().__init__()
        self.projector = _projector_module(space, posterior, example)
        self.nearest = _metric_module(space)

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:
        """(N,) in float64."""
        distance: Tensor = self.nearest(self.projector(x, entering))
        return distance


def _metric_module(space: FittedSpace) -> nn.Module:
    metric = space.metric
    if isinstance(metric, NearestClass):
        return ToClass(metric)
    if isinstance(metric, ColumnChecks):
        return Columns(metric)
    if not isinstance(metric, NearestNeighbor) or not isinstance(metric.index, TorchIndex):
        found = type(metric.index if isinstance(metric, NearestNeighbor) else metric).__name__
        raise TypeError(
            f"Expected distances to nearest neighbours by TorchIndex in space `{space.name}`, got {found}; "
            "calibrate with dapcal.distances.nearest, or predict with calibrated(x)"
        )
    return Nearest(metric.index.points, metric.k)


class Columns(nn.Module):
    """Surprise of a table's rows, column by column."""

    def __init__(self, metric: ColumnChecks) -> None:
        super().__init__()
        self.metric = metric

    def forward(self, points: Tensor) -> Tensor:
        """(N,) in float64."""
        return self.metric(points).double()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.metric = moved(self.metric, fn(torch.zeros(())).device)
        return super()._apply(fn, recurse)


def _projector_module(space: FittedSpace, posterior: Posterior, example: Tensor) -> nn.Module:
    projector, network = space.projector, posterior.network
    if isinstance(projector, Identity):
        return Inputs()
    if isinstance(projector, Scaled):
        return Divided(projector)
    if isinstance(projector, FourierFeatures):
        return Fourier(projector)
    if isinstance(projector, LayerFeatures):
        if network is None or not same_weights(projector.network, network):
            raise ValueError(
                f"Expected the features of space `{space.name}` from the posterior's own network, got another; "
                "calibrate with dapcal.distances.projectors.Features, or predict with calibrated(x)"
            )
        return Features(projector)
    if isinstance(projector, MemberFeatures):
        members = (
            None
            if projector.posterior is posterior
            else posterior_module(projector.posterior, example, [projector.layer])
        )
        return FeaturesOfMembers(projector, members)
    raise TypeError(
        f"Expected inputs (Identity), Features or RandomFourier as projector of space `{space.name}`, got "
        f"{type(projector).__name__}; calibrate with one of them, or predict with calibrated(x)"
    )


class Inputs(nn.Module):
    """The inputs themselves."""

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Points (N, P)."""
        return Identity()(x)


class Divided(nn.Module):
    """Inputs in units of what they vary by."""

    scale: Tensor

    def __init__(self, projector: Scaled) -> None:
        super().__init__()
        self.register_buffer("scale", projector.scale.clone())

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Points (N, P)."""
        return Scaled(self.scale)(x)


class Fourier(nn.Module):
    """Random Fourier features."""

    frequencies: Tensor
    phases: Tensor

    def __init__(self, projector: FourierFeatures) -> None:
        super().__init__()
        self.register_buffer("frequencies", projector.frequencies.clone())
        self.register_buffer("phases", projector.phases.clone())

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Points (N, P)."""
        return FourierFeatures(self.frequencies, self.phases)(x)


class Features(nn.Module):
    """`LayerFeatures` of activations that are known already."""

    def __init__(self, projector: LayerFeatures) -> None:
        super().__init__()
        self.layer, self.unit, self.pool = projector.layer, projector.unit, projector.pool

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Points (N, P)."""
        return features_of(entering[self.layer], self.unit, self.pool)


class FeaturesOfMembers(nn.Module):
    """`MemberFeatures` of activations that are known already, or of members that are not the posterior's."""

    scale: Tensor

    def __init__(self, projector: MemberFeatures, members: nn.Module | None) -> None:
        super().__init__()
        self.members = members
        self.layer, self.unit, self.pool = every(projector.layer), projector.unit, projector.pool
        self.register_buffer("scale", projector.scale.clone())

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:
        """Points (N, S · P)."""
        if self.members is not None:
            self.members(x, entering := {})
        return side_by_side(features_of_each(entering[self.layer], self.unit, self.pool), self.scale)


class ToClass(nn.Module):
    """`NearestClass` by matrix products: ‖w‖² − 2 w·c + ‖c‖² of whitened points and class means, in float64."""

    whitening: Tensor
    centers: Tensor

    def __init__(self, metric: NearestClass) -> None:
        super().__init__()
        self.register_buffer("whitening", metric.whitening.T.clone(memory_format=torch.contiguous_format))
        self.register_buffer("centers", metric.centers.T.clone(memory_format=torch.contiguous_format))  # (P, K)

    def forward(self, z: Tensor) -> Tensor:
        """(N,) in float64."""
        white = z.double() @ self.whitening
        squared = white.square().sum(1, keepdim=True) - 2 * white @ self.centers + self.centers.square().sum(0)
        return squared.amin(1).clamp_min(0).sqrt()


class Nearest(nn.Module):
    """Distance to the k-th nearest of the training points, in blocks of them.

    ½‖t‖² − q·t of centred points in float64, which orders them as ‖q − t‖ does, finds candidates in each block; their
    distances are computed directly, so that a training point is at distance 0 from itself. Unlike `TorchIndex` nothing
    proves that no other point is nearer, but it would take more than `MORE` of them that are as near up to rounding.
    """

    center: Tensor

    def __init__(self, points: Tensor, k: int) -> None:
        super().__init__()
        self.k = k
        self.register_buffer("center", points.double().mean(0))
        self.blocks = nn.ModuleList(Block(part.double() - self.center) for part in points.split(BLOCK))

    def forward(self, z: Tensor) -> Tensor:
        """(N,) in float64."""
        queries = z.double() - self.center
        found = torch.cat([block(queries, self.k) for block in self.blocks], 1)
        return found.topk(self.k, largest=False).values[:, -1]


class Block(nn.Module):
    """Some of the training points, centred, in columns: the order in which a query is multiplied with them."""

    columns: Tensor
    halves: Tensor

    def __init__(self, points: Tensor) -> None:
        super().__init__()
        self.register_buffer("columns", points.T.clone(memory_format=torch.contiguous_format))  # (P, points)
        self.register_buffer("halves", (points**2).sum(1) / 2)

    def forward(self, queries: Tensor, k: int) -> Tensor:
        """Direct distances to k nearest points and some more, (N, candidates)."""
        order = self.halves - queries @ self.columns  # (N, points)
        candidates = order.topk(min(k + MORE, len(self.halves)), largest=False).indices
        return (queries.T[:, :, None] - self.columns[:, candidates]).square().sum(0).sqrt()
