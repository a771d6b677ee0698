"""Curvature: Fisher information of likelihoods, and Gauss–Newton and empirical Fisher of networks, by brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from dapcal.adjust import Transport
from dapcal.gaussians import DiagonalGaussian
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, NoiseHead
from dapcal.posteriors import laplace
from laplace_cases import (
    CURVATURES,
    METHODS,
    NETWORKS,
    SIGMA0,
    STRUCTURES,
    Chain,
    covariance_of,
    curvature_by_hand,
    each_curvature,
    each_structure,
    expected_targets,
    eye,
    fisher_of,
    integers,
    kronecker_by_hand,
    mlp,
    normal,
    plain,
    precision_of,
    problem,
    seeded,
)

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


class Unused(nn.Module):
    """A layer that never runs, and one whose result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.dropped, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        return self.head(x)


each_network = pytest.mark.parametrize("name", NETWORKS)


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
