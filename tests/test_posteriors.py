"""Posteriors: what is learnt, against closed forms; what is brought, against plain loops; what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, distributions, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from cases import KnownNoise
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, MeanAndNoise, NoiseHead
from dapcal.posteriors import gaussian, samples, variational
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors._training import mean_field
from dapcal.posteriors.predictions import StackedPredictions

KINDS = {
    "tensors": lambda x, y: (x, y),
    "dataset": TensorDataset,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True),
}


class Scalar(nn.Module):
    """A model with a parameter that has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x


class Flat(nn.Sequential):
    """A model that returns (N,) for N inputs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1), nn.Flatten(0))


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


def with_batch_norm(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model((seed + 1) * torch.randn(60, 2) + seed)
        return model.eval()


def line(n: int = 60, correlation: float = 0.8):
    """A linear regression of two correlated inputs with noise 0.5, and its exact posterior under N(0, 1.5²)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    x[:, 1] = correlation * x[:, 0] + math.sqrt(1 - correlation**2) * x[:, 1]
    y = x @ torch.tensor([1.0, -0.5]) + 0.5 * torch.randn(n, generator=generator)
    precision = x.T @ x / 0.25 + torch.eye(2) / 1.5**2
    return x, y, torch.linalg.solve(precision, x.T @ y / 0.25), precision


def plain(model: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, state, (x,)).detach()


# MAP


@pytest.mark.parametrize("kind", KINDS)
def test_map_learns(blobs, kind):
    (x, y), (x_new, y_new) = blobs
    losses = []
    posterior = map_posterior.fit(
        network(),
        Categorical(),
        KINDS[kind](x, y),
        epochs=40,
        learning_rate=0.02,
        batch_size=32,
        progress=lambda epoch: losses.append((epoch.number, epoch.loss)),
    )
    assert [epoch for epoch, _ in losses] == list(range(1, 41))
    assert losses[-1][1] < 0.5 * losses[0][1]
    outputs = posterior.outputs(x_new)
    assert outputs.shape == (1, 120, 3)
    assert (outputs[0].argmax(-1) == y_new).float().mean() > 0.95
    torch.testing.assert_close(posterior.network(x_new), outputs[0])
    assert posterior.gaussian is None


@pytest.mark.parametrize("prior_scale", [0.1, 1.5])
def test_map_of_a_linear_model_is_ridge_regression(prior_scale):
    x, y, _, _ = line()
    model = nn.Linear(2, 1, bias=False)
    posterior = map_posterior.fit(
        model, KnownNoise(0.5), (x, y), prior_scale=prior_scale, epochs=400, learning_rate=0.05, batch_size=60
    )
    ridge = torch.linalg.solve(x.T @ x / 0.25 + torch.eye(2) / prior_scale**2, x.T @ y / 0.25)
    torch.testing.assert_close(posterior.center, ridge, atol=2e-3, rtol=0)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_fitting_leaves_the_model_as_it_was(blobs, fit):
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    posterior = fit(model, Categorical(), blobs[0], epochs=2, learning_rate=0.1)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert (posterior.center - posterior.layout.flatten(before)).abs().max() > 0.01
    x = blobs[1][0]
    outputs = posterior.outputs(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(posterior.outputs(x), outputs)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_fitting_is_reproducible_and_leaves_the_global_generator_alone(blobs, fit):
    before = torch.random.get_rng_state()
    one, two, three = (
        fit(network(), Categorical(), blobs[0], epochs=3, batch_size=16, learning_rate=0.01, seed=seed)
        for seed in (0, 0, 1)
    )
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, three.draws)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_map_learns_batch_norm_statistics(blobs):
    (x, y), _ = blobs
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    posterior = map_posterior.fit(model, Categorical(), (3 * x + 5, y), epochs=60, batch_size=150, learning_rate=0.01)
    np.testing.assert_allclose(posterior.network[0].running_mean, (3 * x + 5).mean(0), rtol=0.02)
    np.testing.assert_allclose(posterior.network[0].running_var, (3 * x + 5).var(0), rtol=0.02)
    assert not posterior.network.training
    assert posterior.outputs(3 * x + 5)[0].std() > 0.1


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_gaussian_noise_is_learnt(fit):
    x, y, _, _ = line(400)
    model = nn.Linear(2, 1)
    posterior = fit(model, Gaussian(2.0), (x, y), epochs=150, learning_rate=0.05, batch_size=400)
    assert isinstance(posterior.likelihood.noise, float)
    assert posterior.likelihood.noise == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_a_noise_head_is_learnt(generator, fit):
    x = 4 * torch.rand(600, 1, generator=generator) - 2
    y = x[:, 0] + torch.where(x[:, 0] > 0, 1.0, 0.2) * torch.randn(600, generator=generator)
    model = MeanAndNoise(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    posterior = fit(model, NoiseHead(), (x, y), epochs=200, learning_rate=0.03, batch_size=600, prior_scale=3.0)
    conditional = posterior.likelihood.conditional(posterior.outputs(torch.tensor([[-1.5], [1.5]])))
    low, high = conditional.variance.mean(0)[:, 0].sqrt().tolist()
    assert low == pytest.approx(0.2, abs=0.1)
    assert high == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_frozen_parameters_stay(blobs, fit):
    model = network()
    model[0].requires_grad_(False)
    posterior = fit(model, Categorical(), blobs[0], epochs=2, learning_rate=0.1)
    assert posterior.layout.names == ("2.weight", "2.bias")
    assert torch.equal(posterior.network[0].weight, model[0].weight)
    assert not torch.equal(posterior.network[2].weight, model[2].weight)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_fitting_a_model_with_a_single_output_dimension(fit):
    x, y, _, _ = line()
    posterior = fit(Flat(), Gaussian(), (x, y), epochs=2)
    assert posterior.outputs(x).shape[1:] == (60, 1)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_fitting_a_model_with_a_scalar_parameter(generator, fit):
    x = torch.randn(50, 1, generator=generator)
    posterior = fit(Scalar(), Gaussian(), (x, 2 * x), epochs=200, learning_rate=0.05)
    assert posterior.network.slope.item() == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
@pytest.mark.parametrize(
    ("model", "likelihood", "data", "error", "message"),
    [
        (
            network().requires_grad_(False),
            Categorical(),
            (torch.ones(4, 2), torch.ones(4)),
            ValueError,
            "unfreeze some",
        ),
        (network(), Gaussian(), (torch.ones(4, 2), torch.ones(4)), ValueError, r"targets of shape \(4, 3\)"),
        (network(), Categorical(), (torch.ones(4, 2), torch.full((4,), 3)), ValueError, "labels between 0 and 2"),
        (network(), Bernoulli(), (torch.ones(4, 2), torch.ones(4)), ValueError, "1 output"),
        (network(), Categorical(), (torch.ones(4, 2), torch.ones(3)), ValueError, "4 inputs and 3 targets"),
        (network(), Categorical(), torch.ones(4, 2), TypeError, "`train` as"),
        (nn.LSTM(2, 3), Categorical(), (torch.ones(4, 2), torch.ones(4)), TypeError, "return a tensor .* got tuple"),
    ],
)
def test_fitting_refuses(fit, model, likelihood, data, error, message):
    with pytest.raises(error, match=message):
        fit(model, likelihood, data, epochs=1)


@pytest.mark.parametrize("fit", [map_posterior.fit, variational.fit])
def test_a_loss_that_diverges_is_an_error(fit):
    x = torch.full((20, 2), 1e30)
    with pytest.raises(ValueError, match=r"The loss became .*lower `learning_rate`"):
        fit(nn.Linear(2, 1), KnownNoise(), (x, torch.ones(20)), epochs=3, learning_rate=1.0)


def test_a_point_is_one_draw():
    model = network()
    posterior = map_posterior.point(model, Categorical(), prior_scale=0.5)
    x = torch.randn(5, 2)
    torch.testing.assert_close(posterior.outputs(x)[0], model(x).detach())
    assert posterior.draws.shape == (1, 51)
    assert posterior.prior.sigma0.tolist() == [0.5]


# variational


def test_divergence_is_torchs():
    mean, log_scale = torch.randn(20), torch.randn(20)
    q, p = distributions.Normal(mean, log_scale.exp()), distributions.Normal(0.0, 0.7)
    torch.testing.assert_close(mean_field.divergence(mean, log_scale, 0.7), distributions.kl_divergence(q, p).sum())


def test_mean_field_matches_the_exact_posterior_of_a_linear_model():
    """Mean exact; variances 1/diag(precision), below the marginal ones where inputs are correlated.

    With one sample a step; test_conjugate.py has eight.
    """
    x, y, mean, precision = line()
    posterior = variational.fit(
        nn.Linear(2, 1, bias=False),
        KnownNoise(0.5),
        (x, y),
        prior_scale=1.5,
        epochs=1200,
        learning_rate=0.05,
        batch_size=60,
        draws=2000,
    )
    deviation = posterior.gaussian.variance.sqrt()
    exact = precision.diagonal().rsqrt()
    assert ((posterior.gaussian.mean - mean).abs() < 0.3 * exact).all()
    torch.testing.assert_close(deviation, exact, rtol=0.15, atol=0)
    marginal = torch.linalg.inv(precision).diagonal().sqrt()
    assert (deviation < 0.75 * marginal).all()
    torch.testing.assert_close(posterior.draws.std(0), deviation, rtol=0.06, atol=0)
    assert ((posterior.draws.mean(0) - posterior.gaussian.mean).abs() < 5 * deviation / 2000**0.5).all()


def test_batches_count_the_whole_training_set():
    """Minibatches and one batch have the same optimum: the likelihood is a sum over N, not a mean."""
    x, y, mean, precision = line(120)
    posterior = variational.fit(
        nn.Linear(2, 1, bias=False),
        KnownNoise(0.5),
        (x, y),
        prior_scale=1.5,
        epochs=300,
        learning_rate=0.03,
        batch_size=60,
    )
    exact = precision.diagonal().rsqrt()
    torch.testing.assert_close(posterior.gaussian.variance.sqrt(), exact, rtol=0.25, atol=0)
    assert ((posterior.gaussian.mean - mean).abs() < exact).all()


def test_the_kl_weight_tempers_the_posterior():
    """KL weight λ divides the precision that data give by λ; without a prior the posterior shrinks to a point."""
    x, y, _, _ = line()

    def deviation(weight: float) -> Tensor:
        return variational.fit(
            nn.Linear(2, 1, bias=False),
            KnownNoise(0.5),
            (x, y),
            prior_scale=1.5,
            kl_weight=weight,
            epochs=400,
            learning_rate=0.05,
        ).gaussian.variance.sqrt()

    for weight in (0.2, 1.0):
        exact = ((x**2).sum(0) / 0.25 / weight + 1 / 1.5**2).rsqrt()
        torch.testing.assert_close(deviation(weight), exact, rtol=0.2, atol=0)
    assert (deviation(0.0) < 0.25 * exact).all()


@pytest.mark.parametrize("kind", KINDS)
def test_variational_inference_learns_from_every_kind_of_data(blobs, kind):
    (x, y), (x_new, y_new) = blobs
    losses = []
    posterior = variational.fit(
        network(),
        Categorical(),
        KINDS[kind](x, y),
        epochs=60,
        learning_rate=0.03,
        batch_size=32,
        draws=7,
        progress=lambda epoch: losses.append(epoch.loss),
    )
    probabilities = posterior.outputs(x_new).softmax(-1).mean(0)
    assert (probabilities.argmax(-1) == y_new).float().mean() > 0.95
    assert losses[-1] < losses[0]
    assert posterior.draws.shape == (7, 51)
    assert torch.equal(posterior.layout.flatten(dict(posterior.network.named_parameters())), posterior.gaussian.mean)


@pytest.mark.parametrize("options", [{"kl_weight": -1.0}, {"draws": 0}, {"warm_up": -1}, {"samples": 0}])
def test_variational_inference_refuses(blobs, options):
    with pytest.raises(ValueError, match="Expected `kl_weight` and `warm_up` >= 0"):
        variational.fit(network(), Categorical(), blobs[0], **options)


# moments given


def test_diagonal_draws_have_the_moments():
    model = network()
    scale = {"2.weight": torch.rand(3, 8) + 0.1, "2.bias": torch.zeros(3)}
    posterior = gaussian.diagonal(model, Categorical(), scale, draws=4000, prior_scale=2.0)
    assert posterior.layout.names == ("2.weight", "2.bias")
    deviation = posterior.layout.flatten(scale)
    mean = torch.cat([model[2].weight.detach().flatten(), model[2].bias.detach()])
    assert ((posterior.draws.mean(0) - mean).abs() <= 5 * deviation / 4000**0.5 + 1e-6).all()
    torch.testing.assert_close(posterior.draws.std(0), deviation, rtol=0.08, atol=0)
    assert torch.equal(posterior.draws[:, -3:], model[2].bias.detach().expand(4000, 3))
    assert torch.equal(posterior.network[0].weight, model[0].weight)


def test_full_draws_have_the_moments():
    model = nn.Linear(3, 1)
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = (root @ root.T).float()
    mean = {"bias": torch.tensor([3.0]), "weight": torch.tensor([[1.0, 2.0, -1.0]])}
    posterior = gaussian.full(model, Gaussian(), covariance, ["bias", "weight"], mean=mean, draws=20_000)
    found = torch.cov(posterior.draws.double().T)
    error = (found - covariance).abs() / (covariance.diagonal()[:, None] * covariance.diagonal()).sqrt()
    assert error.max() < 0.05
    torch.testing.assert_close(posterior.draws.mean(0), torch.tensor([3.0, 1.0, 2.0, -1.0]), atol=0.1, rtol=0)
    x = torch.randn(5, 3)
    for s in (0, 17):
        own = {"bias": posterior.draws[s, :1], "weight": posterior.draws[s, 1:][None]}
        torch.testing.assert_close(posterior.outputs(x)[s], plain(model, own, x), rtol=1e-4, atol=1e-4)


def test_draws_are_seeded():
    scale = {"2.weight": torch.ones(3, 8)}
    one, two, three = (gaussian.diagonal(network(), Categorical(), scale, seed=s).draws for s in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_the_prior_as_a_posterior():
    model = network()
    scale = {n: torch.full_like(p, 0.1) for n, p in model.named_parameters()}
    sigma0 = {"0.*": 0.5, "*": 2.0}
    prior = gaussian.prior_of(gaussian.diagonal(model, Categorical(), scale, prior_scale=sigma0), draws=3000)
    deviation = prior.draws.std(0)
    torch.testing.assert_close(deviation[:24], torch.full((24,), 0.5), rtol=0.1, atol=0)
    torch.testing.assert_close(deviation[24:], torch.full((27,), 2.0), rtol=0.1, atol=0)
    assert torch.equal(prior.center, torch.zeros(51))
    with pytest.raises(ValueError, match="with_prior"):
        gaussian.prior_of(samples.from_state_dicts(model, Categorical(), [model.state_dict()]), 3)


@pytest.mark.parametrize(
    ("scale", "mean", "message"),
    [
        (
            {"fc.weight": torch.ones(3, 8)},
            None,
            r"names of parameters, got \['fc.weight'\]; the model has \['0.weight'",
        ),
        ({}, None, r"names of parameters, got \[\]"),
        ({"2.bias": torch.ones(4)}, None, r"`scale\['2.bias'\]` >= 0 of shape \(3,\), got \(4,\)"),
        ({"2.bias": torch.tensor([1.0, -1.0, 1.0])}, None, ">= 0"),
        ({"2.bias": torch.tensor([1.0, math.nan, 1.0])}, None, ">= 0"),
        ({"2.bias": torch.ones(3)}, {"2.bias": torch.ones(2)}, r"means shaped .* other shapes for \['2.bias'\]"),
        ({"2.bias": torch.ones(3)}, {"2.weight": torch.ones(3, 8)}, "mean"),
    ],
)
def test_bad_moments_are_refused(scale, mean, message):
    with pytest.raises(ValueError, match=message):
        gaussian.diagonal(network(), Categorical(), scale, mean=mean)


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        (torch.eye(4), r"shape \(3, 3\), got \(4, 4\)"),
        (torch.tensor([[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]]), "symmetric"),
        (torch.diag(torch.tensor([1.0, -1.0, 1.0])), "positive semi-definite"),
        (torch.full((3, 3), math.nan), "finite"),
    ],
)
def test_a_bad_covariance_is_refused(covariance, message):
    with pytest.raises(ValueError, match=message):
        gaussian.full(network(), Categorical(), covariance, ["2.bias"])


# draws brought


def test_state_dicts_equal_their_networks():
    members = [network(seed) for seed in range(4)]
    posterior = samples.from_state_dicts(members[0], Categorical(), [m.state_dict() for m in members])
    x = torch.randn(6, 2)
    torch.testing.assert_close(posterior.outputs(x), torch.stack([m(x).detach() for m in members]))
    torch.testing.assert_close(posterior.network(x).detach(), members[0](x).detach())
    assert posterior.prior is None
    assert posterior.squared_norms is None


def test_members_keep_their_own_batch_norm_statistics():
    members = [with_batch_norm(seed) for seed in range(3)]
    posterior = samples.from_state_dicts(members[1], Gaussian(), [m.state_dict() for m in members])
    x = torch.randn(6, 2)
    torch.testing.assert_close(posterior.outputs(x), torch.stack([m(x).detach() for m in members]))
    torch.testing.assert_close(posterior.network(x).detach(), members[0](x).detach())
    assert set(posterior.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_state_dicts_of_tied_parameters_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    members = [Tied() for _ in range(3)]
    posterior = samples.from_state_dicts(Tied(), Gaussian(), [m.state_dict() for m in members])
    x = torch.randn(6, 3)
    assert posterior.draws.shape == (3, 9)
    torch.testing.assert_close(posterior.outputs(x), torch.stack([m(x).detach() for m in members]))


def test_stacked_draws_of_some_parameters():
    model = network()
    stacked = {"2.weight": torch.randn(5, 3, 8)}
    posterior = samples.from_stacked(model, Categorical(), stacked, prior_scale=2.0)
    x = torch.randn(6, 2)
    for s in range(5):
        torch.testing.assert_close(posterior.outputs(x)[s], plain(model, {"2.weight": stacked["2.weight"][s]}, x))
    torch.testing.assert_close(posterior.squared_norms[:, 0], (stacked["2.weight"] ** 2).sum((1, 2)).double())


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "at least one state dict"),
        (
            [network().state_dict(), {"0.weight": torch.ones(8, 2)}],
            r"state dict 1 .* \['0.bias', '2.bias', '2.weight'\]",
        ),
        ([{**network().state_dict(), "extra": torch.ones(1)}], r"state dict 0 with the model's names, but \['extra'\]"),
        ([{**network().state_dict(), "2.bias": torch.ones(4)}], r"`2.bias` of shape \(S, \*\(3,\)\), got \(1, 4\)"),
        ([{**network().state_dict(), "2.bias": torch.full((3,), math.nan)}], "NaN or inf in `2.bias`"),
    ],
)
def test_bad_state_dicts_are_refused(states, message):
    with pytest.raises(ValueError, match=message):
        samples.from_state_dicts(network(), Categorical(), states)


@pytest.mark.parametrize(
    ("stacked", "message"),
    [
        ({"fc": torch.ones(2, 3)}, r"parameter names of the model, got \['fc'\]; it has \['0.weight'"),
        ({}, r"got \[\]"),
        ({"2.bias": torch.ones(2, 3), "0.bias": torch.ones(4, 8)}, r"as many draws of every parameter, got \[2, 4\]"),
        ({"2.bias": torch.ones(3)}, r"`2.bias` of shape \(S, \*\(3,\)\), got \(3,\)"),
        ({"2.bias": torch.ones(2, 4)}, r"got \(2, 4\)"),
        ({"2.bias": torch.ones(0, 3)}, "at least one draw"),
    ],
)
def test_bad_stacks_are_refused(stacked, message):
    with pytest.raises(ValueError, match=message):
        samples.from_stacked(network(), Categorical(), stacked)


def test_aware_needs_a_prior_scale():
    with pytest.raises(ValueError, match="needs `prior_scale`"):
        samples.from_stacked(network(), Categorical(), {"2.bias": torch.ones(2, 3)}, aware="2.*")


# what all share


def test_squared_norms_per_group():
    model = MeanAndNoise(nn.Linear(2, 1), nn.Linear(2, 1))
    stacked = {n: torch.randn(6, *p.shape) for n, p in model.named_parameters()}
    posterior = samples.from_stacked(
        model, NoiseHead(), stacked, prior_scale={"*.bias": 0.5, "*": 2.0}, aware={"mean.weight": 1.0, "mean.bias": 3.0}
    )
    prior = posterior.prior
    for g in range(len(prior.labels)):
        inside = [
            n
            for n in stacked
            if (0.5 if n.endswith("bias") else 2.0) == prior.sigma0[g]
            and {"mean.weight": 1.0, "mean.bias": 3.0}.get(n, 0.0) == prior.factor[g]
        ]
        expected = sum((stacked[n].double() ** 2).flatten(1).sum(1) for n in inside)
        torch.testing.assert_close(posterior.squared_norms[:, g], expected)
    assert posterior.squared_norms.dtype == torch.float64
    torch.testing.assert_close(posterior.squared_norms.sum(1), (posterior.draws.double() ** 2).sum(1))


def test_with_prior():
    posterior = samples.from_state_dicts(network(), Categorical(), [network(s).state_dict() for s in range(3)])
    other = posterior.with_prior(0.7, aware="2.*")
    assert posterior.prior is None
    assert other.prior.sigma0.tolist() == [0.7, 0.7]
    assert sorted(other.prior.factor.tolist()) == [0.0, 1.0]
    assert torch.equal(other.draws, posterior.draws)
    aware = int(other.prior.factor.argmax())
    last = sum((p**2).sum() for n, p in network(1).named_parameters() if n.startswith("2."))
    assert other.squared_norms[1, aware].item() == pytest.approx(last.item(), rel=1e-5)


def test_outputs_at_other_parameters(posterior, classifier):
    x = torch.randn(4, 2)
    center = posterior.outputs_at(posterior.center[None], x)
    torch.testing.assert_close(center[0], classifier(x).detach())
    torch.testing.assert_close(posterior.outputs_at(posterior.draws, x), posterior.outputs(x))


# predictions alone


def test_stacked_predictions_are_passed_on():
    posterior = StackedPredictions(lambda x: torch.stack([x, 2 * x]).requires_grad_(), Gaussian())
    outputs = posterior.outputs(torch.ones(3, 2))
    assert outputs.shape == (2, 3, 2)
    assert posterior.network is None
    assert posterior.prior is None
    assert posterior.squared_norms is None
    assert posterior.gaussian is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, r"\(S, 3, C\) for 3 inputs, got \(3, 2\); draws come first"),
        (lambda x: torch.stack([x, x], 1)[:, :1], r"got \(3, 1, 2\); draws come first"),
        (lambda x: x[None, :, :, None], r"got \(1, 3, 2, 1\)"),
        (lambda x: x[None] / 0, "finite predictions, got NaN or inf"),
    ],
)
def test_bad_stacked_predictions_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        StackedPredictions(function, Gaussian()).outputs(torch.ones(3, 2))


def test_a_prior_scale_by_name_pattern_reaches_the_fits():
    """A tight prior on one layer shrinks that layer alone, in MAP and in the variational posterior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    data = x, x.sum(1, keepdim=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    scales = {"0.*": 0.01, "*": 1.0}
    options = {"epochs": 100, "learning_rate": 0.02, "prior_scale": scales}
    point = map_posterior.fit(model, Gaussian(0.5), data, **options)
    spread = variational.fit(model, Gaussian(0.5), data, **options)
    for posterior in (point, spread):
        parts = posterior.layout.unflatten(posterior.center)
        assert parts["0.weight"].abs().max() < 0.1 < parts["2.weight"].abs().max()
    deviations = spread.layout.unflatten(spread.gaussian.variance.sqrt())
    assert deviations["0.weight"].max() < 0.05
