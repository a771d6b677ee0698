"""Networks whose outputs are linear in the random parameters: a last layer, or a first-order expansion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from dapcal.gaussians import DiagonalGaussian, FullGaussian, Gaussian, KroneckerGaussian
from dapcal.likelihoods import Likelihood
from dapcal.moments import OutputMoments, Profile, aware_groups, from_jacobian, joined, make_pieces, need_prior
from dapcal.networks import (
    MEMORY,
    Layout,
    as_tensor,
    backward_in_evaluation,
    checked_outputs,
    layer_input,
    parameter_name,
    running,
    vectorising,
)
from dapcal.prior import Prior
from dapcal.storing import Stores

BATCH = 512  # inputs at a time


OutputsOf = Callable[[Tensor, Tensor], Tensor]
"""Outputs (S, n, C) of parameter vectors (S, P) at n of the inputs, given by their rows."""


class Parametric(Protocol):
    """A posterior over a network's parameters, as far as linear outputs need it (`posteriors.network`)."""

    @property
    def model(self) -> nn.Module: ...  # noqa: D102

    @property
    def likelihood(self) -> Likelihood: ...  # noqa: D102

    @property
    def layout(self) -> Layout: ...  # noqa: D102

    @property
    def center(self) -> Tensor: ...  # noqa: D102

    @property
    def shared(self) -> dict[str, Tensor]: ...  # noqa: D102

    @property
    def gaussian(self) -> Gaussian | None: ...  # noqa: D102

    @property
    def prior(self) -> Prior | None: ...  # noqa: D102

    @property
    def network(self) -> nn.Module: ...  # noqa: D102


class Linear(Protocol):
    """How the outputs of a network follow from its random parameters, linearly."""

    def outputs(self, posterior: Parametric, draws: Tensor, x: Tensor) -> Tensor:
        """Outputs (S, N, C) of parameter vectors (S, P)."""
        ...

    def prepared(self, posterior: Parametric, x: Tensor) -> OutputsOf:
        """The same for many parameter vectors at some of the inputs: what they share is computed once."""
        ...

    def moments(self, posterior: Parametric, x: Tensor, moving: bool) -> OutputMoments:
        """Mean and variance of the outputs; `moving` prepares them for other distances."""
        ...


@dataclass(frozen=True)
class LastLayer:
    """The random parameters are those of a final linear layer: outputs are exactly linear, and one pass does for all.

    Args:
        layer: its name.
        bias: whether it has one.
    """

    stores = Stores()

    layer: str
    bias: bool

    def outputs(self, posterior: Parametric, draws: Tensor, x: Tensor) -> Tensor:
        """Features times the weights of every draw."""
        weights = draws[:, layer_index(posterior.layout, self.layer, self.bias).to(draws.device)]  # (S, C, D)
        batches = self.features(posterior.network, x).split(BATCH)
        return torch.cat([torch.einsum("nd,scd->snc", features, weights) for features in batches], 1)

    def prepared(self, posterior: Parametric, x: Tensor) -> OutputsOf:
        """The features, once."""
        features = self.features(posterior.network, x)
        index = layer_index(posterior.layout, self.layer, self.bias).to(features.device)
        return lambda draws, rows: torch.einsum("nd,scd->snc", features[rows], draws[:, index])

    def moments(self, posterior: Parametric, x: Tensor, moving: bool) -> OutputMoments:
        """J = I ⊗ φᵀ: the variance follows from features and eigenbases, for a whole batch at once."""
        likelihood, gaussian, prior, center = (
            posterior.likelihood, posterior.gaussian, posterior.prior, posterior.center,
        )  # fmt: skip
        index = layer_index(posterior.layout, self.layer, self.bias).to(center.device)
        left = likelihood.locations(torch.eye(len(index), dtype=torch.float64, device=center.device)).T  # (L, C)
        features = self.features(posterior.network, x)
        if isinstance(gaussian, FullGaussian):
            forms = gaussian.forms(index, pooled_weights(likelihood, left))  # (K, D, D)
            wide = features.double()
            variance = torch.stack([(wide @ form * wide).sum(1) for form in forms], 1).clamp_min(0)
            plain = OutputMoments(features @ center[index].T, variance)
            if not moving:
                return plain
        separable = isinstance(gaussian, DiagonalGaussian | KroneckerGaussian)
        if moving and isinstance(gaussian, KroneckerGaussian):
            gaussian.check(need_prior(prior))
        prepared = None if separable else from_jacobian(likelihood, gaussian, prior, moving)
        # of a dense Jacobian only a few inputs fit
        step = BATCH if separable else max(1, min(BATCH, MEMORY // (16 * len(left) * len(center))))
        found = []
        for part in features.split(step):
            mean, right = part @ center[index].T, part.double()
            if isinstance(gaussian, DiagonalGaussian | KroneckerGaussian):
                found.append(_from_parts(likelihood, prior, mean, _parts(gaussian, prior, index, left, right), moving))
            elif prepared is not None:
                jacobian = right.new_zeros(len(right), len(left), len(center))
                jacobian[:, :, index.flatten()] = torch.einsum("lc,nd->nlcd", left, right).flatten(2)
                found.append(prepared(mean, jacobian))
        if not isinstance(gaussian, FullGaussian):
            return joined(found)
        return replace(joined(found), mean=plain.mean, variance=plain.variance)  # the same, bit by bit, at distance 0

    def features(self, network: nn.Module, x: Tensor) -> Tensor:
        """What enters the layer, with a one for the bias, (N, D)."""
        features = layer_input(network, self.layer, x).flatten(1)
        return torch.cat([features, features.new_ones(len(features), 1)], 1) if self.bias else features


@dataclass(frozen=True)
class Linearised:
    """The network replaced by its first-order expansion at the mean, f + J (θ − μ) (Immer et al. 2021)."""

    stores = Stores()

    def outputs(self, posterior: Parametric, draws: Tensor, x: Tensor) -> Tensor:
        """One Jacobian for all draws."""
        deviations = draws - posterior.center
        pieces = []
        for batch in x.split(min(BATCH, _rows(posterior, x))):
            mean, jacobian = _expansion(posterior, batch)
            pieces.append(mean + torch.einsum("ncp,sp->snc", jacobian, deviations))
        return torch.cat(pieces, 1)

    def prepared(self, posterior: Parametric, x: Tensor) -> OutputsOf:
        """The Jacobian, once, if it fits into memory."""
        if len(x) > _rows(posterior, x):
            return lambda draws, rows: self.outputs(posterior, draws, x[rows])
        parts = [_expansion(posterior, batch) for batch in x.split(BATCH)]
        mean, jacobian = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        return lambda draws, rows: mean[rows] + torch.einsum("ncp,sp->snc", jacobian[rows], draws - posterior.center)

    def moments(self, posterior: Parametric, x: Tensor, moving: bool) -> OutputMoments:
        """J Σ Jᵀ, a few inputs at a time: memory is bounded by the Jacobian of one chunk."""
        prepared = from_jacobian(posterior.likelihood, posterior.gaussian, posterior.prior, moving)
        found = []
        for batch in x.split(min(BATCH, _rows(posterior, x))):
            mean, jacobian = _expansion(posterior, batch)
            located = posterior.likelihood.locations(jacobian.double().transpose(1, 2)).transpose(1, 2)  # (n, L, P)
            found.append(prepared(mean, located))
        return joined(found)


def layer_index(layout: Layout, layer: str, bias: bool) -> Tensor:
    """Positions of a linear layer's [weight, bias] in the flat vector, as a matrix (C, D)."""
    positions = layout.unflatten(torch.arange(sum(layout.sizes.values())))
    weight = positions[parameter_name(layer, "weight")].flatten(1)
    return torch.cat([weight, positions[parameter_name(layer, "bias")][:, None]], 1) if bias else weight


def pooled_weights(likelihood: Likelihood, left: Tensor) -> Tensor:
    """The pooled variance of the locations left·f as weights (K, C, C) of the outputs' covariances."""
    pairs = torch.einsum("lc,le->cel", left, left)
    return likelihood.pooled(pairs).movedim(-1, 0).contiguous()


def center_outputs(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs (N, C) of one set of parameters and buffers, without gradients."""
    with torch.no_grad(), running(model, x):
        outputs = functional_call(model, parameters, (x,))
    return checked_outputs(outputs, len(x))


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

    with torch.inference_mode(False), vectorising(), backward_in_evaluation(model):
        center, x, roots = tracked(center), tracked(x), tracked(roots)
        shared = {name: tracked(tensor) for name, tensor in shared.items()}
        try:
            return vmap(pull)(x, roots).detach()
        except RuntimeError:
            return torch.stack([_pull_one(forward, center, one, root) for one, root in zip(x, roots, strict=True)])


def tracked(tensor: Tensor) -> Tensor:
    """A tensor that gradients may pass: one made in inference mode is copied."""
    return tensor.clone() if tensor.is_inference() else tensor


def _pull_one(forward: Callable[[Tensor, Tensor], Tensor], center: Tensor, one: Tensor, root: Tensor) -> Tensor:
    vector = center.detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = forward(vector, one)
        return torch.stack([torch.autograd.grad(outputs, vector, c, retain_graph=True)[0] for c in root.T])


def _expansion(posterior: Parametric, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (N, C) at the center and their derivatives (N, C, P)."""
    x = x.to(posterior.center.device)
    model, shared, layout, center = posterior.model, posterior.shared, posterior.layout, posterior.center
    outputs = center_outputs(model, {**shared, **layout.unflatten(center)}, x)
    eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).expand(len(x), -1, -1)
    return outputs, pulled_back(model, shared, layout, center, x, eye)


def _rows(posterior: Parametric, x: Tensor) -> int:
    """Inputs whose Jacobian fits into the memory of a step."""
    own = {**posterior.shared, **posterior.layout.unflatten(posterior.center)}
    outputs = center_outputs(posterior.model, own, x[:1].to(posterior.center.device))
    return max(1, MEMORY // (16 * outputs.shape[1] * len(posterior.center)))


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
