"""posteriors: moments in the order in which it flattens parameters, draws of its samplers, and what is refused."""

from __future__ import annotations

from collections import OrderedDict

import posteriors
import pytest
import torch
import torchopt
from tensordict import TensorDict
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev

import dapcal
from dapcal.adapters.posteriors_library import from_state
from dapcal.gaussians import DiagonalGaussian, FullGaussian
from dapcal.likelihoods import Categorical
from dapcal.networks import layout_of

MODEL = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.fixture
def batch():
    return torch.randn(40, 2), torch.randint(0, 3, (40,))


def log_likelihoods(params, batch):
    outputs = functional_call(MODEL, params, (batch[0],))
    return -nn.functional.cross_entropy(outputs, batch[1], reduction="none"), outputs


def log_posterior(params, batch):
    values, outputs = log_likelihoods(params, batch)
    return values.sum() - 0.5 * sum((p**2).sum() for p in params.values()), outputs


def forward(params, batch):
    return functional_call(MODEL, params, (batch[0],)), torch.tensor([])


def outer(outputs, batch):
    return -nn.functional.cross_entropy(outputs, batch[1], reduction="sum")


def run(transform, params, batch, steps=1):
    states = [transform.init(params)]
    for _ in range(steps):
        states.append(transform.update(states[-1], batch)[0])
    return states[1:]


DICTS = {"dict": dict, "ordered": OrderedDict}
DENSE = {
    "vi": lambda: posteriors.vi.dense.build(log_posterior, torchopt.adam(1e-2), init_L=0.3),
    "fisher": lambda: posteriors.laplace.dense_fisher.build(log_likelihoods, per_sample=True, init_prec=2.0),
    "ggn": lambda: posteriors.laplace.dense_ggn.build(forward, outer, init_prec=2.0),
    "hessian": lambda: posteriors.laplace.dense_hessian.build(log_posterior, init_prec=40.0),
    "kalman": lambda: posteriors.ekf.dense_fisher.build(log_likelihoods, 0.5, per_sample=True),
}
DENSE_SAMPLE = {"vi": posteriors.vi.dense.sample, "kalman": posteriors.ekf.dense_fisher.sample}
DIAGONAL = {
    "vi": lambda: posteriors.vi.diag.build(log_posterior, torchopt.adam(1e-2), init_log_sds=-1.0),
    "fisher": lambda: posteriors.laplace.diag_fisher.build(log_likelihoods, per_sample=True, init_prec_diag=2.0),
    "ggn": lambda: posteriors.laplace.diag_ggn.build(forward, outer, init_prec_diag=2.0),
    "kalman": lambda: posteriors.ekf.diag_fisher.build(log_likelihoods, 0.5, per_sample=True),
}
DIAGONAL_SAMPLE = {
    "vi": posteriors.vi.diag.sample,
    "fisher": posteriors.laplace.diag_fisher.sample,
    "ggn": posteriors.laplace.diag_ggn.sample,
    "kalman": posteriors.ekf.diag_fisher.sample,
}
SAMPLERS = {
    "sgld": lambda: posteriors.sgmcmc.sgld.build(log_posterior, lr=1e-3),
    "sghmc": lambda: posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-3),
    "sgnht": lambda: posteriors.sgmcmc.sgnht.build(log_posterior, lr=1e-3),
    "baoa": lambda: posteriors.sgmcmc.baoa.build(log_posterior, lr=1e-3),
}


def start(model, kind=dict):
    return kind((name, p.detach().clone()) for name, p in model.named_parameters())


def covariance_by_name(posterior):
    """Covariance entries in the order of the model's own parameters."""
    order = posterior.layout.unflatten(torch.arange(len(posterior.center)))
    index = torch.cat([order[name].flatten() for name, _ in posterior.model.named_parameters()])
    return posterior.gaussian.covariance[index][:, index]


def fisher(model, vector, unflatten, batch):
    def loss(values, x, y):
        return nn.functional.cross_entropy(functional_call(model, unflatten(values), (x[None],)), y[None])

    gradients = torch.stack([grad(loss)(vector, x, y) for x, y in zip(*batch, strict=True)])
    return 2 * torch.eye(len(vector)) + gradients.T @ gradients


def gauss_newton(model, vector, unflatten, batch):
    def outputs(values):
        return functional_call(model, unflatten(values), (batch[0],))

    probs, jacobian = outputs(vector).softmax(-1), jacrev(outputs)(vector)
    curvature = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    return 2 * torch.eye(len(vector)) + torch.einsum("ncp,nck,nkq->pq", jacobian, curvature, jacobian)


def curvature(model, vector, unflatten, batch):
    def loss(values):
        outputs = functional_call(model, unflatten(values), (batch[0],))
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum") + 0.5 * (values**2).sum()

    return 40 * torch.eye(len(vector)) + hessian(loss)(vector)


@pytest.mark.parametrize("kind", DICTS)
@pytest.mark.parametrize(("method", "precision"), [("fisher", fisher), ("ggn", gauss_newton), ("hessian", curvature)])
def test_dense_precisions_against_loops_in_the_order_of_the_models_parameters(model, batch, kind, method, precision):
    (state,) = run(DENSE[method](), start(model, DICTS[kind]), batch)
    posterior = from_state(state, model, Categorical(), prior_scale=0.5, draws=2)
    layout = layout_of(dict(model.named_parameters()))
    expected = precision(model, nn.utils.parameters_to_vector(model.parameters()).detach(), layout.unflatten, batch)
    torch.testing.assert_close(covariance_by_name(posterior).float(), expected.inverse(), rtol=1e-3, atol=1e-5)
    assert isinstance(posterior.gaussian, FullGaussian)


@pytest.mark.parametrize("kind", DICTS)
@pytest.mark.parametrize("method", ["vi", "kalman"])
def test_dense_moments_are_those_of_its_samples(model, batch, method, kind):
    state = run(DENSE[method](), start(model, DICTS[kind]), batch, steps=3)[-1]
    posterior = from_state(state, model, Categorical(), prior_scale=1.0, draws=3)
    drawn = {n: t.detach() for n, t in DENSE_SAMPLE[method](state, torch.Size([20_000])).items()}
    flat = torch.cat([drawn[n].reshape(20_000, -1) for n in posterior.layout.names], 1)
    scale = posterior.gaussian.covariance.diagonal().sqrt()
    error = (torch.cov(flat.double().T) - posterior.gaussian.covariance) / torch.outer(scale, scale)
    assert error.abs().max() < 0.05  # 7 standard errors
    assert ((flat.mean(0) - posterior.center) / scale).abs().max() < 0.05
    for name, tensor in posterior.layout.unflatten(posterior.center).items():
        torch.testing.assert_close(tensor, state.params[name])


@pytest.mark.parametrize("method", DIAGONAL)
def test_diagonal_moments_are_those_of_its_samples(model, batch, method):
    state = run(DIAGONAL[method](), start(model), batch, steps=3)[-1]
    posterior = from_state(state, model, Categorical(), prior_scale=1.0, draws=3)
    assert isinstance(posterior.gaussian, DiagonalGaussian)
    drawn = DIAGONAL_SAMPLE[method](state, torch.Size([20_000]))
    variance = posterior.layout.unflatten(posterior.gaussian.variance)
    for name, tensor in posterior.layout.unflatten(posterior.center).items():
        torch.testing.assert_close(drawn[name].var(0), variance[name], rtol=0.07, atol=0)
        torch.testing.assert_close(tensor, state.params[name])


@pytest.mark.parametrize("method", SAMPLERS)
def test_draws_of_its_samplers(model, batch, method):
    states = run(SAMPLERS[method](), start(model), batch, steps=5)
    forms = {
        "states": states,
        "params": [state.params for state in states],
        "stacked states": torch.stack(states),
        "dict": {n: torch.stack([state.params[n] for state in states]) for n in states[0].params},
        "tensordict": torch.stack([TensorDict(state.params) for state in states]),
    }
    for form, value in forms.items():
        posterior = from_state(value, model, Categorical())
        assert posterior.gaussian is None, form
        assert posterior.draws.shape == (5, 27), form
        for state, outputs in zip(states, posterior.outputs(batch[0]), strict=True):
            torch.testing.assert_close(outputs, functional_call(model, state.params, (batch[0],)))


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # labels at random: nothing is too unsure
def test_prior_scale(model, batch):
    state = run(DIAGONAL["vi"](), start(model), batch)[-1]
    without = from_state(state, model, Categorical())
    assert without.prior is None
    held_out = (torch.randn(60, 2), torch.randint(0, 3, (60,)))
    dapcal.calibrate(without, train=batch, held_out=held_out, distance=dapcal.distances.Space(), ood=9 * batch[0])
    given = from_state(state, model, Categorical(), prior_scale={"0.*": 2.0, "*": 1.0}, aware="2.*")
    assert sorted(given.prior.sigma0.tolist()) == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"`aware` .* needs `prior_scale`"):
        from_state(state, model, Categorical(), aware="2.*")


def test_parameters_that_are_not_random_stay(model, batch):
    params = {n: p for n, p in start(model).items() if n.startswith("2.")}

    def last_layer(values, data):
        fixed = {n: p.detach() for n, p in model.named_parameters() if n.startswith("0.")}
        return log_likelihoods({**fixed, **values}, data)

    transform = posteriors.laplace.dense_fisher.build(last_layer, per_sample=True, init_prec=1.0)
    (state,) = run(transform, params, batch)
    posterior = from_state(state, model, Categorical(), prior_scale=1.0, draws=2)
    assert set(posterior.layout.names) == {"2.bias", "2.weight"}
    torch.testing.assert_close(posterior.network(batch[0]), model(batch[0]))


def test_refused(model, batch):
    sgld = run(SAMPLERS["sgld"](), start(model), batch)[-1]
    with pytest.raises(ValueError, match=r"several draws, got one SGLDState, which is a single draw; collect"):
        from_state(sgld, model, Categorical())
    with pytest.raises(ValueError, match="at least one state, got none"):
        from_state([], model, Categorical())
    flat = run(posteriors.laplace.diag_fisher.build(log_likelihoods, per_sample=True), start(model), batch)[-1]
    flat.prec_diag["0.bias"][0] = 0.0
    with pytest.raises(ValueError, match=r"precision > 0 everywhere, got 0 in `0.bias`; start from the prior"):
        from_state(flat, model, Categorical())
    singular = run(posteriors.laplace.dense_fisher.build(log_likelihoods, per_sample=True), start(model), batch)[-1]
    singular.prec[0] = 0.0
    with pytest.raises(ValueError, match=r"positive definite precision.*init_prec"):
        from_state(singular, model, Categorical())
    with pytest.raises(
        ValueError, match=r"got \['0.weight', '0.bias', '2.weight', '2.bias'\]; it has \['weight', 'bias'\]"
    ):
        from_state(run(DIAGONAL["vi"](), start(model), batch)[-1], nn.Linear(2, 3), Categorical())
