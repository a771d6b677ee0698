"""Features: what enters a layer of a network, or of all members of an ensemble."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from dapcal.mapped import BLOCK, in_blocks
from dapcal.networks import feature_layer, layer_input, layer_names, open_pass, same_weights, shared
from dapcal.posteriors.network import MOST_MEMBERS, NetworkPosterior
from dapcal.storing import Stores
from dapcal.types import Posterior, Projector


@dataclass(frozen=True)
class Features:
    """Recipe: what enters a layer of the posterior's network (MAP, posterior mean, first member), or of all members.

    Args:
        layer: the layer's name; by default the last linear layer (with distance-aware parameters, where the prior
            is restricted to some), and without one the last convolution, whose input is averaged over places.
        unit: divide each feature vector by its length.
        members: look at the features of all members of an ensemble side by side, each in units of its own spread.
            Memory: members × inputs × width.
    """

    layer: str | None = None
    unit: bool = False
    members: bool = False

    def fit_projector(self, train: Tensor, posterior: Posterior) -> LayerFeatures | MemberFeatures:
        """Find the layer, and of members the spread of their features."""
        network = posterior.network
        if network is None:
            raise ValueError(
                "This posterior has no network to take features from; pass a projector (any callable), or "
                "measure distances between inputs with dapcal.distances.projectors.Identity()"
            )
        layer, pool = (
            feature_layer(network, train[:1], _aware_names(posterior)) if self.layer is None else (self.layer, False)
        )
        if layer not in dict(network.named_modules()):
            raise ValueError(f"The network has no layer `{layer}`; its layers are {layer_names(network)}")
        if not self.members:
            return LayerFeatures(network, layer, self.unit, pool)
        if not isinstance(posterior, NetworkPosterior) or not posterior.are_members:
            raise ValueError(
                f"Expected an ensemble of 2 to {MOST_MEMBERS} networks for features of all members, got {posterior!r}; "
                "use Features(), which looks at one network"
            )
        alike = MemberFeatures(posterior, layer, torch.ones(len(posterior.draws)), self.unit, pool)
        return replace(alike, scale=alike.spread(train))


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """What enters `layer` of a network in evaluation mode, flattened, or `pool`ed: (N, C, ...) averaged to (N, C)."""

    stores = Stores(network="network")

    network: nn.Module
    layer: str
    unit: bool = False
    pool: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Features (N, P), by one pass over the network for all who ask."""
        entering, of = layer_input(self.network, self.layer, x), partial(features_of, unit=self.unit, pool=self.pool)
        return in_blocks(of, entering) if self.unit or self.pool else of(entering)


@dataclass(frozen=True, eq=False)
class MemberFeatures:
    """What enters `layer` of every member of an ensemble, each divided by its spread, side by side."""

    stores = Stores(again="posterior")

    posterior: NetworkPosterior
    layer: str
    scale: Tensor  # (S,)
    unit: bool = False
    pool: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Features (N, S · P), by one pass over the members; all who ask for the same get one tensor."""
        open_one, same = open_pass(self.posterior.network, x), (self.layer, self.unit, self.pool, *self.scale.tolist())
        if open_one is not None and same in open_one.points:
            return open_one.points[same]
        found = in_blocks(
            lambda entering: side_by_side(features_of_each(entering, self.unit, self.pool), self.scale),
            self.posterior.layer_inputs(self.layer, x),
            dim=1,
        )
        if open_one is not None:
            open_one.points[same] = found
        return found

    def spread(self, x: Tensor) -> Tensor:
        """√(Σ_m Σ_p Var) of the features of every member, so that side by side they have variance 1, (S,)."""
        entering = self.posterior.layer_inputs(self.layer, x)  # (S, N, ...)
        count, none = entering.shape[1], entering.new_zeros((), dtype=torch.float64)
        mean = sum((block.sum(1, keepdim=True) for block in self._each(entering)), none) / count
        squares = sum(((block - mean).square().sum((1, 2)) for block in self._each(entering)), none) / count
        total = squares.sqrt().to(entering.dtype)
        return total.where(total > 0, 1.0) * math.sqrt(len(entering))

    def _each(self, entering: Tensor) -> Iterator[Tensor]:
        """Features (S, n, P) of each member alone in float64, block by block."""
        for block in entering.split(BLOCK, 1):
            yield features_of_each(block, self.unit, self.pool).double()


@dataclass(frozen=True, eq=False)
class OnePass:
    """Whose passes over the same inputs are one, and what is caught in it.

    Attributes:
        network: of the posterior that runs.
        layers: that its network's features are taken from.
        by_draw: that features of its members are taken from.
        same: networks whose weights, and whose posterior's members, are the same, and which need no pass.
        others: networks that run once more for all who ask, with the layers that are asked for.
    """

    network: nn.Module | None
    layers: tuple[str, ...]
    by_draw: tuple[str, ...]
    same: tuple[nn.Module, ...]
    others: tuple[tuple[nn.Module, tuple[str, ...]], ...]

    @contextmanager
    def over(self, x: Tensor) -> Iterator[None]:
        """While this is open, all projectors take features at inputs x from the pass in which the posterior sees them.

        Members that are not the posterior's (which was trained again) run once more.
        """
        with ExitStack() as stack:
            stack.enter_context(shared(self.network, x, self.layers, self.by_draw, self.same))
            for network, layers in self.others:
                stack.enter_context(shared(network, x, layers))
            yield


def one_pass(projectors: Iterable[Projector], posterior: Posterior) -> OnePass:
    """What projectors can take from a posterior's passes, also those that were fitted to another copy of it."""
    own = tuple(projectors)
    of_network = {id(p.network): p.network for p in own if isinstance(p, LayerFeatures)}
    of_members = {id(p.posterior): p.posterior for p in own if isinstance(p, MemberFeatures)}
    same_networks = {key for key, network in of_network.items() if _are_same(network, posterior.network)}
    same_members = {key for key, other in of_members.items() if _have_same_members(other, posterior)}
    networks = {id(n): n for n in of_network.values()} | {id(p.network): p.network for p in of_members.values()}
    same = same_networks | {id(of_members[key].network) for key in same_members}
    asked = {
        key: sorted({p.layer for p in own if isinstance(p, LayerFeatures) and id(p.network) == key}) for key in networks
    }
    return OnePass(
        network=posterior.network,
        layers=tuple(sorted({layer for key in same_networks for layer in asked[key]})),
        by_draw=tuple(
            sorted({p.layer for p in own if isinstance(p, MemberFeatures) and id(p.posterior) in same_members})
        ),
        same=tuple(network for key, network in networks.items() if key in same and network is not posterior.network),
        others=tuple((network, tuple(asked[key])) for key, network in networks.items() if key not in same),
    )


def _are_same(one: nn.Module, two: nn.Module | None) -> bool:
    """Whether two networks are one, or copies of one."""
    return one is two or (two is not None and repr(one) == repr(two) and same_weights(one, two))


def _have_same_members(one: NetworkPosterior, two: Posterior) -> bool:
    """Whether two posteriors have the same members, whatever else is beside them."""
    if one is two:
        return True
    if not isinstance(two, NetworkPosterior) or one.model is not two.model or one.layout != two.layout:
        return False
    pairs = ((one.shared, two.shared), (one.buffers, two.buffers), ({"": one.draws}, {"": two.draws}))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


def in_place_of(old: Posterior, new: Posterior, projector: Projector) -> Projector:
    """A projector that takes features from `new`, where it took them from `old`: the same members, seen in one pass."""
    if isinstance(projector, MemberFeatures) and projector.posterior is old:
        assert isinstance(new, NetworkPosterior)
        return replace(projector, posterior=new)
    if isinstance(projector, LayerFeatures) and projector.network is old.network:
        assert new.network is not None
        return replace(projector, network=new.network)
    return projector


def features_of(entering: Tensor, unit: bool, pool: bool) -> Tensor:
    """Features (N, P) from what enters a layer, (N, ...)."""
    z = entering.flatten(2).mean(2) if pool else entering.flatten(1)
    return nn.functional.normalize(z) if unit else z


def features_of_each(entering: Tensor, unit: bool, pool: bool) -> Tensor:
    """Features (S, N, P) from what enters a layer of every member, (S, N, ...)."""
    return torch.stack([features_of(own, unit, pool) for own in entering])


def side_by_side(features: Tensor, scale: Tensor) -> Tensor:
    """Features (S, N, P) of members, each divided by its scale (S,), as (N, S · P)."""
    return torch.cat([own / size for own, size in zip(features, scale, strict=True)], 1)


def _aware_names(posterior: Posterior) -> set[str] | None:
    """Parameters that a distance widens; None where these are all, or not known."""
    prior, layout = posterior.prior, getattr(posterior, "layout", None)
    if prior is None or layout is None or bool((prior.factor > 0).all()):
        return None
    starts = torch.tensor([0, *list(layout.sizes.values())[:-1]]).cumsum(0)
    positive = (prior.factor[prior.group[starts]] > 0).tolist()
    return {name for name, aware in zip(layout.names, positive, strict=True) if aware}
