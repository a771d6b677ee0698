"""Networks, problems and brute force that the tests of Laplace approximations share."""

from __future__ import annotations

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dapcal.gaussians import FullGaussian, KroneckerGaussian
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MeanAndNoise, NoiseHead
from dapcal.posteriors import laplace, map

STRUCTURES = {"full": laplace.Full, "kronecker": laplace.Kronecker, "diagonal": laplace.Diagonal}


METHODS = {"fit": laplace.fit, "last layer": laplace.last_layer}


CURVATURES = {"ggn": laplace.ggn, "empirical Fisher": laplace.empirical_fisher}


each_structure = pytest.mark.parametrize("structure", STRUCTURES)


each_method = pytest.mark.parametrize("method", METHODS)


each_curvature = pytest.mark.parametrize("curvature", CURVATURES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def covariance_of(gaussian) -> Tensor:
    """Σ, by an explicit Kronecker product of the bases."""
    if isinstance(gaussian, FullGaussian):
        return gaussian.covariance.double()
    rotation = eye(len(gaussian.mean))
    for block in gaussian.blocks if isinstance(gaussian, KroneckerGaussian) else ():
        flat = block.index.flatten()
        rotation[flat[:, None], flat] = torch.kron(block.left, block.right)
    return rotation @ torch.diag(gaussian.variance.double()) @ rotation.T


def precision_of(posterior) -> Tensor:
    return torch.linalg.inv(covariance_of(posterior.gaussian))


def expected_targets(likelihood: Likelihood, outputs: Tensor) -> list[tuple[float, Tensor]]:
    """Weights and targets that turn an expectation over p(y | outputs (C,)) into a finite sum.

    All classes; for Gaussians a Gauss–Hermite rule of five nodes, exact for squared scores and second derivatives.
    """
    conditional = likelihood.conditional(outputs[None, None])
    if isinstance(likelihood, Categorical | Bernoulli):
        return [(float(p), torch.tensor([k])) for k, p in enumerate(conditional.mean[0, 0])]
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    weights = weights / weights.sum()
    mean, deviation = conditional.mean[0, 0], conditional.variance[0, 0].sqrt()
    grid = itertools.product(range(5), repeat=len(mean))
    return [(float(np.prod(weights[list(i)])), (mean + deviation * torch.tensor(nodes[list(i)]))[None]) for i in grid]


def fisher_of(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """E[s sᵀ] with the score s = ∂ log p(y | outputs)/∂ outputs, (C, C)."""
    total = torch.zeros(len(outputs), len(outputs), dtype=torch.float64)
    for weight, y in expected_targets(likelihood, outputs):
        score = score_of(likelihood, outputs, y)
        total += weight * torch.outer(score, score)
    return total


def score_of(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    own = outputs.detach().clone().requires_grad_()
    return torch.autograd.grad(likelihood.log_likelihood(own[None], y).sum(), own)[0]


# Networks.


class Chain(nn.Sequential):
    """Layers one after the other, in float64, drawn from a seed."""

    def __init__(self, *layers: nn.Module, seed: int = 0) -> None:
        super().__init__(*layers)
        self.double()
        generator = torch.Generator().manual_seed(seed)
        for tensor in [*self.parameters(), *self.buffers()]:
            if tensor.is_floating_point():
                noise = 0.5 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.data.copy_(noise)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_var.abs_().add_(0.5)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(x)).mean(1))


class Tied(nn.Module):
    """A next-token model whose decoder is its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.decoder = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.body(self.tokens(x).mean(1))))


class Twice(nn.Module):
    """A layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.step(torch.tanh(self.step(x)))))


class Residual(nn.Module):
    """Convolutions with a way around them, batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1, bias=False)
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        h = h + self.two(torch.relu(self.one(h)))
        return self.fc(h.mean((2, 3)))


def mlp(outputs: int, hidden: int = 4) -> nn.Module:
    return Chain(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def frozen_parts() -> nn.Module:
    model = Chain(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def strided() -> nn.Module:
    convolutions = [
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 2, 2, stride=2, bias=False), nn.Tanh(),
    ]  # fmt: skip
    return Chain(*convolutions, nn.Flatten(), nn.Linear(6, 3))


def in_time() -> nn.Module:
    return Chain(
        nn.Conv1d(2, 3, 3, stride=2, padding=2, dilation=2), nn.Tanh(), nn.Conv1d(3, 2, 2, bias=False), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip


def unfactored() -> nn.Module:
    """Convolutions in groups, with other borders, or with borders given by a word."""
    return Chain(
        nn.Conv2d(2, 2, 3, padding=1, groups=2), nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(2, 1, 3, padding="same"), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip


# name -> model, likelihood, inputs, layers that Kronecker factors
NETWORKS = {
    "mlp": (lambda: mlp(3), Categorical(1.3), normal(5, 2), ["0", "2"]),
    "without bias": (
        lambda: Chain(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False)), Bernoulli(), normal(5, 2),
        ["0", "2"],
    ),
    "batch norm": (
        lambda: Chain(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)), Gaussian(0.4), normal(5, 2),
        ["0", "3"],
    ),
    "layer norm": (
        lambda: Chain(nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2)), NoiseHead(), normal(5, 2),
        ["0", "3"],
    ),
    "per place": (
        lambda: Chain(nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)), Gaussian(0.4), normal(4, 3, 2),
        ["0", "3"],
    ),
    "embedding": (
        lambda: Chain(nn.Embedding(5, 3), Apply(lambda h: h.mean(1)), nn.Linear(3, 3)), Categorical(),
        integers(5, 5, 4), ["2"],
    ),
    "convolutions": (strided, Categorical(), normal(4, 2, 6, 4), ["0", "3", "6"]),
    "in time": (in_time, Gaussian(0.4), normal(4, 2, 5), ["0", "2", "4"]),
    "unfactored": (unfactored, Gaussian(0.4), normal(3, 2, 4, 4), ["5"]),
    "residual": (lambda: seeded(Residual()), Categorical(), normal(4, 1, 4, 4), ["stem", "one", "two", "fc"]),
    "recurrent": (lambda: seeded(Recurrent()), Gaussian(0.4), normal(4, 3, 2), ["head"]),
    "transformer": (
        lambda: seeded(Transformer()), Categorical(), integers(5, 4, 3), ["layer.linear1", "layer.linear2", "head"],
    ),
    "tied": (lambda: seeded(Tied()), Categorical(), integers(5, 5, 2), ["body"]),
    "frozen": (frozen_parts, Gaussian(0.4), normal(5, 2), ["4"]),
    "twice": (lambda: seeded(Twice()), Gaussian(0.4), normal(5, 2), ["head"]),
    "one column": (
        lambda: Chain(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)), Gaussian(0.4), normal(5, 2),
        ["0", "2"],
    ),
    "two networks": (
        lambda: MeanAndNoise(mlp(1), mlp(1)), NoiseHead(), normal(5, 2), ["mean.0", "mean.2", "noise.0", "noise.2"],
    ),
}  # fmt: skip


SIGMA0 = 0.7


def seeded(model: nn.Module) -> nn.Module:
    """The model inside a chain's seeding, without the chain."""
    return Chain(model)[0]


@functools.cache
def problem(name: str):
    """Model, likelihood and training data."""
    make, likelihood, x, _ = NETWORKS[name]
    model = make().train()  # the approximation is made in evaluation mode all the same
    outputs = plain(model, x)
    y = {
        Categorical: lambda: integers(outputs.shape[1], len(x)),
        Bernoulli: lambda: integers(2, len(x)),
        Gaussian: lambda: normal(*outputs.shape, seed=9),
        NoiseHead: lambda: normal(len(x), outputs.shape[1] // 2, seed=9),
    }[type(likelihood)]()
    return model, likelihood, x, y


def plain(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs (N, C) in evaluation mode."""
    outputs = copy.deepcopy(model).eval()(x)
    return outputs[:, None] if outputs.ndim == 1 else outputs


def jacobian_of(model: nn.Module, x: Tensor) -> Tensor:
    """∂ outputs/∂ learnt parameters, input by input and output by output, (N, C, P)."""
    model = copy.deepcopy(model).eval()
    own = [p for p in model.parameters() if p.requires_grad]

    def row(value: Tensor) -> Tensor:
        gradients = torch.autograd.grad(value, own, retain_graph=True, materialize_grads=True, allow_unused=True)
        return torch.cat([g.flatten() for g in gradients])

    return torch.stack([torch.stack([row(value) for value in plain_one(model, one)]) for one in x])


def plain_one(model: nn.Module, one: Tensor) -> Tensor:
    return model(one[None]).reshape(-1)


def middle_of(likelihood: Likelihood, outputs: Tensor, y: Tensor, curvature: str) -> Tensor:
    """Λ (N, C, C) between the Jacobians."""
    if curvature == "ggn":
        return torch.stack([fisher_of(likelihood, one) for one in outputs])
    scores = torch.stack([score_of(likelihood, one, y[i : i + 1]) for i, one in enumerate(outputs)])
    return scores[:, :, None] * scores[:, None]


@functools.cache
def curvature_by_hand(name: str, curvature: str) -> Tensor:
    """Σ_n Jᵀ Λ J, (P, P)."""
    model, likelihood, x, y = problem(name)
    jacobian = jacobian_of(model, x)
    middle = middle_of(likelihood, plain(model, x).detach(), y, curvature)
    return torch.einsum("ncp,ncd,ndq->pq", jacobian, middle, jacobian)


def patches_by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer multiplies its weights with, by loops over places, (N, places, columns)."""
    if isinstance(layer, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1])
    if x.ndim == 3:  # in time: an image of one row
        x, kernel, stride, padding, dilation = (
            x[:, :, None], (1, *layer.kernel_size), (1, *layer.stride), (0, *layer.padding), (1, *layer.dilation),
        )  # fmt: skip
    else:
        kernel, stride, padding, dilation = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    x = nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    places = [
        x[:, :, i : i + reach[0] : dilation[0], j : j + reach[1] : dilation[1]].flatten(1)
        for i in range(0, x.shape[2] - reach[0] + 1, stride[0])
        for j in range(0, x.shape[3] - reach[1] + 1, stride[1])
    ]
    return torch.stack(places, 1)


def factors_by_hand(model: nn.Module, name: str, x: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    """G = Σ Jᵀ Λ J over outputs of the layer, and A/rows over its inputs, with a one for the bias."""
    model = copy.deepcopy(model).eval()
    layer = model.get_submodule(name)
    seen: list[tuple[Tensor, Tensor]] = []
    layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].detach(), output)))
    left = torch.zeros(len(layer.weight), len(layer.weight), dtype=torch.float64)
    columns = []
    for one, root in zip(x, middle, strict=True):
        outputs = plain_one(model, one)
        inputs, end = seen.pop()
        gradients = torch.stack([torch.autograd.grad(v, end, retain_graph=True)[0][0] for v in outputs])  # (C, ...)
        if not isinstance(layer, nn.Linear):
            gradients = gradients.movedim(1, -1)
        gradients = gradients.reshape(len(outputs), -1, len(layer.weight))  # (C, places, rows)
        left += torch.einsum("cpi,cd,dpj->ij", gradients, root, gradients)
        columns.append(patches_by_hand(layer, inputs)[0])
    rows = torch.cat(columns)
    if layer.bias is not None:
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    return left, rows.T @ rows / len(rows)


def kronecker_by_hand(name: str, curvature: str, apart: bool = False) -> Tensor:
    """G ⊗ A for the layers that are factored, the diagonal for the rest, (P, P); weight and bias together or apart."""
    model, likelihood, x, y = problem(name)
    learnt = [n for n, p in model.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    positions = dict(zip(learnt, torch.arange(sum(sizes)).split(sizes), strict=True))
    total = torch.diag(curvature_by_hand(name, curvature).diagonal())
    middle = middle_of(likelihood, plain(model, x).detach(), y, curvature)
    for layer in NETWORKS[name][3]:
        left, right = factors_by_hand(model, layer, x, middle)
        index = positions[f"{layer}.weight"].reshape(len(left), -1)
        if f"{layer}.bias" in positions:
            index = torch.cat([index, positions[f"{layer}.bias"][:, None]], 1)
        parts = [slice(None, -1), slice(-1, None)] if apart and f"{layer}.bias" in positions else [slice(None)]
        for part in parts:
            flat = index[:, part].flatten()
            total[flat[:, None], flat] = torch.kron(left, right[part, part])
    return total


# Conjugate models: exact results.

NOISE = 0.5


def regression(targets: int = 1, n: int = 40):
    """Inputs, targets, inputs with a one, and targets' exact posterior precision under N(0, 1.5²) for each target."""
    x = normal(n, 2) @ torch.tensor([[1.0, 0.7], [0.0, 0.6]], dtype=torch.float64)
    y = x @ normal(2, targets, seed=1) + 0.3 + NOISE * normal(n, targets, seed=2)
    return x, y, torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1)


def at_the_map(x: Tensor, y: Tensor, sigma0: float) -> nn.Module:
    """A linear layer at the posterior mean (Σ⁻¹ = XᵀX/σ² + I/σ0²)."""
    design = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    precision = design.T @ design / NOISE**2 + eye(design.shape[1]) / sigma0**2
    mean = torch.linalg.solve(precision, design.T @ y / NOISE**2)  # (D, K)
    layer = nn.Linear(x.shape[1], y.shape[1]).double()
    layer.weight.data.copy_(mean[:-1].T)
    layer.bias.data.copy_(mean[-1])
    return nn.Sequential(layer)


@functools.cache
def trained(likelihood: Likelihood, outputs: int, seed: int = 0):
    """A network trained for a moment on three clusters with every fifth label wrong, with data to hold out."""
    centers = 2 * torch.tensor([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]], dtype=torch.float64)

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        labels = integers(3, n, seed=seed)
        x = centers[labels] + 0.7 * normal(n, 2, seed=seed + 1)
        labels[::5] = (labels[::5] + 1) % 3
        if isinstance(likelihood, Categorical):
            return x, labels
        if isinstance(likelihood, Bernoulli):
            return x, (labels == 0).long()
        return x, torch.sin(x[:, :1]) + 0.3 * normal(n, 1, seed=seed + 2)

    train, held_out = draw(120, 10 * seed), draw(120, 10 * seed + 5)
    fitted = map.fit(mlp(outputs, hidden=8), likelihood, train, epochs=25, learning_rate=0.02)
    return fitted.network, fitted.likelihood, train, held_out


# Calibrated, saved and loaded.

KINDS = {
    f"{method}, {structure}{', drawn' if drawn else ''}": (method, structure, drawn)
    for method, structure, drawn in itertools.product(METHODS, STRUCTURES, (False, True))
    if not (method == "last layer" and drawn)
}


LEARNT = {"categorical": (Categorical(), 3), "bernoulli": (Bernoulli(), 1), "gaussian": (Gaussian(0.3), 1)}


@functools.cache
def fitted(kind: str, likelihood: str = "categorical", draws: int = 30):
    method, structure, drawn = KINDS[kind]
    model, learnt, train, _ = trained(*LEARNT[likelihood])
    options = {"structure": STRUCTURES[structure], "draws": draws} | (
        {"linearised": not drawn} if method == "fit" else {}
    )
    return METHODS[method](model, learnt, train, **options)
