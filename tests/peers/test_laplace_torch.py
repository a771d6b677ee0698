"""laplace-torch: covariances, draws and functional variances are its own; what has no Gaussian is refused."""

from __future__ import annotations

import copy
import warnings

import laplace
import pytest
import torch
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from dapcal.adapters.laplace_torch import from_laplace, moments_of, network_of
from dapcal.gaussians import DiagonalGaussian, FullGaussian, KroneckerGaussian
from dapcal.likelihoods import Categorical, Gaussian

STRUCTURES = {"diag": DiagonalGaussian, "kron": KroneckerGaussian, "full": FullGaussian}
SUBSETS = ("all", "last_layer")


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))


def cnn(outputs: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=2), nn.Flatten(), nn.Linear(8, outputs)
    )


NETWORKS = {"mlp": (mlp, (2,)), "cnn": (cnn, (1, 6, 6))}


def data(shape, n=48, regression=False):
    x = torch.randn(n, *shape)
    y = torch.randn(n, 2) if regression else torch.randint(0, 3, (n,))
    return x, y


def loader(x, y):
    return DataLoader(TensorDataset(x, y), batch_size=16)


def fitted(network="mlp", likelihood="classification", subset="all", structure="kron", **options):
    make, shape = NETWORKS[network]
    x, y = data(shape, regression=likelihood == "regression")
    model = make(2 if likelihood == "regression" else 3)
    la = laplace.Laplace(model, likelihood, subset_of_weights=subset, hessian_structure=structure, **options)
    la.fit(loader(x, y))
    return la, model, x


def own_covariance(la):
    """Of laplace-torch's own making, (P, P)."""
    precision = la.posterior_precision
    if hasattr(precision, "eigenvalues"):
        return precision.inv_square_form(torch.eye(len(la.mean))[None])[0]
    return la.posterior_variance.diag() if precision.ndim == 1 else la.posterior_covariance


def dense(gaussian):
    """Covariance of a dapcal Gaussian, (P, P)."""
    if isinstance(gaussian, FullGaussian):
        return gaussian.covariance
    if isinstance(gaussian, DiagonalGaussian):
        return gaussian.variance.diag()
    rotation = gaussian.rotated(torch.eye(len(gaussian.mean), dtype=torch.float64), back=True)
    return rotation.T @ gaussian.variance.diag() @ rotation


def jacobian(posterior, x):
    """Of the outputs in the random parameters, (N, C, P)."""

    def outputs(vector):
        own = {**posterior.shared, **posterior.layout.unflatten(vector)}
        return functional_call(posterior.model, own, (x,))

    return jacrev(outputs)(posterior.center)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("network", NETWORKS)
def test_covariance_and_functional_variance_are_its_own(network, subset, structure):
    la, model, x = fitted(network, subset=subset, structure=structure, prior_precision=2.5)
    posterior = from_laplace(la, draws=3)
    assert isinstance(posterior.gaussian, STRUCTURES[structure])
    torch.testing.assert_close(dense(posterior.gaussian).float(), own_covariance(la), rtol=1e-3, atol=1e-5)
    mean, variance = la._glm_predictive_distribution(x[:7])
    jacobians = jacobian(posterior, x[:7]).double()
    ours = torch.einsum("ncp,pq,nkq->nck", jacobians, dense(posterior.gaussian).double(), jacobians)
    torch.testing.assert_close(ours.float(), variance, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(posterior.network(x[:7]), mean)
    torch.testing.assert_close(posterior.network(x[:7]), model(x[:7]))
    names = [n for n, _ in model.named_parameters()]
    assert list(posterior.layout.names) == (names if subset == "all" else names[-2:])
    torch.testing.assert_close(posterior.prior.sigma0, torch.tensor([2.5**-0.5], dtype=torch.float64))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_noise_and_temperature_are_in_the_covariance(subset, structure):
    la, _, _ = fitted(
        likelihood="regression",
        subset=subset,
        structure=structure,
        sigma_noise=0.4,
        temperature=0.5,
        prior_precision=3.0,
    )
    posterior = from_laplace(la, draws=1)
    torch.testing.assert_close(dense(posterior.gaussian).float(), own_covariance(la), rtol=1e-3, atol=1e-5)
    assert isinstance(posterior.likelihood, Gaussian)
    assert posterior.likelihood.noise == pytest.approx(0.4)
    la.temperature, la.sigma_noise = 1.0, 0.8
    wider = from_laplace(la, draws=1)
    torch.testing.assert_close(dense(wider.gaussian).float(), own_covariance(la), rtol=1e-3, atol=1e-5)
    assert dense(wider.gaussian).trace() > 1.2 * dense(posterior.gaussian).trace()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_posterior_covariance(structure):
    la, _, _ = fitted(subset="last_layer", structure=structure)
    posterior = from_laplace(la, draws=20_000)
    found, wanted = torch.cov(posterior.draws.T), own_covariance(la)
    scale = wanted.diagonal().sqrt()
    assert ((found - wanted) / torch.outer(scale, scale)).abs().max() < 0.05  # 7 standard errors
    assert ((posterior.draws.mean(0) - la.mean) / scale).abs().max() < 0.05


def test_outputs_are_the_network_at_the_draws():
    la, model, x = fitted("cnn", subset="last_layer", structure="kron")
    posterior = from_laplace(la, draws=4)
    for draw, outputs in zip(posterior.draws, posterior.outputs(x), strict=True):
        own = copy.deepcopy(model)
        nn.utils.vector_to_parameters(draw, own[-1].parameters())
        torch.testing.assert_close(outputs, own(x))


@pytest.mark.parametrize("subset", SUBSETS)
def test_sampled_outputs_are_the_network_at_the_draws(subset):
    la, model, x = fitted(subset=subset)
    posterior = from_laplace(la, draws=3, linearised=False)
    for draw, outputs in zip(posterior.draws, posterior.outputs(x), strict=True):
        own = copy.deepcopy(model)
        random = own.parameters() if subset == "all" else own[-1].parameters()
        nn.utils.vector_to_parameters(draw, random)
        torch.testing.assert_close(outputs, own(x))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_linearised_moments_are_its_own(network, subset, structure):
    la, _, x = fitted(network, "regression", subset, structure, sigma_noise=0.4)
    mean, variance = la._glm_predictive_distribution(x[:7])
    moments = from_laplace(la).moments(x[:7])
    torch.testing.assert_close(moments.mean, mean)
    torch.testing.assert_close(moments.variance.float(), variance.diagonal(dim1=1, dim2=2), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("backend", [BackPackGGN, AsdlGGN, CurvlinopsGGN])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_every_backend_leaves_a_network_that_can_be_used(subset, structure, backend):
    la, model, x = fitted(subset=subset, structure=structure, backend=backend)
    posterior = from_laplace(la, draws=2)
    torch.testing.assert_close(dense(posterior.gaussian).float(), own_covariance(la), rtol=1e-3, atol=1e-5)
    assert posterior.outputs(x).shape == (2, 48, 3)
    assert not any(module._forward_hooks for module in posterior.model.modules())
    copy.deepcopy(posterior.model)
    la(x)  # still whole
    assert "model" not in dict(network_of(la).named_children())
    assert list(network_of(la).state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(("subset", "structure"), [("all", "kron"), ("all", "diag"), ("last_layer", "kron")])
def test_prior_precision_by_layer(subset, structure):
    la, model, _ = fitted(subset=subset, structure=structure)
    names = [n for n, _ in model.named_parameters()][0 if subset == "all" else -2 :]
    precisions = torch.arange(1, len(names) + 1).float()
    la.prior_precision = precisions
    moments = moments_of(la)
    assert moments.prior_scale == pytest.approx(dict(zip(names, precisions.double().rsqrt().tolist(), strict=True)))
    torch.testing.assert_close(dense(moments.gaussian).float(), own_covariance(la), rtol=1e-3, atol=1e-5)
    from_laplace(la, draws=2).squared_norms  # noqa: B018


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_prior_precision_by_entry_must_be_constant_within_a_parameter(structure):
    la, model, _ = fitted(structure=structure)
    sizes = [p.numel() for p in model.parameters()]
    la.prior_precision = torch.cat([torch.full((n,), float(i + 1)) for i, n in enumerate(sizes)])
    assert moments_of(la).prior_scale["2.bias"] == pytest.approx(0.5)
    la.prior_precision = torch.linspace(1, 2, sum(sizes))
    with pytest.raises(ValueError, match=r"one prior precision within each parameter.*`0.weight`.*layerwise"):
        from_laplace(la)


def test_frozen_parameters_stay_fixed():
    model = mlp()
    model[0].requires_grad_(False)
    x, y = data((2,))
    la = laplace.Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(loader(x, y))
    posterior = from_laplace(la, draws=2)
    assert posterior.layout.names == ("2.weight", "2.bias")
    torch.testing.assert_close(dense(posterior.gaussian).float(), own_covariance(la), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(posterior.network(x), model(x))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_where_data_say_nothing_the_posterior_is_no_wider_than_the_prior(structure):
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].bias[:3] = -100.0  # units that never fire
    x, y = data((2,))
    la = laplace.Laplace(model, "classification", "all", structure, prior_precision=0.7)
    la.fit(loader(x, y))
    posterior = from_laplace(la, draws=2)
    assert structure == "full" or posterior.gaussian.contracted(posterior.prior) == 0


def test_calibrates_from_end_to_end_and_is_saved(tmp_path):
    model = mlp()
    x, y = data((2,), 200)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:120]), y[:120]).backward()
        optimizer.step()
    la = laplace.Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(loader(x[:120], y[:120]))
    la.optimize_prior_precision(pred_type="glm", method="marglik")
    posterior = from_laplace(la, draws=30)
    for adjust in (dapcal.adjust.Inflate(), dapcal.adjust.Transport()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dapcal.DapcalWarning)  # far inputs: the loss may have no inner minimum
            calibrated = dapcal.calibrate(
                posterior, train=(x[:120], y[:120]), held_out=(x[120:], y[120:]), adjust=adjust, ood=9 * x
            )
        near, far = calibrated(torch.tensor([[1.5, 1.5], [60.0, 60.0]])).entropy
        assert far > near
    calibrated.save(tmp_path / "laplace.dap")
    again = dapcal.load(tmp_path / "laplace.dap", mlp())
    torch.testing.assert_close(again(x).probs, calibrated(x).probs)


def test_other_likelihoods_are_given():
    la, _, _ = fitted(structure="diag")
    assert from_laplace(la, likelihood=Categorical(temperature=2.0), draws=1).likelihood.temperature == 2.0
    la.likelihood = "reward_modeling"
    with pytest.raises(ValueError, match=r"'classification' or 'regression', got 'reward_modeling'; pass `likelihood`"):
        from_laplace(la)


REFUSED = {
    "subnetwork": (
        lambda m: laplace.Laplace(
            m, "classification", "subnetwork", "full", subnetwork_indices=torch.tensor([0, 3, 4])
        ),
        TypeError,
        "got FullSubnetLaplace: a subnetwork takes single entries.*use 'last_layer'",
    ),
    "functional": (
        lambda m: laplace.Laplace(m, "classification", "all", "gp", n_subset=20),
        TypeError,
        "got FunctionalLaplace; functional .*'diag', 'kron' or 'full'",
    ),
    "prior mean": (
        lambda m: laplace.Laplace(m, "classification", "all", "diag", prior_mean=0.5),
        ValueError,
        "mean 0, got `la.prior_mean` different.*prior_mean=0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, error, message = REFUSED[case]
    x, y = data((2,))
    la = make(mlp())
    la.fit(loader(x, y))
    with pytest.raises(error, match=message):
        from_laplace(la)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_unfitted(subset, structure):
    la = laplace.Laplace(mlp(), "classification", subset_of_weights=subset, hessian_structure=structure)
    with pytest.raises(ValueError, match=r"Expected a fitted .*call la.fit"):
        from_laplace(la)
