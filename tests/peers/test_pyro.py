"""Pyro: sites of its modules, samplers and guides are found and give the networks that it sampled."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import nn
from torch.func import functional_call

import dapcal
from dapcal.adapters.sample_dicts import from_samples
from dapcal.likelihoods import Gaussian


def network():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.net = network()
        to_pyro_module_(self.net)
        for module in self.net.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                prior = dist.Normal(0.0, 1.0).expand(parameter.shape).to_event(parameter.dim())
                setattr(module, name, PyroSample(prior))

    def forward(self, x, y=None):
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        mean = pyro.deterministic("mean", self.net(x).squeeze(-1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(mean, sigma), obs=y)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    return x, x[:, 0] - x[:, 1] ** 2 + 0.1 * torch.randn(80, generator=generator)


@pytest.fixture(scope="module")
def chain(data):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    x, y = data
    sampler = MCMC(NUTS(Regression(), max_tree_depth=4), num_samples=30, warmup_steps=30, disable_progbar=True)
    sampler.run(x[:50], y[:50])
    return sampler


def check(posterior, draws, prefix, x):
    """The outputs are those of the network at each of the draws."""
    net = network()
    for number, outputs in enumerate(posterior.outputs(x)):
        own = {n: draws[prefix + n][number].reshape(p.shape) for n, p in net.named_parameters()}
        torch.testing.assert_close(outputs, functional_call(net, own, (x,)))


def test_draws_of_nuts(chain, data):
    draws = chain.get_samples()
    assert "sigma" in draws  # is not a weight
    posterior = from_samples(draws, network(), Gaussian(0.1), prior_scale=1.0)
    assert posterior.draws.shape == (30, 13)
    assert posterior.layout.names == tuple(n for n, _ in network().named_parameters())
    check(posterior, draws, "net.", data[0])
    grouped = from_samples(chain.get_samples(group_by_chain=True), network(), Gaussian(0.1), grouped_by_chain=True)
    torch.testing.assert_close(grouped.draws, posterior.draws)


def test_calibrates(chain, data):
    (x, y), draws = data, chain.get_samples()
    likelihood = Gaussian(float(draws["sigma"].mean()))
    posterior = from_samples(draws, network(), likelihood, prior_scale=1.0)
    held_out = (x[50:], y[50:])
    calibrated = dapcal.calibrate(
        posterior, train=(x[:50], y[:50]), held_out=held_out, distance=dapcal.distances.Space(), guard=None
    )
    prediction = calibrated(torch.tensor([[0.0, 0.0], [30.0, 30.0]]))
    assert prediction.variance[1] > prediction.variance[0]


def test_draws_of_a_guide(data):
    """Predictive puts a dimension of size 1 behind the draws, and unconstrained copies beside them."""
    pyro.clear_param_store()
    model = Regression()
    guide = AutoNormal(model)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(*data)
    both = Predictive(model, guide=guide, num_samples=5)(data[0])
    assert both["net.0.weight"].shape == (5, 1, 3, 2)
    check(from_samples(both, network(), Gaussian(0.1)), both, "net.", data[0])
    alone = Predictive(guide, num_samples=5)(*data)
    assert "net.0.weight_unconstrained" in alone
    check(from_samples(alone, network(), Gaussian(0.1)), alone, "net.", data[0])


def test_draws_of_a_random_module(data):
    net = network()
    prior = {n: dist.Normal(0.0, 1.0).expand(p.shape).to_event(p.dim()) for n, p in net.named_parameters()}

    def model(x, y=None):
        lifted = pyro.random_module("module", net, prior)()
        return pyro.sample("obs", dist.Normal(lifted(x).squeeze(-1), 1.0).to_event(1), obs=y)

    draws = Predictive(model, num_samples=4, parallel=False)(data[0])
    assert "module$$$0.weight" in draws
    check(from_samples(draws, net, Gaussian(1.0)), draws, "module$$$", data[0])


def test_two_networks_in_one_model_are_ambiguous(data):
    class Two(PyroModule):
        def __init__(self):
            super().__init__()
            self.mean, self.noise = Regression().net, Regression().net

        def forward(self, x):
            return self.mean(x) + self.noise(x)

    draws = Predictive(Two(), num_samples=3)(data[0])
    with pytest.raises(
        ValueError, match=r"`0.weight` may be any of \['mean.0.weight', 'noise.0.weight'\]; give `rename`"
    ):
        from_samples(draws, network(), Gaussian(1.0))
    alone = {n: t for n, t in draws.items() if n.startswith("mean.")}
    check(from_samples(alone, network(), Gaussian(1.0)), draws, "mean.", data[0])
