from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dapcal.data import batch_sizes
from dapcal.experiments.gap.batched import (
    Network,
    Trained,
    fit_map,
    fit_variational,
    initial_weights,
    mlp,
    outputs,
)
from dapcal.likelihoods import Gaussian
from dapcal.networks import layout_of
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors._training.batched import Adam
from dapcal.posteriors._training.mean_field import divergence
from dapcal.posteriors.training import constant

HIDDEN, BATCH = (6, 5), 16
NETWORKS = [Network(0, 1e-2, 3), Network(1, 1e-3, 3), Network(1, 1e-2, 8), Network(0, 1e-5, 1)]


@pytest.fixture
def data(generator):
    x = torch.randn(2, 53, 3, generator=generator)
    return x, x.sin().sum(-1) + 0.1 * torch.randn(2, 53, generator=generator)


def alone(x, y, network, epochs, scale=None, start=None):
    """One network by torch's own layers and optimiser, with the batches and the noise of its generator."""
    with torch.random.fork_rng():
        torch.manual_seed(network.seed)
        model = mlp(x.shape[1], HIDDEN)
    generator = torch.Generator().manual_seed(network.seed)
    layout = layout_of(dict(model.named_parameters()))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() if start is None else start.mean.clone()
    mean = vector.requires_grad_()
    log_scale = torch.full_like(mean, math.log(scale or 1.0)).detach().requires_grad_()
    log_noise = (torch.zeros(()) if start is None else start.log_noise.clone()).requires_grad_()
    optimizer = torch.optim.Adam([mean, log_scale, log_noise], lr=network.learning_rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch_sizes(len(x), BATCH)):
            theta, penalty = mean, 0.5 * (mean**2).sum()
            if scale is not None:
                theta = mean + log_scale.exp() * torch.randn(len(mean), generator=generator)
                penalty = divergence(mean, log_scale, 1.0)
            located = functional_call(model, layout.unflatten(theta), (x[rows],))
            normal = torch.distributions.Normal(located[:, 0], log_noise.exp())
            loss = penalty / len(x) - normal.log_prob(y[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return mean.detach(), log_noise.detach(), log_scale.detach()


def close(value, expected):
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


def test_map_equals_networks_trained_alone(data):
    x, y = data
    found = fit_map(x, y, NETWORKS, hidden=HIDDEN, epochs=(3, 7), batch_size=BATCH)
    for epochs, trained in found.items():
        for place, network in enumerate(NETWORKS):
            mean, log_noise, _ = alone(x[network.data], y[network.data], network, epochs)
            close(trained.mean[place], mean)
            close(trained.log_noise[place], log_noise)
            assert trained.log_scale is None


def test_variational_equals_networks_trained_alone(data):
    x, y = data
    found = fit_variational(x, y, NETWORKS, hidden=HIDDEN, epochs=(2, 6), batch_size=BATCH, initial_scale=0.05)
    for epochs, trained in found.items():
        for place, network in enumerate(NETWORKS):
            mean, log_noise, log_scale = alone(x[network.data], y[network.data], network, epochs, scale=0.05)
            close(trained.mean[place], mean)
            close(trained.log_noise[place], log_noise)
            close(trained.log_scale[place], log_scale)


def test_variational_goes_on_from_given_networks(data):
    x, y = data
    start = fit_map(x, y, NETWORKS, hidden=HIDDEN, epochs=(5,), batch_size=BATCH)[5]
    before = start.mean.clone()
    found = fit_variational(x, y, NETWORKS, hidden=HIDDEN, epochs=(4,), batch_size=BATCH, start=start)[4]
    for place, network in enumerate(NETWORKS):
        own = Trained(start.mean[place], start.log_noise[place])
        mean, log_noise, _ = alone(x[network.data], y[network.data], network, 4, scale=0.02, start=own)
        close(found.mean[place], mean)
        close(found.log_noise[place], log_noise)
    assert torch.equal(start.mean, before)


def test_a_network_does_not_depend_on_its_neighbours(data):
    x, y = data
    together = fit_variational(x, y, NETWORKS, hidden=HIDDEN, epochs=(3,), batch_size=BATCH)[3]
    for place, network in enumerate(NETWORKS):
        own = fit_variational(x, y, [network], hidden=HIDDEN, epochs=(3,), batch_size=BATCH)[3]
        close(together.mean[place], own.mean[0])


def test_snapshots_are_those_of_shorter_runs(data):
    x, y = data
    long = fit_map(x, y, NETWORKS, hidden=HIDDEN, epochs=(2, 5), batch_size=BATCH)
    short = fit_map(x, y, NETWORKS, hidden=HIDDEN, epochs=(2,), batch_size=BATCH)
    assert torch.equal(long[2].mean, short[2].mean)
    assert not torch.equal(long[5].mean, short[2].mean)


def test_same_objective_as_the_library(data):
    """Whole batches, so that their order does not count: penalty, sum over the data and noise are the library's."""
    x, y = data
    options = {"epochs": 50, "learning_rate": 3e-3, "batch_size": 53, "schedule": constant}
    found = fit_map(x, y, [Network(0, 3e-3, 3)], hidden=HIDDEN, epochs=(50,), batch_size=53)[50]
    model = mlp(3, HIDDEN)
    nn.utils.vector_to_parameters(initial_weights(3, HIDDEN, [Network(0, 0.0, 3)])[0], model.parameters())
    expected = map_posterior.fit(model, Gaussian(), (x[0], y[0]), **options)
    torch.testing.assert_close(found.mean[0], expected.center, atol=1e-3, rtol=1e-3)
    assert float(found.log_noise[0].exp()) == pytest.approx(float(expected.likelihood.noise), rel=1e-3)


def test_outputs_are_those_of_the_modules(generator):
    networks = [Network(0, 0.1, seed) for seed in range(3)]
    weights, x = initial_weights(4, HIDDEN, networks), torch.randn(3, 9, 4, generator=generator)
    model = mlp(4, HIDDEN)
    layout = layout_of(dict(model.named_parameters()))
    for place, found in enumerate(outputs(layout, weights, x)):
        nn.utils.vector_to_parameters(weights[place], model.parameters())
        close(found, model(x[place])[:, 0].detach())


def test_adam_is_torchs_with_a_rate_for_each_network(generator):
    rates = [0.1, 0.003]
    start = torch.randn(2, 5, generator=generator)
    ours = start.clone().requires_grad_()
    optimizer = Adam([ours], torch.tensor(rates))
    theirs = [row.clone().requires_grad_() for row in start]
    others = [torch.optim.Adam([row], lr=rate) for row, rate in zip(theirs, rates, strict=True)]
    for _ in range(20):
        optimizer.step(torch.autograd.grad((ours**4).sum(), [ours]))
        for row, other in zip(theirs, others, strict=True):
            row.grad = 4 * row.detach() ** 3
            other.step()
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-6, rtol=1e-6)


def test_training_leaves_the_global_generator_alone(data):
    x, y = data
    before = torch.random.get_rng_state()
    fit_variational(x, y, NETWORKS, hidden=HIDDEN, epochs=(1,), batch_size=BATCH)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_refuses_data_that_is_not_there(data):
    with pytest.raises(ValueError, match="data sets 0 to 1"):
        fit_map(*data, [Network(2, 0.1, 0)], hidden=HIDDEN)
