"""SWAG: moments against numpy, the exact posterior of a linear model, batch norm by hand, resuming."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from cases import Fragile, Killed
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import swag


def regression(n: int = 60):
    """A linear regression of two correlated inputs with noise 0.5, and its exact posterior under N(0, 1.5²)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    y = x @ torch.tensor([1.0, -0.5]).double() + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    precision = x.T @ x / 0.25 + torch.eye(2) / 1.5**2
    return x, y, torch.linalg.solve(precision, x.T @ y / 0.25), torch.linalg.inv(precision)


def network(batch_norm: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        return nn.Sequential(nn.Linear(2, 16), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def everything(posterior) -> list[Tensor]:
    gaussian = posterior.gaussian
    return [
        posterior.draws, *posterior.shared.values(), *posterior.buffers.values(), gaussian.mean, gaussian.variance,
        gaussian.factor,
    ]  # fmt: skip


def same(one, two) -> bool:
    return all(torch.equal(a, b) for a, b in zip(everything(one), everything(two), strict=True))


# Moments


@pytest.mark.parametrize(("rank", "epochs", "start"), [(20, 30, 0.5), (4, 30, 0.5), (10, 11, 0.0)])
def test_moments_are_those_of_the_iterates(rank, epochs, start):
    """SGD with momentum on the ridge loss, by hand in numpy."""
    x, y, _, _ = regression()
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 1.0]]))
    likelihood = Gaussian(0.5)
    posterior = swag.fit(
        model, likelihood, (x, y), prior_scale=1.5, rank=rank, start=start, epochs=epochs, learning_rate=0.02,
        batch_size=60, draws=5,
    )  # fmt: skip
    a, b = x.numpy(), y.numpy()
    theta, speed, log_noise, noise_speed = np.array([2.0, 1.0]), np.zeros(2), math.log(0.5), 0.0
    iterates, noises = [], []
    for epoch in range(epochs):
        residual, variance = b - a @ theta, math.exp(2 * log_noise)
        gradient = theta / 1.5**2 / 60 - (a * residual[:, None]).mean(0) / variance
        noise_gradient = 1 - (residual**2).mean() / variance
        speed, noise_speed = 0.9 * speed + gradient, 0.9 * noise_speed + noise_gradient
        theta, log_noise = theta - 0.02 * speed, log_noise - 0.02 * noise_speed
        if epoch >= start * epochs:
            iterates.append(theta)
            noises.append(log_noise)
    iterates = np.array(iterates)
    means = np.cumsum(iterates, 0) / np.arange(1, len(iterates) + 1)[:, None]
    last = (iterates - means)[-rank:]
    covariance = 0.5 * (np.diag(iterates.var(0)) + last.T @ last / (len(last) - 1))
    gaussian = posterior.gaussian
    np.testing.assert_allclose(gaussian.mean, means[-1], rtol=1e-5)
    np.testing.assert_allclose(gaussian.variance, 0.5 * iterates.var(0), rtol=1e-4)
    np.testing.assert_allclose(
        gaussian.variance.diag() + gaussian.factor @ gaussian.factor.T, covariance, rtol=1e-4, atol=1e-9
    )
    assert gaussian.factor.shape == (2, len(last))
    assert posterior.likelihood.noise == pytest.approx(math.exp(np.mean(noises)), rel=1e-5)
    assert torch.equal(posterior.center, gaussian.mean)


def test_iterates_are_collected_where_the_docstring_says(monkeypatch):
    x, y, _, _ = regression()
    steps, seen = [], []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(1)
            return super().step(closure)

    monkeypatch.setattr(swag.Moments, "add", lambda self, vector: seen.append(len(steps)) or self.count.add_(1))
    swag.fit(
        nn.Linear(2, 1).double(), Gaussian(), (x, y), epochs=8, batch_size=6, start=0.25, per_epoch=3, optimizer=Watched
    )
    assert len(steps) == 80
    assert seen == [10 * epoch + end for epoch in range(2, 8) for end in (4, 7, 10)]


def test_the_mean_is_that_of_the_exact_posterior():
    """SGD's noise averages out: 200 epochs of iterates lie within a fraction of a posterior deviation."""
    x, y, mean, covariance = regression()
    model = nn.Linear(2, 1, bias=False).double()
    posterior = swag.fit(
        map_posterior.fit(model, Gaussian(0.5), (x, y), prior_scale=1.5, epochs=100, learning_rate=0.02).network,
        Gaussian(0.5), (x, y), prior_scale=1.5, epochs=200, per_epoch=4, batch_size=10, draws=2000,
    )  # fmt: skip
    deviation = covariance.diagonal().sqrt()
    assert ((posterior.gaussian.mean - mean).abs() < 0.2 * deviation).all()
    assert posterior.likelihood.noise == pytest.approx(0.5, rel=0.2)
    spread = posterior.gaussian.variance + (posterior.gaussian.factor**2).sum(1)
    np.testing.assert_allclose(posterior.draws.var(0), spread, rtol=0.15)


def test_the_variance_grows_with_the_learning_rate():
    x, y, _, _ = regression()
    start = map_posterior.fit(nn.Linear(2, 1).double(), Gaussian(0.5), (x, y), epochs=200, learning_rate=0.02).network
    narrow, wide = (
        swag.fit(start, Gaussian(0.5), (x, y), epochs=60, batch_size=10, learning_rate=rate).draws.var(0)
        for rate in (0.002, 0.008)
    )
    assert wide.mean() > 2 * narrow.mean()


def test_it_classifies_and_calibrates(blobs):
    (x, y), (x_new, y_new) = blobs
    start = map_posterior.fit(network(), Categorical(), (x, y), epochs=30, learning_rate=0.02).network
    posterior = swag.fit(start, Categorical(), (x, y), epochs=20, batch_size=16)
    assert posterior.draws.shape == (50, posterior.layout.flatten(dict(start.named_parameters())).numel())
    probabilities = posterior.outputs(x_new).softmax(-1).mean(0)
    assert (probabilities.argmax(-1) == y_new).double().mean() > 0.95
    far = torch.tensor([[6.0, -6.0]])
    calibrated = dapcal.calibrate(posterior, train=(x, y), held_out=(x_new, y_new), ood=3 * x_new)
    assert calibrated(far).probs.max() < posterior.outputs(far).softmax(-1).mean(0).max()


def test_a_distance_widens_it(blobs):
    (x, y), _ = blobs
    posterior = swag.fit(network(), Categorical(), (x, y), prior_scale=0.5, epochs=20, batch_size=16, learning_rate=0.2)
    at = dapcal.adjust.Transport()(posterior, x[:20])
    near, far = (at(torch.full((20,), d)).outputs for d in (0.0, 5.0))
    assert torch.equal(near, posterior.outputs(x[:20]))
    assert far.var(0).mean() > 1.01 * near.var(0).mean()


# Batch norm


@pytest.mark.parametrize("loader", [False, True])
def test_statistics_of_a_draw_are_those_of_the_training_inputs(blobs, loader):
    x, y = blobs[0]
    data = DataLoader(TensorDataset(x, y), batch_size=150) if loader else (x, y)
    model = network().eval()
    posterior = swag.fit(model, Categorical(), data, epochs=6, batch_size=150, learning_rate=0.1, draws=4)
    assert set(posterior.buffers) == {"1.running_mean", "1.running_var"}
    own = posterior.layout.unflatten(posterior.draws)
    hidden = x @ own["0.weight"].mT + own["0.bias"][:, None]  # (S, N, 16)
    torch.testing.assert_close(posterior.buffers["1.running_mean"], hidden.mean(1))
    torch.testing.assert_close(posterior.buffers["1.running_var"], hidden.var(1))
    assert posterior.buffers["1.running_mean"].std(0).min() > 0
    normalised = (hidden - hidden.mean(1, True)) / (hidden.var(1, keepdim=True) + 1e-5).sqrt()
    inner = (normalised * own["1.weight"][:, None] + own["1.bias"][:, None]).tanh()
    expected = inner @ own["4.weight"].mT + own["4.bias"][:, None]
    torch.testing.assert_close(posterior.outputs(x), expected, atol=1e-4, rtol=1e-4)


def test_statistics_are_averages_over_minibatches_weighted_by_their_sizes(blobs):
    x, y = blobs[0]
    data = DataLoader(TensorDataset(x, y), batch_size=100)  # 100 and 50
    posterior = swag.fit(network(), Categorical(), data, epochs=4, draws=3)
    own = posterior.layout.unflatten(posterior.draws)
    parts = [part @ own["0.weight"].mT + own["0.bias"][:, None] for part in x.split(100)]
    expected = parts[0].var(1) * 2 / 3 + parts[1].var(1) / 3
    torch.testing.assert_close(posterior.buffers["1.running_var"], expected)


def test_the_mean_network_has_statistics_of_its_own(blobs):
    x, y = blobs[0]
    posterior = swag.fit(network(), Categorical(), (x, y), epochs=6, batch_size=150, learning_rate=0.1, draws=4)
    layer = posterior.network[0]
    hidden = (x @ layer.weight.T + layer.bias).detach()
    assert torch.equal(layer.weight.flatten(), posterior.center[:32])
    torch.testing.assert_close(posterior.network[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(posterior.network[1].running_var, hidden.var(0))


def test_without_batch_norm_nothing_differs_but_the_weights(blobs):
    assert swag.fit(network(False), Categorical(), blobs[0], epochs=4).buffers == {}


# Resuming, seeds, state


@pytest.mark.parametrize("at_epoch", [2, 7])
@pytest.mark.parametrize("loader", [False, True])
def test_a_killed_run_ends_where_an_uninterrupted_one_does(tmp_path, blobs, at_epoch, loader):
    data = TensorDataset(*blobs[0])
    options = {"epochs": 8, "per_epoch": 2, "rank": 3, "batch_size": 16, "draws": 3, "held_out": blobs[1]}

    def fit(**more):
        train = DataLoader(data, batch_size=16, shuffle=True) if loader else data
        return swag.fit(network(), Categorical(), train, **options, **more)

    def stop(epoch) -> None:
        if epoch.number == at_epoch:
            raise Killed

    reference = fit()
    with pytest.raises(Killed):
        fit(checkpoint=tmp_path / "run", checkpoint_seconds=0, progress=stop)
    assert same(fit(checkpoint=tmp_path / "run"), reference)
    epochs: list = []
    assert same(fit(checkpoint=tmp_path / "run", progress=epochs.append), reference)
    assert epochs == []


@pytest.mark.parametrize("dies_at", [26, 41, 79, 80])
def test_a_run_killed_within_an_epoch_goes_on(tmp_path, blobs, dies_at):
    """8 epochs of 10 minibatches; iterates after steps 45, 50, …, 80."""
    options = {"epochs": 8, "per_epoch": 2, "rank": 3, "batch_size": 15, "draws": 3, "checkpoint_seconds": 0}
    reference = swag.fit(Fragile(network()), Categorical(), blobs[0], **options)
    with pytest.raises(Killed):
        swag.fit(Fragile(network(), dies_at), Categorical(), blobs[0], checkpoint=tmp_path / "run", **options)
    assert same(
        swag.fit(Fragile(network()), Categorical(), blobs[0], checkpoint=tmp_path / "run", **options), reference
    )


@pytest.mark.parametrize("change", [{"rank": 4}, {"start": 0.25}, {"per_epoch": 2}])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, blobs, change):
    options = {"epochs": 8, "checkpoint": tmp_path / "run"}
    swag.fit(network(), Categorical(), blobs[0], **options)
    with pytest.raises(ValueError, match="another run"):
        swag.fit(network(), Categorical(), blobs[0], **options, **change)


def test_it_is_seeded_and_leaves_model_and_global_generator_alone(blobs):
    model = network()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.random.get_rng_state()
    one, two, three = (swag.fit(model, Categorical(), blobs[0], epochs=4, batch_size=16, seed=s) for s in (0, 0, 1))
    assert same(one, two)
    assert not torch.equal(one.draws, three.draws)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training


def test_frozen_parameters_stay(blobs):
    model = network()
    model[0].requires_grad_(False)
    posterior = swag.fit(model, Categorical(), blobs[0], epochs=4)
    assert posterior.layout.names == ("1.weight", "1.bias", "4.weight", "4.bias")
    assert torch.equal(posterior.network[0].weight, model[0].weight)


def test_bfloat16(blobs):
    posterior = swag.fit(network(), Categorical(), blobs[0], epochs=4, bf16=True)
    assert posterior.draws.dtype == torch.float32
    assert posterior.outputs(blobs[1][0]).isfinite().all()


def test_saved_and_loaded(tmp_path, blobs):
    (x, y), held_out = blobs
    posterior = swag.fit(network(), Categorical(), (x, y), epochs=6, batch_size=16, draws=5)
    calibrated = dapcal.calibrate(posterior, train=(x, y), held_out=held_out, ood=20 * x)
    calibrated.save(tmp_path / "model.dap")
    again = dapcal.load(tmp_path / "model.dap", network())
    assert torch.equal(again(held_out[0]).probs, calibrated(held_out[0]).probs)
    assert torch.equal(again.posterior.network(x), posterior.network(x))


# Refusals


def diamonds(n: int = 600):
    """Twelve columns of which some are nearly the same, and a network that predicts y nearly without an error."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(n, 3, generator=generator)
    x = base.repeat(1, 4) + 0.1 * torch.randn(n, 12, generator=generator)
    y = (base[:, 0] + (base[:, 1] * 2).tanh() + 0.05 * torch.randn(n, generator=generator))[:, None]
    y = (y - y.mean()) / y.std()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model, x, y


@pytest.mark.parametrize("loader", [False, True])
def test_a_good_network_is_not_destroyed_in_silence(loader):
    """A noise level far under 1 makes gradients so large that the usual rate throws the network out of its place."""
    model, x, y = diamonds()
    generator = torch.Generator().manual_seed(3)
    data = DataLoader(TensorDataset(x, y), 64, shuffle=True, generator=generator) if loader else (x, y)
    with pytest.raises(
        ValueError, match=r"mean of the iterates .* lower `learning_rate` or scale the inputs and targets"
    ):
        swag.fit(model, Gaussian(0.06), data, epochs=10, batch_size=64, learning_rate=0.002)
    slow = swag.fit(model, Gaussian(0.06), data, epochs=10, batch_size=64, learning_rate=1e-4)
    assert (slow.network(x) - y).square().mean().sqrt() < 0.2


def test_a_classifier_is_not_destroyed_in_silence(blobs):
    start = map_posterior.fit(network(), Categorical(), blobs[0], epochs=30, learning_rate=0.02).network
    with pytest.raises(ValueError, match=r"mean of the iterates .* lower `learning_rate`"):
        swag.fit(start, Categorical(), blobs[0], epochs=20, batch_size=16, learning_rate=10)


def test_an_untrained_network_may_end_anywhere(blobs):
    assert swag.fit(network(), Categorical(), blobs[0], epochs=4, batch_size=16, learning_rate=10).draws.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 1}, "`rank` >= 2"),
        ({"start": 1.0}, "`start` at least 0"),
        ({"per_epoch": 0}, "`per_epoch` >= 1"),
        ({"per_epoch": 3}, "at most the 2 minibatches of an epoch, got 3"),
        ({"draws": 0}, "`draws`"),
        ({"epochs": 1}, "at least 2 iterates, got 1 .*raise `epochs`"),
        ({"epochs": 10, "start": 0.9}, "at least 2 iterates, got 1 .*lower `start`"),
        ({"patience": 2}, "leave out `patience`"),
    ],
)
def test_refusals(blobs, wrong, message):
    with pytest.raises(ValueError, match=message):
        swag.fit(network(), Categorical(), blobs[0], **{"held_out": blobs[1], **wrong})
