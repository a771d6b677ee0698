"""Laplace: curvatures against brute force, conjugate models against closed forms, prior scales, predictions, files."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import multivariate_normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from dapcal.adjust import Inflate, Transport
from dapcal.gaussians import KroneckerGaussian
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MeanAndNoise
from dapcal.posteriors import laplace
from laplace_cases import (
    CURVATURES,
    METHODS,
    NETWORKS,
    NOISE,
    SIGMA0,
    STRUCTURES,
    Chain,
    Tied,
    Twice,
    at_the_map,
    covariance_of,
    curvature_by_hand,
    each_curvature,
    each_method,
    each_structure,
    eye,
    integers,
    kronecker_by_hand,
    mlp,
    normal,
    plain,
    precision_of,
    problem,
    regression,
    seeded,
    trained,
)

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
    model, likelihood, train, _ = trained(Categorical(), 3)
    with pytest.warns(dapcal.DapcalWarning, match=r"at the edge of the search, .*widen"):
        laplace.last_layer(model, likelihood, train, prior_scale=laplace.MarginalLikelihood(low, high))


class Falling:
    """Posteriors whose held-out NLL falls with σ0 down to a floor, by a step of `slope` nats a factor of e."""

    def __init__(self, slope: float, until: float) -> None:
        self.slope, self.until, self.asked = slope, until, []
        self.trained = trained(Categorical(), 3)

    def posterior(self, sigma0: float, drawn: bool = True) -> object:  # noqa: ARG002
        self.asked.append(sigma0)
        model, likelihood, train, _ = self.trained
        posterior = laplace.last_layer(model, likelihood, train, prior_scale=1e-4)
        return replace(posterior, likelihood=Shifted(by=self.slope * min(math.log(sigma0), self.until)))


@dataclass(frozen=True)
class Shifted(Categorical):
    by: float = 0.0

    def log_prob(self, base, y):
        return super().log_prob(base, y) + self.by


@pytest.mark.parametrize(("slope", "until", "chosen"), [(0.1, 9.0, 1e4), (1e-5, 99.0, 100.0), (0.1, 4.0, 63.1)])
def test_held_out_goes_on_while_a_wider_prior_gains(slope, until, chosen):
    candidates = Falling(slope, until)
    sigma0 = laplace.HeldOut(candidates.trained[3])(candidates)  # a warning would be an error
    assert math.log(sigma0) == pytest.approx(math.log(chosen), abs=0.47)
    assert max(candidates.asked) <= max(101, math.exp(until) * 3)


def test_held_out_says_that_the_given_range_ends_too_early():
    candidates = Falling(0.1, 99.0)
    with pytest.warns(dapcal.DapcalWarning, match=r"at the edge of the search, 5; widen"):
        assert laplace.HeldOut(candidates.trained[3], 0.1, 5.0, steps=3)(candidates) == pytest.approx(5)
    assert max(candidates.asked) < 5.1


def test_held_out_says_that_a_wider_prior_gains_without_end():
    candidates = Falling(0.1, 99.0)
    with pytest.warns(dapcal.DapcalWarning, match=r"at the edge of the search, 1e\+06"):
        laplace.HeldOut(candidates.trained[3])(candidates)


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
        return {"x": TRAIN[0][index], "z": TRAIN[1][index]}


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
        ({"train": DataLoader(Pairs())}, TypeError, "targets in `train` under one of"),
        ({"train": DataLoader(TensorDataset(*TRAIN), batch_size=7, drop_last=True)}, ValueError, "at least one input"),
        ({"train": DataLoader(TensorDataset(TRAIN[0] / 0, TRAIN[1]))}, ValueError, "NaN or inf in 1 of 1 rows"),
    ],
)
def test_what_is_wrong_is_said(method, options, error, message):
    with pytest.raises(error, match=message):
        METHODS[method](**{"model": MODEL, "likelihood": Categorical(), "train": TRAIN} | options)


@pytest.mark.parametrize("structure", [laplace.Diagonal, laplace.Kronecker, laplace.Full])
@pytest.mark.parametrize("fit", [laplace.fit, laplace.last_layer])
def test_curvature_that_overflows_is_refused(fit, structure):
    model = Chain(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x = 1e200 * torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model[2].weight.mul_(1e-200)  # ordinary outputs of features whose squares are none
    with pytest.raises(ValueError, match=r"too large for its numbers \(inf or NaN\).*scale inputs"):
        fit(model, Categorical(), (x, torch.arange(20) % 3), structure=structure)


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (-1.0, 1.0)])
def test_ranges_of_a_search_are_checked(lowest, highest):
    for choice in (laplace.MarginalLikelihood, functools.partial(laplace.HeldOut, TRAIN)):
        with pytest.raises(ValueError, match="0 < `lowest` < `highest`"):
            choice(lowest=lowest, highest=highest)


def test_models_without_learnt_parameters_are_refused():
    with pytest.raises(ValueError, match="unfreeze some"):
        laplace.fit(mlp(3).requires_grad_(False), Categorical(), TRAIN)
