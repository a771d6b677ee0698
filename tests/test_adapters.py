"""Adapters without the libraries: look-alikes of their objects, name rules, stacked predictions, what is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import dapcal
from dapcal.adapters import bayesian_torch, laplace_torch, modules, posteriors_library, sample_dicts
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import map as map_posterior


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def orthonormal(n: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, n))[0]


# laplace-torch


class Fitted:
    """Looks like a fitted laplace.Laplace object."""

    likelihood = "classification"
    n_data = 10
    H = torch.ones(1)

    def __init__(self, model, precision, **attributes):
        self.model, self.precision = model, precision
        self.mean = nn.utils.parameters_to_vector(model.parameters()).detach()
        self.prior_mean, self.prior_precision = torch.tensor(0.0), torch.tensor([4.0])
        vars(self).update(attributes)

    @property
    def posterior_precision(self):
        return self.precision


def kronecker(model, damping=False, delta=4.0):
    shapes = [(p.shape[0], p[0].numel()) if p.ndim > 1 else (len(p),) for p in model.parameters()]
    return SimpleNamespace(
        eigenvectors=[[orthonormal(n) for n in shape] for shape in shapes],
        eigenvalues=[[torch.rand(n) for n in shape] for shape in shapes],
        deltas=torch.full((len(shapes),), delta),
        damping=damping,
    )


@pytest.mark.parametrize("damping", [False, True])
def test_kronecker_factors_against_kronecker_products(damping):
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
    factors = kronecker(model, damping)
    root = 2.0 if damping else 0.0  # the square root of δ = 4 on each factor, in place of δ on their product
    blocks = []
    for values, vectors in zip(factors.eigenvalues, factors.eigenvectors, strict=True):
        shifted = [v.double() + (root if len(values) == 2 else 0) for v in values]
        matrices = [q.double() @ v.diag() @ q.double().T for q, v in zip(vectors, shifted, strict=True)]
        product = matrices[0] if len(values) == 1 else torch.kron(*matrices)
        blocks.append(product + (0 if damping and len(values) == 2 else 4) * torch.eye(len(product)))
    covariance = torch.block_diag(*blocks).inverse()
    gaussian = laplace_torch.moments_of(Fitted(model, factors)).gaussian
    rotation = gaussian.rotated(torch.eye(len(covariance), dtype=torch.float64), back=True)
    torch.testing.assert_close(rotation.T @ gaussian.variance.diag() @ rotation, covariance, rtol=1e-5, atol=1e-7)


def test_directions_without_data_are_as_wide_as_the_prior():
    model, precision = network(), torch.full((27,), 0.3)
    la = Fitted(model, precision * (1 - 1e-7), prior_precision=torch.tensor([0.3]))  # a rounding error too wide
    posterior = laplace_torch.from_laplace(la, draws=1)
    assert posterior.gaussian.contracted(posterior.prior) == 0
    la.precision = 0.9 * precision  # a true one, as of a Hessian
    assert laplace_torch.moments_of(la).gaussian.contracted(posterior.prior) == 27


def tuned(**attributes):
    return lambda: Fitted(network(), torch.full((27,), 5.0), **attributes)


class Functional:
    model = network()


LAPLACE_REFUSED = {
    "functional": (Functional, TypeError, r"got Functional; functional .* have none, use hessian_structure"),
    "subnetwork": (tuned(n_params_subnet=3), TypeError, r"a subnetwork takes single entries.*use 'last_layer'"),
    "low rank": (lambda: Fitted(network(), (1, 2)), TypeError, r"'full' covariance, got Fitted; refit"),
    "unfitted": (tuned(n_data=0), ValueError, r"Expected a fitted Fitted.*call la.fit"),
    "prior mean": (tuned(prior_mean=torch.ones(27)), ValueError, r"mean 0, got `la.prior_mean` diff.*prior_mean=0"),
    "flat prior": (tuned(prior_precision=torch.zeros(1)), ValueError, r"prior precision > 0 everywhere; set it"),
    "prior length": (tuned(prior_precision=torch.ones(3)), ValueError, r"length 1, 4 .* or 27 .*, got 3"),
    "mean": (tuned(mean=torch.ones(5)), ValueError, r"over 27 parameters, got shape \(5,\); fit it again"),
    "indefinite": (lambda: Fitted(network(), -torch.eye(27)), ValueError, r"positive definite.*raise the prior"),
    "blocks": (lambda: Fitted(network(), kronecker(nn.Linear(2, 4))), ValueError, r"one Kronecker block a parameter"),
    "likelihood": (tuned(likelihood="reward_modeling"), ValueError, r"got 'reward_modeling'; pass `likelihood`"),
}


@pytest.mark.parametrize("case", LAPLACE_REFUSED)
def test_laplace_refused(case):
    make, error, message = LAPLACE_REFUSED[case]
    with pytest.raises(error, match=message):
        laplace_torch.from_laplace(make())


def test_laplace_draws():
    with pytest.raises(ValueError, match="`draws` >= 1, got 0"):
        laplace_torch.from_laplace(tuned()(), draws=0)


# posteriors


def test_dense_covariances_are_in_the_order_of_sorted_names():
    model = network()
    covariance = torch.diag(torch.arange(1.0, 28.0))
    state = SimpleNamespace(params=parameters(model), cov=covariance)
    variance = dict_of_variances(posteriors_library.from_state(state, model, Categorical(), draws=1))
    assert variance["0.bias"].tolist() == [1, 2, 3, 4]
    assert variance["2.weight"].flatten().tolist() == list(range(16, 28))
    state.params = OrderedDict(state.params)
    variance = dict_of_variances(posteriors_library.from_state(state, model, Categorical(), draws=1))
    assert variance["0.weight"].flatten().tolist() == list(range(1, 9))


def dict_of_variances(posterior):
    gaussian = posterior.gaussian
    return posterior.layout.unflatten(
        gaussian.covariance.diagonal() if hasattr(gaussian, "covariance") else gaussian.variance
    )


def filled(model, value):
    return {name: torch.full_like(p, value) for name, p in model.named_parameters()}


def lower(size, value):
    rows, columns = torch.tril_indices(size, size)
    return torch.where(rows == columns, value, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_sd_diag", lambda model: filled(model, np.log(0.5))),
        ("sd_diag", lambda model: filled(model, 0.5)),
        ("prec_diag", lambda model: filled(model, 4.0)),
        ("prec", lambda model: 4 * torch.eye(27)),
        ("cov", lambda model: 0.25 * torch.eye(27)),
        ("L_factor", lambda model: lower(27, 0.5)),
    ],
)
def test_every_kind_of_moments(name, value):
    model = network()
    state = SimpleNamespace(params=filled(model, 0.1), **{name: value(model)})
    posterior = posteriors_library.from_state(state, model, Categorical(), prior_scale=2.0, draws=2)
    for part in dict_of_variances(posterior).values():
        torch.testing.assert_close(part.float(), torch.full(part.shape, 0.25))
    torch.testing.assert_close(posterior.center, torch.full((27,), 0.1))
    assert posterior.prior.sigma0.tolist() == [2.0]


def test_a_factor_is_filled_row_by_row():
    model = nn.Linear(2, 1, bias=False)
    state = SimpleNamespace(params=parameters(model), L_factor=torch.tensor([1.0, 2.0, 3.0]))
    covariance = posteriors_library.from_state(state, model, Gaussian(), draws=1).gaussian.covariance
    assert covariance.tolist() == [[1.0, 2.0], [2.0, 13.0]]


POSTERIORS_REFUSED = {
    "one draw": (lambda m: SimpleNamespace(params=parameters(m)), ValueError, r"got one SimpleNamespace, .* collect"),
    "none": (lambda m: (), ValueError, r"at least one state, got none"),
    "names": (lambda m: [{"a": torch.ones(2)}], ValueError, r"got \['a'\]; it has \['0.weight'"),
    "other names": (lambda m: [parameters(m), {"0.bias": m[0].bias}], ValueError, r"one and the same network"),
    "no names": (lambda m: [torch.ones(27)], TypeError, r"parameters by name, got Tensor; run"),
    "nothing": (lambda m: {}, ValueError, r"got none; it has"),
}


@pytest.mark.parametrize("case", POSTERIORS_REFUSED)
def test_posteriors_refused(case):
    make, error, message = POSTERIORS_REFUSED[case]
    model = network()
    with pytest.raises(error, match=message):
        posteriors_library.from_state(make(model), model, Categorical())


# dicts of samples


def draws_of(model, count=5, prefix="", separator="."):
    return {
        prefix + name.replace(".", separator): np.random.default_rng(0).normal(size=(count, *p.shape))
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("prefix", "separator"),
    [("", "."), ("net.", "."), ("module$$$", "."), ("net/", "/"), ("net_", "_"), ("a.b/c_", "$$$"), ("", "_")],
)
def test_names_that_are_found(prefix, separator):
    model, x = network(), torch.randn(6, 2)
    draws = {**draws_of(model, prefix=prefix, separator=separator), "sigma": np.ones(5), "obs": np.ones((5, 6))}
    posterior = sample_dicts.from_samples(draws, model, Categorical(), prior_scale=1.0)
    assert posterior.draws.dtype == torch.float32
    for number, outputs in enumerate(posterior.outputs(x)):
        own = {n: torch.tensor(draws[prefix + n.replace(".", separator)][number]).float() for n in parameters(model)}
        torch.testing.assert_close(outputs, functional_call(model, own, (x,)))


def test_names_with_a_prefix_on_the_side_of_the_model():
    model = nn.ModuleDict({"net": network()})
    posterior = sample_dicts.from_samples(draws_of(network()), model, Categorical())
    assert posterior.layout.names == tuple(parameters(model))
    named = posterior.layout.unflatten(posterior.draws)
    torch.testing.assert_close(named["net.2.bias"], torch.tensor(draws_of(network())["2.bias"]).float())


def test_rename_and_frozen_parameters():
    model = network()
    model[0].requires_grad_(False)
    draws = {"w": np.ones((3, 3, 4)), "b": torch.zeros(3, 3, dtype=torch.float64), "sigma": [1.0, 2.0, 3.0]}
    posterior = sample_dicts.from_samples(draws, model, Categorical(), rename={"w": "2.weight", "b": "2.bias"})
    assert posterior.layout.names == ("2.weight", "2.bias")
    assert set(posterior.shared) == {"0.weight", "0.bias"}
    assert posterior.draws.tolist() == [[1.0] * 12 + [0.0] * 3] * 3


def test_chains_and_single_dimensions():
    model = nn.Linear(2, 1).double()
    grouped = {"weight": np.arange(12.0).reshape(2, 3, 1, 2), "bias": np.arange(6.0).reshape(2, 3, 1)}
    posterior = sample_dicts.from_samples(grouped, model, Gaussian(), grouped_by_chain=True)
    assert posterior.draws.dtype == torch.float64
    assert posterior.draws[:, :2].flatten().tolist() == list(range(12))
    single = {"weight": np.ones((4, 1, 1, 1, 2)), "bias": np.ones((4, 1, 1))}
    assert sample_dicts.from_samples(single, model, Gaussian()).draws.shape == (4, 3)


def changed(**sites):
    return lambda model: {**draws_of(model), **sites}


SAMPLES_REFUSED = {
    "missing": (
        lambda m: {n: d for n, d in draws_of(m, prefix="net.").items() if n != "net.2.bias"},
        {},
        r"no draws of \['0.weight', .*give `rename`.* Sites: \['net.0.weight', .*Parameters: \['0.weight', ",
    ),
    "one missing": (
        lambda m: {n: d for n, d in draws_of(m).items() if n != "2.bias"},
        {},
        r"no draws of \['2.bias'\]",
    ),
    "two networks": (
        lambda m: {**draws_of(m, prefix="mean."), **draws_of(m, prefix="noise.")},
        {},
        r"`0.weight` may be any of \['mean.0.weight', 'noise.0.weight'\]; give `rename`.*Sites: .*Parameters: ",
    ),
    "two spellings": (
        lambda m: {**draws_of(m, prefix="net."), "net_2_bias": np.ones((5, 3))},
        {},
        r"`2.bias` may be any of \['net.2.bias', 'net_2_bias'\]",
    ),
    "transposed": (changed(**{"0.weight": np.ones((5, 2, 4))}), {}, r"S, \*\(4, 2\), got \(5, 2, 4\); a kernel .*swap"),
    "chains": (
        lambda m: {n: d[None] for n, d in draws_of(m, 5).items()},
        {},
        r"got \(1, 5, 4, 2\); draws by chain need grouped_by_chain=True",
    ),
    "no chains": (
        draws_of,
        {"grouped_by_chain": True},
        r"chains, S, \*\(4, 2\), got \(5, 4, 2\); .*grouped_by_chain=F",
    ),
    "shape": (changed(**{"0.bias": np.ones((5, 7))}), {}, r"`0.bias` of shape S, \*\(4,\), got \(5, 7\); check"),
    "scalar": (changed(**{"0.bias": 1.0}), {}, r"`0.bias` with 1 leading dimension\(s\), got shape \(\)"),
    "rename site": (draws_of, {"rename": {"a": "0.bias"}}, r"`rename` from sites .*unknown \['a'\]"),
    "rename name": (draws_of, {"rename": {"0.bias": "b"}}, r"`rename` from sites .*unknown \['b'\]"),
    "rename twice": (draws_of, {"rename": {"0.bias": "2.bias", "2.bias": "2.bias"}}, r"name each parameter once"),
}


@pytest.mark.parametrize("case", SAMPLES_REFUSED)
def test_samples_refused(case):
    make, options, message = SAMPLES_REFUSED[case]
    model = network()
    with pytest.raises(ValueError, match=message):
        sample_dicts.from_samples(make(model), model, Categorical(), **options)


# modules


class Members(nn.Module):
    """Returns the predictions of several networks in one of the usual layouts."""

    def __init__(self, layout, count=4):
        super().__init__()
        self.members = nn.ModuleList(network() for _ in range(count))
        self.layout = layout

    def forward(self, x):
        stacked = torch.stack([member(x) for member in self.members])
        return {"draws first": stacked, "inputs first": stacked.transpose(0, 1), "rows": stacked.flatten(0, 1)}[
            self.layout
        ]


@pytest.mark.parametrize(
    ("layout", "options"), [("draws first", {}), ("inputs first", {"axis": 1}), ("rows", {"draws": 4})]
)
@pytest.mark.parametrize("batch_size", [1, 3, 512])
def test_layouts_of_stacked_predictions(layout, options, batch_size):
    module, x = Members(layout), torch.randn(7, 2)
    posterior = modules.from_module(module, Categorical(), batch_size=batch_size, **options)
    torch.testing.assert_close(posterior.outputs(x), torch.stack([member(x) for member in module.members]))


class Noisy(nn.Module):
    """A new draw on every call, from torch's global generator or its own."""

    def __init__(self, own=False):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.generator = torch.Generator() if own else None

    def forward(self, x):
        return self.layer(x) + torch.randn((), generator=self.generator)


def test_new_draws_on_every_call_are_repeated():
    x = torch.randn(7, 2)
    posterior = modules.from_module(Noisy(), Categorical(), draws=6)
    outputs = posterior.outputs(x)
    assert outputs.shape == (6, 7, 3)
    assert len(outputs[:, 0, 0].unique()) == 6
    assert torch.equal(outputs, posterior.outputs(x))
    torch.testing.assert_close(outputs[:, 2:4], posterior.outputs(x[2:4]))


def test_predicting_leaves_the_global_generator_alone():
    posterior = modules.from_module(Noisy(), Categorical(), draws=6)
    before = torch.get_rng_state()
    posterior.outputs(torch.randn(7, 2, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state())


def test_a_module_with_one_output():
    module = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5), nn.Flatten(0))
    module.num_estimators = torch.tensor(5)
    module[1].eval = lambda: None  # stays on
    module[1].train = lambda mode=True: module[1]
    assert modules.from_module(module, Gaussian()).outputs(torch.randn(7, 2)).shape == (5, 7, 1)


MODULES_REFUSED = {
    "axis": (lambda: Members("inputs first"), {}, r"\(S, 7, C\) for 7 inputs, got \(7, 4, 3\); `axis`"),
    "axis 1": (lambda: Members("draws first"), {"axis": 1}, r"\(7, S, C\) for 7 inputs, got \(4, 7, 3\); `axis`"),
    "count": (lambda: Members("draws first"), {"draws": 5}, r"\(5, 7, C\) for 7 inputs, got \(4, 7, 3\)"),
    "rows": (lambda: Members("rows"), {}, r"\(S, 7, C\), got \(28, 3\); .*give `draws`"),
    "wrong rows": (lambda: Members("rows"), {"draws": 3}, r"\(3 \* 7, C\) or \(7, C\) .* got \(28, 3\); set `draws`"),
    "no draws": (network, {"draws": 3}, r"new draw on every call, but 3 calls gave the same.*dropout is off"),
    "no seed": (Noisy, {"draws": 3, "seed": None}, r"draws anew each time; give a `seed`"),
    "own generator": (lambda: Noisy(own=True), {"draws": 3}, r"draws anew each time; it has a generator of its own"),
    "draws": (network, {"draws": 0}, r"`draws` >= 1, got 0"),
    "axes": (network, {"axis": 2}, r"`axis` 0 .* got 2"),
    "batch": (network, {"batch_size": 0}, r"`batch_size` >= 1, got 0"),
}


@pytest.mark.parametrize("case", MODULES_REFUSED)
def test_modules_refused(case):
    make, options, message = MODULES_REFUSED[case]
    with pytest.raises(ValueError, match=message):
        modules.from_module(make(), Categorical(), **options).outputs(torch.randn(7, 2))


class Trained(nn.Module):
    """Looks like a LightningModule after training."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self._trainer = Trainer()

    def log(self, *_):
        raise RuntimeError("outside a trainer")

    log_dict = training_step = log

    def forward(self, x):
        self.log("mean", self.net(x).mean())
        return self.net(x)


class Trainer:
    def __deepcopy__(self, memo):
        raise RuntimeError("has open files")


def test_lightning_look_alike():
    module, x = Trained(), torch.randn(5, 2)
    with pytest.raises(RuntimeError, match="open files"):
        copy.deepcopy(module)
    plain = modules.from_lightning(module)
    torch.testing.assert_close(map_posterior.point(plain, Categorical()).outputs(x)[0], module.net(x))
    assert isinstance(module._trainer, Trainer)
    with pytest.raises(
        TypeError, match=r"a LightningModule, got Sequential without \['log', 'log_dict', 'training_step'\]"
    ):
        modules.from_lightning(network())


# bayesian-torch


class Variational(nn.Module):
    """Looks like bayesian-torch's LinearReparameterization."""

    def __init__(self, inputs, outputs, flag=False, prior_mean=0.0):
        super().__init__()
        self.mu_weight, self.rho_weight = (
            nn.Parameter(torch.randn(outputs, inputs)),
            nn.Parameter(torch.randn(outputs, inputs)),
        )
        self.mu_bias, self.rho_bias = nn.Parameter(torch.randn(outputs)), nn.Parameter(torch.randn(outputs))
        for name, parameter in (("weight", self.mu_weight), ("bias", self.mu_bias)):
            self.register_buffer(f"prior_{name}_mu", torch.full_like(parameter.detach(), prior_mean), persistent=False)
            self.register_buffer(f"prior_{name}_sigma", torch.full_like(parameter.detach(), 0.5), persistent=False)
        self.dnn_to_bnn_flag = flag


class Unpacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Variational(2, 4), Variational(4, 3)

    def forward(self, x):
        x, total = self.one(x)
        x, kl = self.two(x.tanh())
        return x, total + kl


@pytest.mark.parametrize("unpacking", [False, True])
def test_mean_field_layers_become_plain_ones(unpacking):
    model = Unpacking() if unpacking else nn.Sequential(Variational(2, 4, True), nn.Tanh(), Variational(4, 3, True))
    one, two = [m for m in model.modules() if isinstance(m, Variational)]
    x = torch.randn(6, 2)
    posterior = bayesian_torch.from_mean_field(model, Categorical(), draws=40_000)
    expected = torch.tanh(x @ one.mu_weight.T + one.mu_bias) @ two.mu_weight.T + two.mu_bias
    torch.testing.assert_close(posterior.network(x), expected)
    deviations = posterior.layout.unflatten(posterior.draws.std(0))
    name = "two" if unpacking else "2"
    torch.testing.assert_close(deviations[f"{name}.bias"], (1 + two.rho_bias.exp()).log().detach(), rtol=0.03, atol=0)
    assert posterior.prior.sigma0.tolist() == [0.5]
    assert posterior.outputs_at(posterior.draws[:2], x).shape == (2, 6, 3)


def test_mean_field_refused():
    with pytest.raises(ValueError, match=r"mean 0, got another for `1.mu_weight`.*prior_mean=0"):
        bayesian_torch.from_mean_field(
            nn.Sequential(Variational(2, 2), Variational(2, 2, prior_mean=1.0)), Categorical()
        )
    with pytest.raises(ValueError, match=r"bayesian-torch layers .*, got Sequential without any; convert"):
        bayesian_torch.from_mean_field(network(), Categorical())


# outputs with logits


class WithLogits(nn.Module):
    """Looks like a Hugging Face classifier."""

    def __init__(self, wrap):
        super().__init__()
        self.body, self.classifier, self.wrap = nn.Embedding(11, 4), nn.Linear(4, 3), wrap

    def forward(self, tokens):
        return self.wrap(self.classifier(self.body(tokens).mean(1)))


@pytest.mark.parametrize("wrap", [lambda z: SimpleNamespace(logits=z), lambda z: OrderedDict(loss=None, logits=z)])
def test_outputs_with_logits(wrap):
    model, x, y = WithLogits(wrap), torch.randint(11, (60, 5)), torch.arange(60) % 3
    plain = copy.deepcopy(model)
    plain.wrap = nn.Identity()
    torch.testing.assert_close(map_posterior.point(model, Categorical()).outputs(x)[0], plain(x))
    fitted = map_posterior.fit(model, Categorical(), (x, y), epochs=2)
    assert fitted.outputs(x).shape == (1, 60, 3)
    calibrated = dapcal.calibrate(
        dapcal.posteriors.variational.fit(model, Categorical(), (x, y), epochs=2),
        train=(x, y),
        held_out=(x.flip(1), y),
        distance=dapcal.distances.Space(dapcal.distances.projectors.Features("classifier")),
    )
    assert calibrated(x).probs.shape == (60, 3)
