"""Posteriors as modules: all draws of a network, or the moments of a last layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from dapcal.gaussians import DiagonalGaussian, FullGaussian, KroneckerGaussian
from dapcal.likelihoods import Likelihood
from dapcal.moments import OutputMoments
from dapcal.networks import Blend, Trees, as_tensor, dense_chain, one_column, unfused
from dapcal.networks import entering as entering_layers
from dapcal.posteriors.linear import LastLayer, layer_index, pooled_weights
from dapcal.posteriors.network import NetworkPosterior
from dapcal.types import Posterior


def posterior_module(posterior: Posterior, example: Tensor, by_draw: Sequence[str] = ()) -> PosteriorModule:
    """The module of a posterior over inputs like `example`; those that do not deploy are refused.

    Args:
        posterior: what is deployed.
        example: one input.
        by_draw: layers whose input in every draw, (S, N, ...), the module leaves in `entering` under `every(layer)`.
    """
    if not isinstance(posterior, NetworkPosterior):
        raise TypeError(
            f"Expected draws of a network's parameters or a last-layer Laplace posterior, got "
            f"{type(posterior).__name__}; fit one of them (dapcal.posteriors.ensemble, laplace.last_layer, "
            "variational, swag), or predict with calibrated(x)"
        )
    if isinstance(posterior.linear, LastLayer):
        return LastLayerModule(posterior, posterior.linear)
    if posterior.linear is not None:
        raise TypeError(
            f"A posterior with outputs by {type(posterior.linear).__name__} needs derivatives at every input, which do "
            "not deploy; use laplace.last_layer, or laplace.fit(..., linearised=False)"
        )
    chain = dense_chain(posterior.model, example)
    draws = Members(posterior, by_draw) if chain is None else Stacked(posterior, chain, by_draw)
    return draws if posterior.blend is None else Blended(draws, posterior.blend)


def every(layer: str) -> str:
    """The name of what enters a layer in every draw."""
    return f"every {layer}"


@dataclass(frozen=True, eq=False)
class Seen:
    """A posterior that has been evaluated at the inputs already, as Inflate asks for one."""

    likelihood: Likelihood
    known: Tensor | OutputMoments  # outputs (S, N, C), or their moments
    squared_norms: None = None
    gaussian: None = None
    prior: None = None
    network: None = None

    def outputs(self, x: Tensor) -> Tensor:  # noqa: ARG002
        """Outputs of all draws, (S, N, C)."""
        assert isinstance(self.known, Tensor)
        return self.known

    def moments(self, x: Tensor, moving: bool = False) -> OutputMoments | None:  # noqa: ARG002
        """Closed-form moments of the outputs, where these are known."""
        return self.known if isinstance(self.known, OutputMoments) else None


class Members(nn.Module):
    """Every draw as a network of its own."""

    layers: tuple[str, ...] = ()

    def __init__(self, posterior: NetworkPosterior, by_draw: Sequence[str]) -> None:
        super().__init__()
        self.by_draw = tuple(by_draw)
        self.members = nn.ModuleList(
            replace(
                posterior, center=draw, central={}, buffers={n: t[s : s + 1] for n, t in posterior.buffers.items()}
            ).network
            for s, draw in enumerate(posterior.draws)
        ).requires_grad_(False)

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:
        """Outputs (S, N, C)."""
        outputs, entered = [], []
        for member in self.members:
            seen: dict[str, Tensor] = {}
            layers = {name: member.get_submodule(name) for name in self.by_draw}
            with unfused(), entering_layers(layers, seen.__setitem__):
                outputs.append(one_column(as_tensor(member(x))))
            entered.append(seen)
        entering.update({every(name): torch.stack([seen[name] for seen in entered]) for name in self.by_draw})
        return torch.stack(outputs)


class Stacked(nn.Module):
    """A chain of linear layers and elementwise functions, with the weights of all draws in one tensor."""

    layers: tuple[str, ...] = ()

    def __init__(self, posterior: NetworkPosterior, chain: list[tuple[str, nn.Module]], by_draw: Sequence[str]) -> None:
        super().__init__()
        self.count = len(posterior.draws)
        self.names = [name if name in by_draw else None for name, _ in chain]
        own = {**posterior.shared, **posterior.layout.unflatten(posterior.draws)}
        self.chain = nn.Sequential(
            *(StackedLinear(own, name) if isinstance(layer, nn.Linear) else layer for name, layer in chain)
        )

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:
        """Outputs (S, N, C)."""
        h = x
        for name, layer in zip(self.names, self.chain, strict=True):
            if name is not None:
                entering[every(name)] = h if h.ndim == 3 else h.expand(self.count, *h.shape)
            h = layer(h)
        return h


class Blended(nn.Module):
    """Draws, and trees beside each of them."""

    layers: tuple[str, ...] = ()

    def __init__(self, draws: Members | Stacked, blend: Blend) -> None:
        super().__init__()
        self.draws, self.share, self.weight, self.folds = draws, blend.share, blend.weight, blend.folds
        for field in fields(Trees):
            self.register_buffer(field.name, _copy(getattr(blend.trees, field.name)))

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> Tensor:
        """Outputs (S, N, C)."""
        trees = Trees(**{field.name: self.get_buffer(field.name) for field in fields(Trees)})
        return Blend(self.share, self.weight, trees, self.folds).of(self.draws(x, entering), trees.by_steps(x))


class StackedLinear(nn.Module):
    """A linear layer of all draws, or of one that they share."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, own: dict[str, Tensor], name: str) -> None:
        super().__init__()
        weight, bias = own[f"{name}.weight"], own.get(f"{name}.bias")
        self.register_buffer("weight", _copy(weight.mT))  # ([S,] in, out)
        self.register_buffer("bias", None if bias is None else _copy(bias[..., None, :]))  # ([S,] 1, out)

    def forward(self, h: Tensor) -> Tensor:
        """Activations ([S,] N, in) to ([S,] N, out)."""
        h = h @ self.weight
        return h if self.bias is None else h + self.bias


class LastLayerModule(nn.Module):
    """Moments of a last layer's outputs: their variance is a quadratic form of what enters the layer."""

    weight: Tensor
    roots: Tensor

    def __init__(self, posterior: NetworkPosterior, linear: LastLayer) -> None:
        super().__init__()
        index = layer_index(posterior.layout, linear.layer, linear.bias).to(posterior.center.device)
        self.layers = (linear.layer,)
        self.bias = linear.bias
        self.register_buffer("weight", _copy(posterior.center[index]))  # (C, D)
        self.register_buffer("roots", _copy(variance_roots(posterior, index)))  # (K, D, D)

    def forward(self, x: Tensor, entering: dict[str, Tensor]) -> OutputMoments:  # noqa: ARG002
        """Mean, and the variance ‖φᵀ R_k‖² for features φ."""
        features = entering[self.layers[0]]
        if self.bias:
            features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        turned = features.double() @ self.roots  # (K, N, D)
        return OutputMoments(features @ self.weight.T, turned.square().sum(-1).T)


def variance_roots(posterior: NetworkPosterior, index: Tensor) -> Tensor:
    """R (K, D, D) with R_k R_kᵀ = A_k, the pooled variances of the locations being φᵀ A_k φ for features φ (D,).

    Args:
        posterior: a Gaussian over a last layer.
        index: positions of the layer's [weight, bias] in the flat vector, (C, D).
    """
    gaussian, likelihood = posterior.gaussian, posterior.likelihood
    left = likelihood.locations(torch.eye(len(index), dtype=torch.float64, device=index.device)).T  # (L, C)
    if isinstance(gaussian, FullGaussian):
        forms = gaussian.forms(index, pooled_weights(likelihood, left))
    elif isinstance(gaussian, DiagonalGaussian | KroneckerGaussian):
        variance = gaussian.variance.double()
        alone = torch.ones_like(index, dtype=torch.bool)
        forms = torch.zeros((), dtype=torch.float64, device=index.device)
        for block in gaussian.blocks if isinstance(gaussian, KroneckerGaussian) else ():
            columns = (index[0][:, None] == block.index[0]).double().argmax(0)  # of the layer's matrix
            along = _pooled(likelihood, (left @ block.left.double()) ** 2) @ variance[block.index]  # (K, columns)
            basis = torch.zeros(index.shape[1], len(columns), dtype=torch.float64, device=index.device)
            basis[columns] = block.right.double()
            forms = forms + torch.einsum("dr,kr,er->kde", basis, along, basis)
            alone[:, columns] = False
        forms = forms + torch.diag_embed(_pooled(likelihood, left**2) @ (variance[index] * alone))
    else:
        raise TypeError(
            f"Expected a diagonal, Kronecker or full Gaussian over the last layer, got {type(gaussian).__name__}; fit "
            "it with laplace.last_layer"
        )
    eigenvalues, vectors = torch.linalg.eigh(forms)
    return vectors * eigenvalues.clamp_min(0).sqrt()[:, None]


def _pooled(likelihood: Likelihood, values: Tensor) -> Tensor:
    """Values of the locations (L, ...) as those that the likelihood's spread has (K, ...)."""
    return likelihood.pooled(values.movedim(0, -1)).movedim(-1, 0)


def _copy(tensor: Tensor) -> Tensor:
    """A tensor with a memory of its own, in order, as files want it."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


PosteriorModule = Members | Stacked | Blended | LastLayerModule
