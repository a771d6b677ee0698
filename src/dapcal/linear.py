"""Networks whose outputs are linear in the random parameters: a last layer, or a first-order expansion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from dapcal.gaussians import DiagonalGaussian, KroneckerGaussian
from dapcal.likelihoods import Likelihood
from dapcal.moments import OutputMoments, Profile, aware_groups, from_jacobian, joined, make_pieces, need_prior
from dapcal.networks import MEMORY, Layout, as_tensor, one_column
from dapcal.prior import Prior
from dapcal.projectors import LayerFeatures

if TYPE_CHECKING:
    from dapcal.posteriors.network import NetworkPosterior


class Linear(Protocol):
    """How the outputs of a network follow from its random parameters, linearly."""

    def outputs(self, posterior: NetworkPosterior, draws: Tensor, x: Tensor) -> Tensor:
        """Outputs (S, N, C) of parameter vectors (S, P)."""
        ...

    def moments(self, posterior: NetworkPosterior, x: Tensor, moving: bool) -> OutputMoments:
        """Mean and variance of the outputs; `moving` prepares them for other distances."""
        ...


@dataclass(frozen=True)
class LastLayer:
    """The random parameters are those of a final linear layer: outputs are exactly linear, and one pass does for all.

    Args:
        layer: its name.
        bias: whether it has one.
    """

    layer: str
    bias: bool

    def outputs(self, posterior: NetworkPosterior, draws: Tensor, x: Tensor) -> Tensor:
        """Features times the weights of every draw."""
        features = self.features(posterior.network, x)
        index = layer_index(posterior.layout, self.layer, self.bias).to(draws.device)
        return torch.einsum("nd,scd->snc", features, draws[:, index])

    def moments(self, posterior: NetworkPosterior, x: Tensor, moving: bool) -> OutputMoments:
        """J = I ⊗ φᵀ: the variance follows from features and eigenbases, for all inputs at once."""
        features, likelihood, gaussian = self.features(posterior.network, x), posterior.likelihood, posterior.gaussian
        index = layer_index(posterior.layout, self.layer, self.bias).to(features.device)
        mean = features @ posterior.center[index].T
        left = likelihood.locations(torch.eye(len(index), dtype=torch.float64, device=features.device)).T  # (L, C)
        if isinstance(gaussian, DiagonalGaussian | KroneckerGaussian):
            parts = _parts(gaussian, posterior.prior, index, left, features.double())
            return _from_parts(likelihood, posterior.prior, mean, parts, moving)
        prepared = from_jacobian(likelihood, gaussian, posterior.prior, moving)
        step = max(1, MEMORY // (8 * len(left) * len(posterior.center)))

        def dense(rows: Tensor) -> Tensor:
            jacobian = rows.new_zeros(len(rows), len(left), len(posterior.center), dtype=torch.float64)
            jacobian[:, :, index.flatten()] = torch.einsum("lc,nd->nlcd", left, rows.double()).flatten(2)
            return jacobian

        return joined(prepared(m, dense(f)) for m, f in zip(mean.split(step), features.split(step), strict=True))

    def features(self, network: nn.Module, x: Tensor, batch_size: int = 512) -> Tensor:
        """What enters the layer, with a one for the bias, (N, D)."""
        project = LayerFeatures(network, self.layer)
        with torch.no_grad():
            features = torch.cat([project(batch) for batch in x.split(batch_size)])
        return torch.cat([features, features.new_ones(len(features), 1)], 1) if self.bias else features


@dataclass(frozen=True)
class Linearised:
    """The network replaced by its first-order expansion at the mean, f + J (θ − μ) (Immer et al. 2021)."""

    def outputs(self, posterior: NetworkPosterior, draws: Tensor, x: Tensor) -> Tensor:
        """One Jacobian for all draws."""
        deviations = draws - posterior.center
        pieces = []
        for batch in x.split(_rows(posterior, x)):
            mean, jacobian = _expansion(posterior, batch)
            pieces.append(mean + torch.einsum("ncp,sp->snc", jacobian, deviations))
        return torch.cat(pieces, 1)

    def moments(self, posterior: NetworkPosterior, x: Tensor, moving: bool) -> OutputMoments:
        """J Σ Jᵀ, a few inputs at a time: memory is bounded by the Jacobian of one chunk."""
        prepared = from_jacobian(posterior.likelihood, posterior.gaussian, posterior.prior, moving)
        found = []
        for batch in x.split(_rows(posterior, x)):
            mean, jacobian = _expansion(posterior, batch)
            located = posterior.likelihood.locations(jacobian.double().transpose(1, 2)).transpose(1, 2)  # (n, L, P)
            found.append(prepared(mean, located))
        return joined(found)


def layer_index(layout: Layout, layer: str, bias: bool) -> Tensor:
    """Positions of a linear layer's [weight, bias] in the flat vector, as a matrix (C, D)."""
    positions = layout.unflatten(torch.arange(sum(layout.sizes.values())))
    weight = positions[f"{layer}.weight"].flatten(1)
    return torch.cat([weight, positions[f"{layer}.bias"][:, None]], 1) if bias else weight


def center_outputs(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs (N, C) of one set of parameters and buffers, without gradients."""
    with torch.no_grad():
        return one_column(as_tensor(functional_call(model, parameters, (x,))))


def pulled_back(
    model: nn.Module, shared: dict[str, Tensor], layout: Layout, center: Tensor, x: Tensor, roots: Tensor
) -> Tensor:
    """Cotangents R (N, C, M) of the outputs pulled back to the parameters: Jᵀ R for every input, (N, M, P).

    Vectorised over inputs; one after the other for models that `vmap` cannot run.
    """

    def forward(vector: Tensor, one: Tensor) -> Tensor:
        return as_tensor(functional_call(model, {**shared, **layout.unflatten(vector)}, (one[None],))).reshape(-1)

    def pull(one: Tensor, root: Tensor) -> Tensor:
        back = vjp(lambda vector: forward(vector, one), center)[1]
        return vmap(lambda column: back(column)[0])(root.T)

    try:
        return vmap(pull)(x, roots).detach()
    except RuntimeError:
        return torch.stack([_pull_one(forward, center, one, root) for one, root in zip(x, roots, strict=True)])


def _pull_one(forward: Callable[[Tensor, Tensor], Tensor], center: Tensor, one: Tensor, root: Tensor) -> Tensor:
    vector = center.detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = forward(vector, one)
        return torch.stack([torch.autograd.grad(outputs, vector, c, retain_graph=True)[0] for c in root.T])


def _expansion(posterior: NetworkPosterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (N, C) at the center and their derivatives (N, C, P)."""
    x = x.to(posterior.center.device)
    model, shared, layout, center = posterior.model, posterior.shared, posterior.layout, posterior.center
    outputs = center_outputs(model, {**shared, **layout.unflatten(center)}, x)
    eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).expand(len(x), -1, -1)
    return outputs, pulled_back(model, shared, layout, center, x, eye)


def _rows(posterior: NetworkPosterior, x: Tensor) -> int:
    """Inputs whose Jacobian fits into the memory of a step."""
    own = {**posterior.shared, **posterior.layout.unflatten(posterior.center)}
    outputs = center_outputs(posterior.model, own, x[:1].to(posterior.center.device))
    return max(1, min(512, MEMORY // (16 * outputs.shape[1] * len(posterior.center))))


class _Part(NamedTuple):
    """Parameters of a layer that are independent after rotating its rows and columns."""

    left: Tensor  # (L, rows), squared
    right: Tensor  # (N, columns), squared
    variance: Tensor  # (rows, columns)
    group: Tensor  # (rows, columns) of the prior


def _parts(
    gaussian: DiagonalGaussian | KroneckerGaussian, prior: Prior | None, index: Tensor, left: Tensor, right: Tensor
) -> list[_Part]:
    """The layer's Jacobian left ⊗ right, (L, C) ⊗ (N, D), in the Gaussian's own directions."""
    group = torch.zeros_like(index) if prior is None else prior.group[index]
    variance = gaussian.variance.double()
    alone = torch.ones_like(index, dtype=torch.bool)
    parts = []
    for block in gaussian.blocks if isinstance(gaussian, KroneckerGaussian) else ():
        columns = (index[0][:, None] == block.index[0]).double().argmax(0)  # of the layer's matrix
        if len(block.index) != len(index) or not torch.equal(index[:, columns], block.index):
            raise ValueError("Expected Kronecker blocks of whole columns of the last layer; fit the posterior again")
        turned = (left @ block.left.double()) ** 2, (right[:, columns] @ block.right.double()) ** 2
        parts.append(_Part(*turned, variance[block.index], group[:, columns]))
        alone[:, columns] = False
    if alone.any():
        parts.append(_Part(left**2, right**2, variance[index] * alone, group))
    return parts


def _from_parts(
    likelihood: Likelihood, prior: Prior | None, mean: Tensor, parts: list[_Part], moving: bool
) -> OutputMoments:
    lefts = [likelihood.pooled(p.left.T).T for p in parts]  # (K, rows)
    variance = torch.stack([p.right @ p.variance.T @ k.T for p, k in zip(parts, lefts, strict=True)]).sum(0)
    if not moving:
        return OutputMoments(mean, variance)
    prior = need_prior(prior)
    profiles = []
    for group in aware_groups(prior):
        own = [p.variance * (p.group == group) for p in parts]
        pieces = make_pieces(torch.cat([v.flatten() for v in own]), float(prior.sigma0[group]))
        weights = variance.new_zeros(*variance.shape, len(pieces.nodes))
        start = 0
        for part, left, along in zip(parts, lefts, own, strict=True):
            for row, values in enumerate(along):  # rows are classes
                nodes = values[:, None] * pieces.rows(start, start + len(values))  # (columns, M)
                weights += left[:, row, None] * (part.right @ nodes)[:, None]
                start += len(values)
        profiles.append(Profile(group, weights, pieces.nodes))
    return OutputMoments(mean, variance, tuple(profiles), prior)
