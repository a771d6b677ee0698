"""Laplace: curvatures against brute force, conjugate models against closed forms, prior scales, predictions, files."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import multivariate_normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from dapcal.adjust import Inflate, Reweight, Transport
from dapcal.distances import Space
from dapcal.gaussians import DiagonalGaussian, FullGaussian, KroneckerGaussian
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MeanAndNoise, NoiseHead
from dapcal.posteriors import laplace, map
from dapcal.projectors import Identity

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


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


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


# The Fisher information of each likelihood.

LIKELIHOODS = {
    "categorical": (Categorical(), 4),
    "tempered categorical": (Categorical(1.7), 3),
    "bernoulli": (Bernoulli(), 1),
    "tempered bernoulli": (Bernoulli(0.6), 1),
    "gaussian": (Gaussian(0.3), 3),
    "noise head": (NoiseHead(), 4),
    "noise head with a factor": (NoiseHead(factor=1.8, floor=0.2), 2),
}


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


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_curvature_root_is_a_root_of_the_expected_hessian(kind):
    likelihood, size = LIKELIHOODS[kind]
    outputs = 1.5 * normal(6, size)
    root = likelihood.curvature_root(outputs)
    assert root.shape[:2] == (6, size)
    for row, one in zip(root, outputs, strict=True):
        hessian = torch.zeros(size, size, dtype=torch.float64)
        for weight, y in expected_targets(likelihood, one):
            hessian += weight * torch.autograd.functional.hessian(
                lambda f, y=y: -likelihood.log_likelihood(f[None], y).sum(), one
            )
        torch.testing.assert_close(row @ row.T, hessian, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(row @ row.T, fisher_of(likelihood, one), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_curvature_root_is_finite_for_extreme_outputs(kind, dtype):
    likelihood, size = LIKELIHOODS[kind]
    outputs = torch.tensor([[-80.0] * size, [80.0] * size, [0.0] * size], dtype=dtype)
    outputs[:, 0] = torch.tensor([80.0, 3.0, 0.0])
    root = likelihood.curvature_root(outputs)
    assert root.dtype == dtype
    assert root.isfinite().all()


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_rescaled_likelihood_has_the_curvature_of_its_temperature(kind):
    likelihood, size = LIKELIHOODS[kind]
    outputs, other = normal(5, size), likelihood.rescaled(1.4)
    root = other.curvature_root(outputs)
    for row, one in zip(root, outputs, strict=True):
        torch.testing.assert_close(row @ row.T, fisher_of(other, one), rtol=1e-9, atol=1e-10)
    assert not torch.allclose(
        root @ root.mT, likelihood.curvature_root(outputs) @ likelihood.curvature_root(outputs).mT
    )


def test_a_likelihood_without_curvature_says_what_to_do():
    class Laplacian(Gaussian):
        curvature_root = Likelihood.curvature_root

    train = normal(6, 2), normal(6, 1)
    for method in METHODS.values():
        with pytest.raises(TypeError, match=r"Laplacian gives no curvature.*empirical_fisher"):
            method(mlp(1), Laplacian(0.5), train)
        posterior = method(mlp(1), Laplacian(0.5), train, curvature=laplace.empirical_fisher)
        assert posterior.draws.isfinite().all()


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


class Unused(nn.Module):
    """A layer that never runs, and one whose result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.dropped, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        return self.head(x)


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
each_network = pytest.mark.parametrize("name", NETWORKS)
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


# torch says that attention is slow to vectorise
no_advice = pytest.mark.filterwarnings("ignore:There is a performance drop")


@no_advice
@each_curvature
@each_network
def test_curvature_of_a_network_is_brute_force(name, curvature):
    model, likelihood, x, y = problem(name)
    expected = curvature_by_hand(name, curvature) + eye(len(curvature_by_hand(name, curvature))) / SIGMA0**2
    options = {"curvature": CURVATURES[curvature], "prior_scale": SIGMA0, "batch_size": 3}
    full = laplace.fit(model, likelihood, (x, y), structure=laplace.Full, **options)
    torch.testing.assert_close(precision_of(full), expected, rtol=1e-7, atol=1e-8)
    diagonal = laplace.fit(model, likelihood, (x, y), structure=laplace.Diagonal, **options)
    assert isinstance(diagonal.gaussian, DiagonalGaussian)
    torch.testing.assert_close(1 / diagonal.gaussian.variance, expected.diagonal(), rtol=1e-9, atol=1e-10)
    learnt = [p for p in model.parameters() if p.requires_grad]
    assert torch.equal(full.center, torch.cat([p.detach().flatten() for p in learnt]))
    assert model.training


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


@no_advice
@each_curvature
@each_network
def test_kronecker_factors_are_those_of_the_formula(name, curvature):
    model, likelihood, x, y = problem(name)
    options = {"curvature": CURVATURES[curvature], "prior_scale": SIGMA0, "batch_size": 3}
    posterior = laplace.fit(model, likelihood, (x, y), **options)
    expected = kronecker_by_hand(name, curvature)
    torch.testing.assert_close(precision_of(posterior), expected + eye(len(expected)) / SIGMA0**2, rtol=1e-7, atol=1e-8)
    assert len(posterior.gaussian.blocks) == len(NETWORKS[name][3])


@pytest.mark.parametrize("name", ["mlp", "convolutions", "in time"])
def test_weights_and_biases_with_other_priors_are_factored_apart(name):
    model, likelihood, x, y = problem(name)
    posterior = laplace.fit(model, likelihood, (x, y), prior_scale={"*.bias": 0.3, "*": 0.9})
    expected = kronecker_by_hand(name, "ggn", apart=True)
    precision = torch.diag(1 / posterior.prior.sigma0[posterior.prior.group] ** 2)
    torch.testing.assert_close(precision_of(posterior), expected + precision, rtol=1e-7, atol=1e-8)
    assert Transport()(posterior, x)(torch.ones(len(x))).spread.isfinite().all()
    torch.testing.assert_close(
        precision.diagonal().unique(), torch.tensor([1 / 0.9**2, 1 / 0.3**2], dtype=torch.float64)
    )


@pytest.mark.parametrize("aware", ["*.weight", {"*.weight": 1.0, "*.bias": 0.5}])
def test_weights_and_biases_that_are_not_both_aware_are_factored_apart(aware):
    model, likelihood, x, y = problem("mlp")
    posterior = laplace.fit(model, likelihood, (x, y), aware=aware)
    assert len(posterior.gaussian.blocks) == 4
    assert posterior.gaussian.contracted(posterior.prior) == 0
    expected = kronecker_by_hand("mlp", "ggn", apart=True)
    torch.testing.assert_close(precision_of(posterior), expected + eye(len(expected)), rtol=1e-7, atol=1e-8)


@no_advice
@each_network
@each_structure
def test_predictions_of_every_network(name, structure):
    """Linearised and drawn: outputs of the center at no deviation, finite moments, and draws around them."""
    model, likelihood, x, y = problem(name)
    for linearised in (True, False):
        posterior = laplace.fit(
            model, likelihood, (x, y), structure=STRUCTURES[structure], linearised=linearised, draws=3, prior_scale=0.1
        )
        outputs = plain(model, x).detach()
        torch.testing.assert_close(posterior.outputs_at(posterior.center[None], x)[0], outputs, rtol=1e-10, atol=1e-10)
        assert posterior.outputs(x).shape == (3, *outputs.shape)
        assert posterior.outputs(x).isfinite().all()


def test_attention_is_vectorised_without_a_warning():
    model, likelihood, x, y = problem("transformer")
    assert laplace.fit(model, likelihood, (x, y), structure=laplace.Full).moments(x).variance.isfinite().all()


def test_activations_in_place_change_nothing():
    def model(inplace: bool) -> nn.Module:
        return Chain(nn.Linear(2, 5), nn.ReLU(inplace), nn.Linear(5, 4), nn.ELU(inplace=inplace), nn.Linear(4, 3))

    train = normal(9, 2), integers(3, 9)
    one, two = (laplace.fit(model(inplace), Categorical(), train) for inplace in (False, True))
    torch.testing.assert_close(covariance_of(one.gaussian), covariance_of(two.gaussian))


@pytest.mark.parametrize(
    "model",
    [
        Chain(nn.Conv2d(1, 1, 3, padding="same"), nn.Flatten()),
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Flatten()).double(),
    ],
    ids=["a convolution by a word", "spectral norm"],
)
def test_networks_without_a_layer_to_factor_are_diagonal(model):
    x = normal(5, 1, 2, 2) if isinstance(model[0], nn.Conv2d) else normal(5, 4)
    train = x, integers(4, 5)
    one, two = (laplace.fit(model, Categorical(), train, structure=s) for s in (laplace.Kronecker, laplace.Diagonal))
    assert one.gaussian.blocks == ()
    torch.testing.assert_close(one.gaussian.variance, two.gaussian.variance)


def test_layers_that_do_not_reach_the_outputs_keep_their_prior():
    model, train = seeded(Unused()), (normal(7, 2), integers(2, 7))
    posteriors = [
        laplace.fit(model, Categorical(), train, structure=s, prior_scale=SIGMA0) for s in STRUCTURES.values()
    ]
    for posterior in posteriors:
        precision = precision_of(posterior)
        torch.testing.assert_close(precision[:12, :12], eye(12) / SIGMA0**2)
        assert (precision.diagonal()[12:] > 1 / SIGMA0**2 + 0.1).all()


def test_a_bare_linear_layer_is_a_network():
    layer, train, x = nn.Linear(2, 3).double(), (normal(9, 2), integers(3, 9)), normal(4, 2, seed=3)
    for method, structure in itertools.product(METHODS.values(), STRUCTURES.values()):
        bare, wrapped = (method(m, Categorical(), train, structure=structure) for m in (layer, nn.Sequential(layer)))
        torch.testing.assert_close(covariance_of(bare.gaussian), covariance_of(wrapped.gaussian))
        torch.testing.assert_close(bare.moments(x).variance, wrapped.moments(x).variance)


class Standardised(nn.Conv2d):
    """A convolution that changes its weights before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


def test_a_layer_that_changes_its_weights_is_not_factored():
    model = Chain(Standardised(1, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    posterior = laplace.fit(model, Categorical(), (normal(6, 1, 3, 3), integers(3, 6)))
    assert [tuple(b.index.shape) for b in posterior.gaussian.blocks] == [(3, 9)]


@pytest.mark.parametrize("old", [True, False])
def test_reparametrised_layers_are_not_factored(old):
    """Their weights are computed from parameters of other names."""
    norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(nn.Conv2d(1, 8, 3), norm(nn.Conv2d(8, 3, 1)), nn.Flatten(), norm(nn.Linear(3, 3))).double()
    posterior = laplace.fit(model, Categorical(), (normal(6, 1, 3, 3), integers(3, 6)))
    assert [tuple(b.index.shape) for b in posterior.gaussian.blocks] == [(8, 10)]


# Data in other forms, and what must not matter.


@each_method
@each_structure
@each_curvature
def test_the_form_of_the_data_does_not_matter(method, structure, curvature):
    model, likelihood, x, y = problem("mlp")
    options = {"structure": STRUCTURES[structure], "curvature": CURVATURES[curvature]}
    data = TensorDataset(x, y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    forms = [
        data,
        DataLoader(data, batch_size=2),
        DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0)),
        (x[order], y[order]),
    ]
    expected = covariance_of(METHODS[method](model, likelihood, (x, y), **options).gaussian)
    for form in forms:
        found = METHODS[method](model, likelihood, form, **options)
        torch.testing.assert_close(covariance_of(found.gaussian), expected, rtol=1e-10, atol=1e-12)


@each_method
@each_structure
def test_fitting_is_reproducible_and_leaves_the_world_alone(method, structure):
    model, likelihood, x, y = problem("mlp")
    before, weights = torch.random.get_rng_state(), copy.deepcopy(model.state_dict())
    one, two = (METHODS[method](model, likelihood, (x, y), structure=STRUCTURES[structure], seed=3) for _ in range(2))
    other = METHODS[method](model, likelihood, (x, y), structure=STRUCTURES[structure], seed=4)
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, other.draws)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert all(torch.equal(weights[n], t) for n, t in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@each_method
def test_loaders_leave_the_global_generator_alone(method):
    model, likelihood, x, y = problem("mlp")
    before = torch.random.get_rng_state()
    METHODS[method](model, likelihood, DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_fitting_in_inference_mode():
    model, likelihood, x, y = problem("mlp")
    for method, structure in itertools.product(METHODS.values(), STRUCTURES.values()):
        outside = method(model, likelihood, (x, y), structure=structure)
        with torch.inference_mode():
            inside = method(copy.deepcopy(model), likelihood, (x.clone(), y.clone()), structure=structure)
        assert torch.equal(inside.draws, outside.draws)
        assert torch.equal(inside.outputs(x), outside.outputs(x))


def test_a_full_covariance_in_single_precision_is_close():
    """Little noise and much data: precisions from 1 to 1e9."""
    model = Chain(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x, d = normal(1500, 3), torch.linspace(0, 5, 80)
    y, far = model(x).detach(), torch.cat([normal(40, 3, seed=1), 5 * normal(40, 3, seed=2)])
    for method in METHODS.values():
        exact, single = (
            method(copy.deepcopy(model).to(t), Gaussian(0.002), (x.to(t), y.to(t)), structure=laplace.Full)
            for t in (torch.float64, torch.float32)
        )
        assert single.draws.dtype == torch.float32
        found = single.moments(far.float(), True).moved(d)
        torch.testing.assert_close(found, exact.moments(far, True).moved(d), rtol=1e-3, atol=0)


def test_the_posterior_is_never_wider_than_the_prior():
    """Directions that the data say nothing about are as wide as the prior, up to rounding."""
    model = Chain(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].bias.data[:3] = -100.0
    for method, structure, dtype, sigma0 in itertools.product(
        METHODS.values(), STRUCTURES.values(), (torch.float32, torch.float64), (0.3, 0.7, 1.0, 1.7)
    ):
        train = normal(5, 2).to(dtype), integers(3, 5)
        posterior = method(model.to(dtype), Categorical(), train, structure=structure, prior_scale=sigma0)
        assert posterior.gaussian.contracted(posterior.prior) == 0


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


@each_method
@pytest.mark.parametrize("structure", ["full", "kronecker"])
@pytest.mark.parametrize("targets", [1, 3])
def test_linear_regression_is_exact(method, structure, targets):
    x, y, design = regression(targets)
    posterior = METHODS[method](
        at_the_map(x, y, 1.5), Gaussian(NOISE), (x, y), structure=STRUCTURES[structure], prior_scale=1.5, draws=2
    )
    precision = design.T @ design / NOISE**2 + eye(3) / 1.5**2
    # the flat vector is [weight, bias], target by target within each
    order = torch.cat([torch.arange(2 * targets).reshape(targets, 2), 2 * targets + torch.arange(targets)[:, None]], 1)
    expected = torch.zeros(3 * targets, 3 * targets, dtype=torch.float64)
    for rows in order:
        expected[rows[:, None], rows] = torch.linalg.inv(precision)
    torch.testing.assert_close(covariance_of(posterior.gaussian), expected, rtol=1e-8, atol=1e-12)

    new = normal(7, 2, seed=5)
    features = torch.cat([new, torch.ones(7, 1, dtype=torch.float64)], 1)
    prediction = Transport()(posterior, new)
    for d in (0.0, 1e-3, 0.4, 3.0, 100.0):
        c = 1 / 1.5**2 - 1 / (1.5 + d) ** 2
        moved = torch.linalg.inv(precision - c * eye(3))
        variance = (features @ moved * features).sum(1, keepdim=True).expand(7, targets)
        ensemble = prediction(torch.full((7,), d, dtype=torch.float64))
        torch.testing.assert_close(ensemble.spread, variance, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(posterior.likelihood.variance(ensemble), variance + NOISE**2, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(posterior.likelihood.mean(prediction(torch.zeros(7))), at_the_map(x, y, 1.5)(new))


@each_method
def test_the_diagonal_is_that_of_the_precision(method):
    x, y, design = regression()
    posterior = METHODS[method](
        at_the_map(x, y, 1.5), Gaussian(NOISE), (x, y), structure=laplace.Diagonal, prior_scale=1.5
    )
    precision = design.T @ design / NOISE**2 + eye(3) / 1.5**2
    torch.testing.assert_close(posterior.gaussian.variance, 1 / precision.diagonal(), rtol=1e-10, atol=0)


class Watching:
    """A choice of σ0 that keeps what it was offered."""

    def __call__(self, candidates: laplace.Candidates) -> float:
        self.candidates = candidates
        return 1.0


def exact_log_evidence(design: Tensor, y: Tensor, sigma0: float) -> float:
    covariance = NOISE**2 * eye(len(design)) + sigma0**2 * design @ design.T
    return float(sum(multivariate_normal(cov=covariance.numpy()).logpdf(column.numpy()) for column in y.T))


@each_method
@pytest.mark.parametrize("structure", ["full", "kronecker"])
@pytest.mark.parametrize("targets", [1, 2])
def test_log_evidence_of_linear_regression_is_exact(method, structure, targets):
    """log p(y | x) = log p(y | μ) + what `MarginalLikelihood` maximises, at the MAP of each σ0."""
    x, y, design = regression(targets)
    likelihood, values = Gaussian(NOISE), []
    for sigma0 in (0.2, 0.6, 3.0):
        model, watching = at_the_map(x, y, sigma0), Watching()
        METHODS[method](model, likelihood, (x, y), structure=STRUCTURES[structure], prior_scale=watching)
        fit = likelihood.log_likelihood(model(x), y).sum().detach()
        values.append(float(fit) + watching.candidates.log_evidence(sigma0))
    exact = [exact_log_evidence(design, y, s) for s in (0.2, 0.6, 3.0)]
    np.testing.assert_allclose(values, exact, rtol=1e-10)
    np.testing.assert_allclose(np.diff(values), np.diff(exact), rtol=1e-9)


@each_method
@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_the_chosen_prior_scale_maximises_the_exact_evidence(method, structure):
    """Choosing σ0 and going to its MAP in turn ends at the maximum: at the MAP the evidence does not feel the mean."""
    x, y, design = regression(2)
    best = minimize_scalar(
        lambda t: -exact_log_evidence(design, y, math.exp(t)), bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}
    ).x
    sigma0 = 1.0
    for _ in range(12):
        posterior = METHODS[method](
            at_the_map(x, y, sigma0), Gaussian(NOISE), (x, y), structure=STRUCTURES[structure],
            prior_scale=laplace.MarginalLikelihood(),
        )  # fmt: skip
        sigma0 = float(posterior.prior.sigma0)
    assert sigma0 == pytest.approx(math.exp(best), rel=1e-4)


# Which prior scale.


@each_method
@each_structure
def test_marginal_likelihood_is_a_maximum(method, structure):
    model, likelihood, x, y = problem("mlp")
    options = {"structure": STRUCTURES[structure]}
    watching = Watching()
    METHODS[method](model, likelihood, (x, y), prior_scale=watching, **options)
    posteriors = [
        METHODS[method](model, likelihood, (x, y), prior_scale=laplace.MarginalLikelihood(), **options)
        for _ in range(2)
    ]
    sigma0 = float(posteriors[0].prior.sigma0)
    assert torch.equal(posteriors[0].draws, posteriors[1].draws)
    value = watching.candidates.log_evidence
    assert all(value(sigma0) > value(sigma0 * step) for step in (0.01, 0.5, 0.99, 1.01, 2.0, 100.0))
    # the objective from the precision matrix itself
    precision = precision_of(watching.candidates.posterior(0.8))
    mean = posteriors[0].center
    expected = -0.5 * (torch.logdet(precision) + len(mean) * math.log(0.8**2) + (mean**2).sum() / 0.8**2)
    assert value(0.8) == pytest.approx(float(expected), rel=1e-9)
    at = METHODS[method](model, likelihood, (x, y), prior_scale=sigma0, **options)
    torch.testing.assert_close(covariance_of(at.gaussian), covariance_of(posteriors[0].gaussian))


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


@pytest.mark.parametrize(("method", "linearised"), [("fit", True), ("fit", False), ("last layer", True)])
def test_held_out_takes_the_best_of_its_grid(method, linearised):
    model, likelihood, train, held_out = trained(Categorical(), 3)
    train = train[0][:8], train[1][:8]  # so little that the prior matters
    options = {"structure": laplace.Diagonal, "draws": 20} | ({"linearised": linearised} if method == "fit" else {})
    grid = np.geomspace(0.1, 10, 7)

    def nll(sigma0: float) -> float:
        posterior = METHODS[method](model, likelihood, train, prior_scale=sigma0, **options)
        adjusted = Inflate()(posterior, held_out[0])(torch.zeros(len(held_out[0])))
        return -float(likelihood.log_prob(adjusted, held_out[1]).mean())

    choice = laplace.HeldOut(DataLoader(TensorDataset(*held_out), batch_size=50), lowest=0.1, highest=10, steps=7)
    one, two = (METHODS[method](model, likelihood, train, prior_scale=choice, **options) for _ in range(2))
    values = [nll(s) for s in grid]
    assert 0 < int(np.argmin(values)) < 6
    assert float(one.prior.sigma0) == pytest.approx(grid[int(np.argmin(values))], rel=1e-12)
    assert torch.equal(one.draws, two.draws)


def test_a_chosen_scale_keeps_what_is_distance_aware():
    model, likelihood, x, y = problem("mlp")
    posterior = laplace.fit(model, likelihood, (x, y), prior_scale=laplace.MarginalLikelihood(), aware="2.*")
    assert posterior.prior.factor[posterior.prior.group].tolist() == [0.0] * 12 + [1.0] * 15
    assert len(posterior.prior.sigma0.unique()) == 1


@pytest.mark.parametrize(("low", "high"), [(20.0, 90.0), (1e-3, 5e-3)])
def test_the_edge_of_a_search_is_said(low, high):
    model, likelihood, train, held_out = trained(Categorical(), 3)
    for choice in (laplace.MarginalLikelihood(low, high), laplace.HeldOut(held_out, low, high, steps=3)):
        with pytest.warns(dapcal.DapcalWarning, match=r"at the edge of the search, .*widen"):
            laplace.last_layer(model, likelihood, train, prior_scale=choice)


# Last layers.


@each_curvature
@pytest.mark.parametrize(
    "name",
    ["mlp", "without bias", "batch norm", "layer norm", "convolutions", "residual", "recurrent", "transformer"],
)
def test_a_last_layer_is_that_block_of_the_whole_network(name, curvature):
    model, likelihood, x, y = problem(name)
    layer = NETWORKS[name][3][-1]
    learnt = [n for n, p in model.named_parameters() for _ in range(p.numel())]
    index = torch.tensor([i for i, n in enumerate(learnt) if n.startswith(f"{layer}.")])
    expected = curvature_by_hand(name, curvature)[index[:, None], index] + eye(len(index)) / SIGMA0**2
    options = {"curvature": CURVATURES[curvature], "prior_scale": SIGMA0, "batch_size": 3}
    full, diagonal, kronecker = (
        laplace.last_layer(model, likelihood, (x, y), structure=s, **options)
        for s in (laplace.Full, laplace.Diagonal, laplace.Kronecker)
    )
    assert full.linear.layer == layer  # found without a name
    assert full.layout.names == tuple(dict.fromkeys(n for n in learnt if n.startswith(f"{layer}.")))
    torch.testing.assert_close(precision_of(full), expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(1 / diagonal.gaussian.variance, expected.diagonal(), rtol=1e-9, atol=1e-10)
    whole = kronecker_by_hand(name, curvature)[index[:, None], index] + eye(len(index)) / SIGMA0**2
    torch.testing.assert_close(precision_of(kronecker), whole, rtol=1e-7, atol=1e-8)
    named = laplace.last_layer(model, likelihood, (x, y), layer=layer, structure=laplace.Full, **options)
    assert torch.equal(named.draws, full.draws)
    torch.testing.assert_close(full.moments(x).mean, plain(model, x).detach())


def test_a_last_layer_that_returns_one_column():
    model, likelihood, x, y = problem("one column")
    posterior = laplace.last_layer(model, likelihood, (x, y))
    assert posterior.linear.layer == "2"
    assert posterior.outputs(x).shape == (50, 5, 1)
    torch.testing.assert_close(posterior.moments(x).mean, plain(model, x).detach())


@each_structure
def test_weight_and_bias_of_a_last_layer_with_other_priors(structure):
    model, likelihood, x, y = problem("mlp")
    scales = {"*.bias": 0.3, "*.weight": 0.9}
    posterior = laplace.last_layer(model, likelihood, (x, y), structure=STRUCTURES[structure], prior_scale=scales)
    index = torch.arange(12, 27)
    curvature = {
        "full": curvature_by_hand("mlp", "ggn"),
        "diagonal": torch.diag(curvature_by_hand("mlp", "ggn").diagonal()),
        "kronecker": kronecker_by_hand("mlp", "ggn", apart=True),
    }[structure][index[:, None], index]
    precision = torch.tensor([1 / 0.9**2] * 12 + [1 / 0.3**2] * 3, dtype=torch.float64)
    torch.testing.assert_close(precision_of(posterior), curvature + torch.diag(precision), rtol=1e-7, atol=1e-8)


def test_an_example_to_find_the_last_layer_by_may_come_from_a_loader():
    model, likelihood, x, y = problem("residual")
    posterior = laplace.last_layer(model, likelihood, DataLoader(TensorDataset(x, y), batch_size=3))
    assert posterior.linear.layer == "fc"


SOFTMAX = lambda: Chain(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Softmax(-1))  # noqa: E731


@pytest.mark.parametrize(
    ("model", "layer", "message"),
    [
        (SOFTMAX, None, r"`2` to run once.*something follows it.*use laplace.fit"),
        (lambda: mlp(3), "0", r"`0` to run once.*something follows it"),
        (lambda: mlp(3), "head", r"name of an nn.Linear, got `head`; the model has \['0', '2'\]"),
        (lambda: mlp(3), "1", r"name of an nn.Linear, got `1`; the model has \['0', '2'\]"),
        (lambda: seeded(Tied()), "decoder", r"`decoder` are tied to another layer.*use laplace.fit"),
        (lambda: MeanAndNoise(mlp(1), mlp(1)), None, r"`noise.2` to run once.*something follows it"),
        (lambda: seeded(Twice()), "step", r"`step` to run once"),
        (lambda: Chain(nn.Unflatten(1, (2, 1)), nn.Linear(1, 2), nn.Flatten()), None, r"`1` to run once.*per place"),
    ],
    ids=["softmax", "not last", "unknown", "no linear layer", "tied", "two networks", "twice", "per place"],
)
def test_layers_that_are_not_last_are_refused(model, layer, message):
    x = integers(5, 6, 2) if layer == "decoder" else normal(6, 2)
    with pytest.raises(ValueError, match=message):
        laplace.last_layer(model(), Gaussian(0.5), (x, normal(6, 1)), layer=layer)


@pytest.mark.parametrize("last", [nn.ReLU(inplace=True), nn.ReLU(), nn.Hardtanh(-200, 200)])
def test_what_follows_a_last_layer_is_seen_whatever_the_inputs(last):
    model = Chain(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), last)
    model[2].bias.data.fill_(100.0)
    with pytest.raises(ValueError, match="something follows it"):
        laplace.last_layer(model, Gaussian(0.5), (normal(6, 2), normal(6, 1)))


class Cosine(nn.Linear):
    """Not linear in its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight), self.bias)


def test_a_last_layer_that_is_not_linear_is_refused():
    model = Chain(nn.Linear(2, 3), nn.Tanh(), Cosine(3, 2))
    with pytest.raises(ValueError, match=r"`2` to be linear in its weights.*laplace.fit"):
        laplace.last_layer(model, Gaussian(0.5), (normal(6, 2), normal(6, 2)))


# Classification against quadrature and Monte Carlo.


def logistic(n: int = 80, sigma0: float = 2.0):
    """Inputs, labels, and the MAP of a logistic regression without bias, by Newton's method."""
    x = normal(n, 2)
    y = (torch.rand(n, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(x @ normal(2, seed=4))).long()
    weights = torch.zeros(2, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(x @ weights)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + eye(2) / sigma0**2
        weights = weights + torch.linalg.solve(hessian, x.T @ (y - p) - weights / sigma0**2)
    layer = nn.Linear(2, 1, bias=False).double()
    layer.weight.data.copy_(weights[None])
    return nn.Sequential(layer), x, y


def test_logistic_regression_is_close_to_quadrature():
    """80 inputs, two weights: standard deviations within 10 % of the truth, probabilities within 0.02."""
    model, x, y = logistic()
    posterior = laplace.fit(model, Bernoulli(), (x, y), structure=laplace.Full, prior_scale=2.0)
    center, deviation = posterior.center, covariance_of(posterior.gaussian).diagonal().sqrt()
    axis = torch.linspace(-7, 7, 121, dtype=torch.float64)
    grid = center + torch.cartesian_prod(axis, axis) * deviation
    logits = grid @ x.T
    log_joint = torch.where(y == 1, logits, -logits).sigmoid().log().sum(1) - (grid**2).sum(1) / (2 * 2.0**2)
    weight = log_joint.softmax(0)
    mean = weight @ grid
    spread = (weight @ (grid - mean) ** 2).sqrt()
    torch.testing.assert_close(deviation, spread, rtol=0.1, atol=0)
    assert ((center - mean).abs() < 0.3 * spread).all()
    new = normal(40, 2, seed=7)
    truth = weight @ torch.sigmoid(grid @ new.T)
    drawn = replace(posterior, draws=posterior.gaussian.sample(20_000, torch.Generator().manual_seed(0)))
    assert ((torch.sigmoid(drawn.outputs(new)[..., 0]).mean(0) - truth).abs() < 0.02).all()


def against_monte_carlo(likelihood: Likelihood, outputs: int) -> tuple[Tensor, Tensor]:
    """Closed-form probabilities, and those of 100,000 draws of the same Gaussian; little data, so much to doubt."""
    model, x = mlp(outputs), normal(6, 2)
    model[2].weight.data.mul_(3.0)
    y = integers(max(outputs, 2), 6)
    posterior = laplace.last_layer(model, likelihood, (x, y), prior_scale=1.5, draws=100_000)
    new = 2 * normal(25, 2, seed=7)
    closed = likelihood.mean(Inflate()(posterior, new)(torch.zeros(25)))
    return closed, likelihood.conditional(posterior.outputs(new)).mean.mean(0)


@pytest.mark.parametrize(("likelihood", "outputs"), [(Bernoulli(), 1), (Bernoulli(1.5), 1), (Categorical(), 2)])
def test_closed_probabilities_of_two_classes_are_close_to_monte_carlo(likelihood, outputs):
    """MacKay's approximation is good to 0.02."""
    closed, drawn = against_monte_carlo(likelihood, outputs)
    assert (closed - drawn).abs().max() < 0.02


@pytest.mark.parametrize(("likelihood", "outputs"), [(Categorical(), 3), (Categorical(1.4), 5)])
def test_closed_probabilities_of_several_classes_are_near_monte_carlo(likelihood, outputs):
    """One variance per input keeps the order of the classes, and costs accuracy."""
    closed, drawn = against_monte_carlo(likelihood, outputs)
    assert (closed - drawn).abs().max() < 0.15
    assert (closed - drawn).abs().mean() < 0.06


# Calibrated, saved and loaded.

KINDS = {
    f"{method}, {structure}{', drawn' if drawn else ''}": (method, structure, drawn)
    for method, structure, drawn in itertools.product(METHODS, STRUCTURES, (False, True))
    if not (method == "last layer" and drawn)
}
each_kind = pytest.mark.parametrize("kind", KINDS)
ADJUSTMENTS = {"inflate": Inflate(), "transport": Transport(), "reweight": Reweight()}
NEW = torch.cat([normal(6, 2, seed=30), 8 * normal(6, 2, seed=31)])
FAR = 6 * normal(40, 2, seed=32)
quietly = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # weights collapse, searches end at an edge
LEARNT = {"categorical": (Categorical(), 3), "bernoulli": (Bernoulli(), 1), "gaussian": (Gaussian(0.3), 1)}


@functools.cache
def fitted(kind: str, likelihood: str = "categorical", draws: int = 30):
    method, structure, drawn = KINDS[kind]
    model, learnt, train, _ = trained(*LEARNT[likelihood])
    options = {"structure": STRUCTURES[structure], "draws": draws} | (
        {"linearised": not drawn} if method == "fit" else {}
    )
    return METHODS[method](model, learnt, train, **options)


def calibrate(posterior, likelihood: str = "categorical", **options):
    _, _, train, held_out = trained(*LEARNT[likelihood])
    data = {"train": train, "held_out": held_out, "ood": FAR, "distance": Space(Identity()), "candidates": 10}
    return dapcal.calibrate(posterior, **data | options)


FIELDS = ("mean", "variance", "epistemic", "aleatoric", "entropy", "distance", "ood_score", "ood_p_value")


@functools.cache
def calibrated_once(kind: str):
    """Calibrated by the default, at a φ that makes far inputs far."""
    return replace(calibrate(fitted(kind)), phi=-1.0)


def there_and_back(kind: str, adjust: str, path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Predictions before and after a file."""
    calibrated = replace(calibrated_once(kind), adjust=ADJUSTMENTS[adjust])
    calibrated.save(path)
    loaded = dapcal.load(path, mlp(3, hidden=8))
    assert type(loaded.posterior.gaussian) is type(calibrated.posterior.gaussian)
    assert loaded.posterior.linear == calibrated.posterior.linear
    before, after = ({name: getattr(c(NEW), name) for name in FIELDS} for c in (calibrated, loaded))
    return before, after


@quietly
@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@each_kind
def test_predictions_survive_a_file(kind, adjust, tmp_path):
    before, after = there_and_back(kind, adjust, tmp_path / "model.dap")
    for name in FIELDS:
        torch.testing.assert_close(before[name], after[name], rtol=1e-12, atol=1e-12, msg=name)
        assert torch.equal(before[name], after[name]) or "kronecker" in kind


@quietly
def test_predictions_survive_a_file_to_the_last_bit(tmp_path):
    for kind, adjust in itertools.product((k for k in KINDS if "kronecker" in k), ADJUSTMENTS):
        before, after = there_and_back(kind, adjust, tmp_path / "model.dap")
        assert all(torch.equal(before[name], after[name]) for name in FIELDS)


@quietly
@pytest.mark.parametrize("adjust", ["inflate", "transport"])
@pytest.mark.parametrize("kind", [k for k in KINDS if "drawn" not in k])
def test_calibrated_predictions_know_their_distance(kind, adjust):
    calibrated = replace(calibrate(fitted(kind), adjust=ADJUSTMENTS[adjust]), phi=-1.0)
    prediction, moments = calibrated(NEW), calibrated.posterior.moments(NEW)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(12, dtype=torch.float64))
    assert (prediction.distance[6:] > 0).all()
    assert (prediction.probs.max(-1).values[6:] < prediction.base.probs.max(-1).values[6:]).all()
    near = prediction.distance == 0
    assert near.any()
    assert torch.equal(prediction.probs[near], prediction.base.probs[near])
    assert torch.equal(prediction.probs.argmax(-1), moments.mean.argmax(-1))


@quietly
@each_kind
def test_reweighted_predictions_are_calibrated(kind):
    calibrated = calibrate(fitted(kind), adjust=Reweight(), guard=None)
    assert calibrated(NEW).diagnostics.total_weight.isfinite().all()
    assert calibrated(NEW).ensemble.outputs.shape == (30, 12, 3)


@quietly
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
@pytest.mark.parametrize("adjust", ["inflate", "transport"])
@pytest.mark.parametrize("kind", ["fit, kronecker", "last layer, full"])
def test_other_likelihoods_are_calibrated(kind, adjust, likelihood):
    calibrated = replace(calibrate(fitted(kind, likelihood), likelihood, adjust=ADJUSTMENTS[adjust]), phi=-1.0)
    prediction = calibrated(NEW)
    assert (prediction.epistemic[6:] > prediction.base.epistemic[6:]).all()
    if likelihood == "gaussian":
        moments = calibrated.posterior.moments(NEW)
        torch.testing.assert_close(prediction.base.epistemic, moments.variance)
        torch.testing.assert_close(prediction.mean, moments.mean)


@quietly
@pytest.mark.parametrize("likelihood", LEARNT)
@pytest.mark.parametrize("kind", ["fit, diagonal", "last layer, kronecker"])
def test_temperature_minimises_the_closed_nll(kind, likelihood):
    posterior = fitted(kind, likelihood)
    calibrated = calibrate(posterior, likelihood, temperature=True, seed=3)
    _, _, _, (x, y) = trained(*LEARNT[likelihood])
    first = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))[: (len(x) + 1) // 2]

    def nll(factor: float) -> float:
        scaled = replace(posterior, likelihood=calibrated.posterior.likelihood.rescaled(factor))
        base = Inflate()(scaled, x[first])(torch.zeros(len(first)))
        targets = scaled.likelihood.check(base.outputs, y[first])
        return -float(scaled.likelihood.log_prob(base, targets).mean())

    assert calibrated.posterior.likelihood != posterior.likelihood
    assert all(nll(1.0) < nll(step) for step in (0.5, 0.95, 1.05, 2.0))


@quietly
@each_kind
def test_joint_predictions_need_draws(kind):
    posterior = fitted(kind)
    closed = posterior.linear is not None
    for adjust in (Inflate(), Transport()):
        name = type(adjust).__name__
        calibrated = replace(calibrated_once(kind), adjust=adjust)
        if closed or isinstance(adjust, Inflate):
            with pytest.raises(ValueError, match=rf"closed form of {name} has a spread alone.*{name}\(drawn=True\)"):
                calibrated.joint(NEW)
    for adjust in (Inflate(drawn=True), Transport(drawn=True), Transport(shift=True), Reweight()):
        prediction = replace(calibrated_once(kind), adjust=adjust).joint(NEW)
        assert prediction.is_joint
        assert prediction.log_prob_joint(integers(3, 12)).isfinite()
        assert len(prediction.distance.unique()) == 1


@quietly
@pytest.mark.parametrize("kind", ["fit, full", "last layer, kronecker"])
@pytest.mark.parametrize("adjust", [Inflate(drawn=True), Transport(drawn=True)])
def test_drawn_adjustments_are_calibrated(kind, adjust):
    calibrated = calibrate(fitted(kind, draws=10), adjust=adjust, candidates=3)
    assert calibrated.joint(NEW).ensemble.outputs.shape == (10, 12, 3)
    assert not calibrated(NEW).ensemble.spread.any()


@quietly
@pytest.mark.parametrize("adjust", ["inflate", "transport"])
def test_one_draw_is_enough_for_closed_forms(adjust):
    one, many = (calibrate(fitted("last layer, full", draws=n), adjust=ADJUSTMENTS[adjust])(NEW).probs for n in (1, 30))
    assert torch.equal(one, many)


@quietly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_method
def test_predictions_keep_the_dtype(method, dtype):
    model, likelihood, train, held_out = trained(Categorical(), 3)
    train, held_out = ((x.to(dtype), y) for x, y in (train, held_out))
    posterior = METHODS[method](copy.deepcopy(model).to(dtype), likelihood, train)
    data = {"train": train, "held_out": held_out, "ood": FAR.to(dtype), "distance": Space(Identity())}
    calibrated = replace(dapcal.calibrate(posterior, **data, candidates=10, adjust=Transport()), phi=-1.0)
    prediction = calibrated(NEW.to(dtype))
    assert prediction.probs.dtype == posterior.draws.dtype == dtype
    exact = fitted(f"{method}, {'kronecker' if method == 'fit' else 'full'}")
    expected = replace(calibrate(exact, adjust=Transport()), phi=-1.0)(NEW).probs
    torch.testing.assert_close(prediction.probs.double(), expected, rtol=1e-3, atol=1e-4)


@each_method
@each_structure
def test_another_prior_widens_the_same_gaussian(method, structure):
    """J (Σ⁻¹ − C)⁻¹ Jᵀ with C of the new σ0, and Σ of the old one."""
    x, y, _ = regression()
    posterior = METHODS[method](
        at_the_map(x, y, 1.5), Gaussian(NOISE), (x, y), structure=STRUCTURES[structure], prior_scale=1.5
    )
    other = posterior.with_prior(2.5)
    assert torch.equal(other.draws, posterior.draws)
    features = torch.cat([x[:4], torch.ones(4, 1, dtype=torch.float64)], 1)
    moved = torch.linalg.inv(precision_of(posterior) - (1 / 2.5**2 - 1 / 4.0**2) * eye(3))
    expected = (features @ moved * features).sum(1, keepdim=True)
    torch.testing.assert_close(Transport()(other, x[:4])(torch.full((4,), 1.5)).spread, expected, rtol=1e-8, atol=1e-12)


def test_another_prior_does_not_cut_a_layer():
    posterior = fitted("last layer, kronecker").with_prior({"*.weight": 1.0, "*": 2.0})
    with pytest.raises(ValueError, match="rotated as a whole"):
        Transport(drawn=True)(posterior, NEW)(torch.ones(12))


def test_another_prior_does_not_cut_a_layer_in_closed_form_either():
    posterior = fitted("last layer, kronecker").with_prior({"*.weight": 1.0, "*": 2.0})
    with pytest.raises(ValueError, match="rotated as a whole"):
        Transport()(posterior, NEW)


# What is refused.

MODEL = mlp(3)
TRAIN = normal(6, 2), integers(3, 6)


@each_method
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"structure": "full"},
            TypeError,
            "`structure` as laplace.Diagonal, laplace.Kronecker or laplace.Full, got full",
        ),
        ({"structure": laplace.Full(torch.eye(2))}, TypeError, "`structure` as laplace.Diagonal"),
        ({"structure": KroneckerGaussian}, TypeError, "`structure` as laplace.Diagonal"),
        ({"draws": 0}, ValueError, "`draws` >= 1, got 0"),
        ({"prior_scale": 0}, ValueError, r"\(sigma0\) > 0"),
        ({"prior_scale": -1.0}, ValueError, r"\(sigma0\) > 0"),
        ({"prior_scale": math.nan}, ValueError, r"\(sigma0\) > 0"),
        ({"prior_scale": math.inf}, ValueError, r"\(sigma0\) > 0"),
        ({"prior_scale": {"2.weight": 1.0}}, ValueError, "cover every parameter"),
        ({"prior_scale": {"head.*": 1.0, "*": 2.0}}, ValueError, "match none"),
        ({"aware": "head.*"}, ValueError, "match none"),
        ({"train": (TRAIN[0], TRAIN[1] + 1)}, ValueError, "labels between 0 and 2"),
        ({"train": TRAIN[0]}, TypeError, "`train` as"),
        ({"train": (TRAIN[0] / 0, TRAIN[1])}, ValueError, "NaN or inf in 6 of 6 rows"),
        ({"likelihood": Gaussian(0.5)}, ValueError, "targets of shape"),
    ],
)
def test_bad_options_are_refused(method, options, error, message):
    arguments = {"model": MODEL, "likelihood": Categorical(), "train": TRAIN} | options
    with pytest.raises(error, match=message):
        METHODS[method](**arguments)


class Pairs(torch.utils.data.Dataset):
    """Samples by name."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": TRAIN[0][index], "y": TRAIN[1][index]}


def infinite_weights() -> nn.Module:
    model = mlp(3)
    model[0].weight.data[0, 0] = math.nan
    return model


@each_method
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prior_scale": laplace.MarginalLikelihood}, TypeError, r"`prior_scale` as a number.*MarginalLikelihood\(\)"),
        ({"prior_scale": "auto"}, TypeError, "`prior_scale` as a number"),
        ({"curvature": "ggn"}, TypeError, "`curvature` as laplace.ggn or laplace.empirical_fisher, got 'ggn'"),
        ({"batch_size": 0}, ValueError, "`batch_size` >= 1, got 0"),
        ({"model": infinite_weights()}, ValueError, "finite weights"),
        ({"model": Chain(nn.Linear(2, 3), nn.Unflatten(1, (1, 3)))}, ValueError, r"to return \(\d, C\) for \d inputs"),
        ({"train": DataLoader(Pairs())}, TypeError, "`train` to yield"),
        ({"train": DataLoader(TensorDataset(*TRAIN), batch_size=7, drop_last=True)}, ValueError, "at least one input"),
        ({"train": DataLoader(TensorDataset(TRAIN[0] / 0, TRAIN[1]))}, ValueError, "NaN or inf in 1 of 1 rows"),
    ],
)
def test_what_is_wrong_is_said(method, options, error, message):
    with pytest.raises(error, match=message):
        METHODS[method](**{"model": MODEL, "likelihood": Categorical(), "train": TRAIN} | options)


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (-1.0, 1.0)])
def test_ranges_of_a_search_are_checked(lowest, highest):
    for choice in (laplace.MarginalLikelihood, functools.partial(laplace.HeldOut, TRAIN)):
        with pytest.raises(ValueError, match="0 < `lowest` < `highest`"):
            choice(lowest=lowest, highest=highest)


def test_models_without_learnt_parameters_are_refused():
    with pytest.raises(ValueError, match="unfreeze some"):
        laplace.fit(mlp(3).requires_grad_(False), Categorical(), TRAIN)
