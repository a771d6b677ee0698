"""NumPyro: JAX draws, by chain or not, give the networks that it sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import torch
from numpyro.infer import HMC, MCMC
from torch import nn

from dapcal.adapters.sample_dicts import from_samples
from dapcal.likelihoods import Gaussian


def network():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def model(x, y=None):
    sites = {name: normal(f"net/{name}", shape) for name, shape in SHAPES.items()}
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    hidden = jnp.tanh(x @ sites["0/weight"].T + sites["0/bias"])
    mean = numpyro.deterministic("mean", (hidden @ sites["2/weight"].T + sites["2/bias"])[:, 0])
    numpyro.sample("obs", dist.Normal(mean, sigma), obs=y)


SHAPES = {"0/weight": (3, 2), "0/bias": (3,), "2/weight": (1, 3), "2/bias": (1,)}


def normal(name, shape):
    return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))


@pytest.fixture(scope="module")
def chains():
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    kernel = HMC(model, num_steps=4, step_size=0.05, adapt_step_size=False, adapt_mass_matrix=False)  # compiles faster
    runs = {"num_warmup": 1, "num_samples": 10, "num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    sampler = MCMC(kernel, **runs)
    sampler.run(jax.random.PRNGKey(0), x, x[:, 0])
    return sampler, x


def test_draws(chains):
    sampler, x = chains
    draws = sampler.get_samples(group_by_chain=True)
    assert draws["net/0/weight"].shape == (2, 10, 3, 2)
    posterior = from_samples(draws, network(), Gaussian(0.5), prior_scale=1.0, grouped_by_chain=True)
    assert posterior.draws.dtype == torch.float32
    expected = np.asarray(draws["mean"]).reshape(20, 40, 1)
    torch.testing.assert_close(posterior.outputs(torch.from_numpy(x)), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    together = from_samples(sampler.get_samples(), network(), Gaussian(0.5), prior_scale=1.0)
    torch.testing.assert_close(together.draws, posterior.draws)


def test_brain_floats():
    draws = {f"net/{name}": jnp.ones((4, *shape), dtype=jnp.bfloat16) / 3 for name, shape in SHAPES.items()}
    posterior = from_samples(draws, network().double(), Gaussian(0.5))
    assert posterior.draws.dtype == torch.float64
    assert posterior.draws[0, 0] == float(jnp.bfloat16(1 / 3))


def test_kernels_of_jax_are_transposed():
    draws = {f"net/{name}": jnp.ones((4, *shape)) for name, shape in SHAPES.items()}
    draws["net/0/weight"] = jnp.ones((4, 2, 3))
    with pytest.raises(ValueError, match=r"`net/0/weight` of shape S, \*\(3, 2\), got \(4, 2, 3\); a kernel .* swap"):
        from_samples(draws, network(), Gaussian(0.5))
