"""Outputs linear in Gaussian parameters: moments and their growth with the distance, against dense brute force."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cases import doubles
from dapcal import moments
from dapcal.adjust import Inflate, Transport
from dapcal.ensembles import closed_ensemble, seen
from dapcal.gaussians import DiagonalGaussian, FullGaussian, KroneckerGaussian
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, MeanAndNoise, NoiseHead
from dapcal.moments import OutputMoments, Profile, joined, make_pieces
from dapcal.posteriors import gaussian, laplace, linear
from dapcal.posteriors._curvature import sums as curvature_sums
from dapcal.posteriors.linear import LastLayer, Linearised
from dapcal.prior import make_prior

STRUCTURES = {"full": laplace.Full, "kronecker": laplace.Kronecker, "diagonal": laplace.Diagonal}
METHODS = {"fit": laplace.fit, "last layer": laplace.last_layer}
LIKELIHOODS = {
    "categorical": (Categorical(1.3), 3),
    "bernoulli": (Bernoulli(0.8), 1),
    "gaussian": (Gaussian(0.4), 2),
    "noise head": (NoiseHead(), 2),
}
DISTANCES = [0.0, 1e-3, 0.2, 1.0, 30.0]
every_posterior = pytest.mark.parametrize(
    ("method", "structure", "kind"), [(m, s, k) for m in METHODS for s in STRUCTURES for k in LIKELIHOODS]
)
each_structure = pytest.mark.parametrize(("method", "structure"), [(m, s) for m in METHODS for s in STRUCTURES])


def inputs(n: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def targets(likelihood, n: int, outputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if isinstance(likelihood, Categorical | Bernoulli):
        return torch.randint(0, max(outputs, 2), (n,), generator=generator)
    columns = outputs // 2 if isinstance(likelihood, NoiseHead) else outputs
    return torch.randn(n, columns, generator=generator, dtype=torch.float64)


def mlp(outputs: int, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


@functools.cache
def posterior_of(method: str, structure: str, kind: str, **options):
    """A Laplace approximation of a small network; of a noise head only the mean network is distance-aware."""
    likelihood, outputs = LIKELIHOODS[kind]
    model, aware = mlp(outputs), "*"
    if kind == "noise head" and method == "fit":
        model, aware = MeanAndNoise(mlp(1), mlp(1, seed=1)), "mean.*"
    train = inputs(12), targets(likelihood, 12, outputs)
    settings = {"structure": STRUCTURES[structure], "prior_scale": 1.2, "aware": aware, **options}
    return METHODS[method](model, likelihood, train, **settings)


def covariance_of(gaussian) -> Tensor:
    root = root_of(gaussian)
    return root.T @ root


def root_of(gaussian) -> Tensor:
    """Rows r with Σ = Σ_i r_i r_iᵀ."""
    if isinstance(gaussian, FullGaussian):
        return torch.linalg.cholesky(gaussian.covariance).T
    own = torch.diag(gaussian.variance.sqrt())
    return own if isinstance(gaussian, DiagonalGaussian) else gaussian.rotated(own, back=True)


def jacobian_of(posterior, x: Tensor) -> Tensor:
    """∂ outputs/∂ random parameters at the center, input by input and output by output, (N, C, P)."""
    network = posterior.network
    own = [dict(network.named_parameters())[name] for name in posterior.layout.names]

    def row(value: Tensor) -> Tensor:
        gradients = torch.autograd.grad(value, own, retain_graph=True, materialize_grads=True, allow_unused=True)
        return torch.cat([g.flatten() for g in gradients])

    return torch.stack([torch.stack([row(value) for value in network(one[None])[0]]) for one in x])


def pooled_by_hand(likelihood, covariance: Tensor) -> Tensor:
    """The numbers whose growth counts, from covariances (N, C, C) of the outputs."""
    if isinstance(likelihood, Categorical):
        classes = covariance.shape[-1]
        center = torch.eye(classes, dtype=torch.float64) - 1 / classes
        return (center @ covariance @ center).diagonal(dim1=1, dim2=2).mean(-1, keepdim=True)
    variance = covariance.diagonal(dim1=1, dim2=2)
    if isinstance(likelihood, Bernoulli):
        return variance / 4
    return variance[:, :1] if isinstance(likelihood, NoiseHead) else variance


def moved_by_hand(posterior, x: Tensor, d: float) -> Tensor:
    """J (Σ⁻¹ − C)⁻¹ Jᵀ with C from its definition, pooled."""
    sigma0, factor = (t[posterior.prior.group] for t in (posterior.prior.sigma0, posterior.prior.factor))
    c = torch.diag(1 / sigma0**2 - 1 / (sigma0 + factor * d) ** 2)
    moved = torch.linalg.inv(torch.linalg.inv(covariance_of(posterior.gaussian)) - c)
    jacobian = jacobian_of(posterior, x)
    return pooled_by_hand(posterior.likelihood, jacobian @ moved @ jacobian.transpose(1, 2))


# Growth with the distance is kept at nodes.


def single_directions(ratio: Tensor, sigma0: float) -> OutputMoments:
    """One input for each direction, with variance ρ σ0² along that alone."""
    variance = ratio * sigma0**2
    pieces = make_pieces(variance, sigma0)
    weights = pieces.gather(torch.diag(variance)[:, None])
    return OutputMoments(
        mean=variance[:, None],
        variance=variance[:, None],
        profiles=(Profile(0, weights, pieces.nodes),),
        prior=make_prior({"w": 1}, sigma0),
    )


@pytest.mark.parametrize("sigma0", [1 / 32, 1.0, 16.0])  # powers of two: ρ σ0² is exact
def test_nodes_interpolate_to_nine_digits(sigma0):
    below = torch.logspace(-12, -1e-3, 200, dtype=torch.float64)
    ratio = torch.cat([below, 1 - below.flip(0)])
    prepared = single_directions(ratio, sigma0)
    for d in torch.logspace(-6, 8, 57, dtype=torch.float64) * sigma0:
        q = (sigma0 / (sigma0 + d)) ** 2
        expected = ratio * sigma0**2 / ((1 - ratio) + ratio * q)  # λ/(1 − cλ) without cancellation
        torch.testing.assert_close(prepared.moved(d.expand(len(ratio)))[:, 0], expected, rtol=1e-9, atol=0)


def test_directions_of_the_prior_alone_grow_as_it_does():
    """ρ = 1, or more by rounding: k² up to where 1/k² is lost against a rounding error of ρ."""
    prepared = single_directions(doubles([1.0, 1.5]), 1.0)
    for k in (1.0001, 3.0, 1e3, 1e5):
        growth = prepared.moved(doubles([k - 1, k - 1]))[:, 0] / prepared.variance[:, 0]
        torch.testing.assert_close(growth, torch.full_like(growth, k**2), rtol=1e-9 + 3e-16 * k**2, atol=0)
    assert prepared.moved(doubles([1e300, 1e300])).isfinite().all()


def test_no_variance_stays_none():
    prepared = single_directions(doubles([0.0, 0.5]), 1.0)
    assert prepared.moved(doubles([7.0, 7.0]))[0, 0] == 0


def test_rows_of_pieces_are_what_gather_does():
    variance = torch.logspace(-9, 0, 40, dtype=torch.float64)[
        torch.randperm(40, generator=torch.Generator().manual_seed(0))
    ]
    pieces = make_pieces(variance, 1.1)
    assert torch.equal(pieces.rows(0, 40), pieces.gather(torch.eye(40, dtype=torch.float64)))
    assert torch.equal(pieces.rows(7, 19), pieces.rows(0, 40)[7:19])


def test_moments_of_batches_join():
    posterior, x = posterior_of("fit", "kronecker", "categorical"), inputs(7)
    whole, parts = posterior.moments(x, True), joined(posterior.moments(b, True) for b in x.split(3))
    d = torch.linspace(0, 4, 7)
    for one, two in ((whole.mean, parts.mean), (whole.variance, parts.variance), (whole.moved(d), parts.moved(d))):
        torch.testing.assert_close(one, two)


@each_structure
def test_unprepared_moments_are_not_moved(method, structure):
    with pytest.raises(ValueError, match="moving=True"):
        posterior_of(method, structure, "gaussian").moments(inputs(2)).moved(torch.ones(2))


def test_transport_without_a_prior_is_refused():
    posterior = replace(posterior_of("fit", "diagonal", "gaussian"), prior=None)
    assert posterior.moments(inputs(2)).variance.shape == (2, 2)
    with pytest.raises(ValueError, match="with_prior"):
        posterior.moments(inputs(2), moving=True)


def test_gaussians_without_directions_are_refused():
    posterior = replace(posterior_of("fit", "diagonal", "gaussian"), gaussian=object())
    with pytest.raises(TypeError, match="no closed form with object"):
        posterior.moments(inputs(2))


def test_draws_through_the_network_have_no_closed_form():
    posterior = laplace.fit(mlp(2), Gaussian(0.4), (inputs(5), inputs(5)), linearised=False)
    assert posterior.moments(inputs(2)) is None


# Moments against dense brute force.


@every_posterior
def test_moments_are_brute_force_at_any_distance(method, structure, kind):
    posterior, x = posterior_of(method, structure, kind), inputs(5, seed=8)
    prepared, plain = posterior.moments(x, moving=True), posterior.moments(x)
    torch.testing.assert_close(prepared.mean, posterior.network(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(prepared.variance, plain.variance)
    for d in DISTANCES:
        expected = moved_by_hand(posterior, x, d)
        torch.testing.assert_close(prepared.moved(doubles([d]).expand(5)), expected, rtol=1e-8, atol=1e-12)
    each = torch.stack([moved_by_hand(posterior, x[i : i + 1], d)[0] for i, d in enumerate(DISTANCES)])
    torch.testing.assert_close(prepared.moved(doubles(DISTANCES)), each, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
@pytest.mark.parametrize("method", METHODS)
def test_several_groups(method, structure):
    """Weight and bias with scales and factors of their own."""
    options = {"prior_scale": {"*.bias": 0.5, "*": 1.2}, "aware": {"*.bias": 2.0, "2.weight": 1.0, "*": 0.0}}
    likelihood, outputs = LIKELIHOODS["categorical"]
    options["aware"] = options["aware"] if method == "fit" else {"*.bias": 2.0, "2.weight": 1.0}
    train = inputs(12), targets(likelihood, 12, outputs)
    posterior = METHODS[method](mlp(outputs), likelihood, train, structure=STRUCTURES[structure], **options)
    x, prepared = inputs(4, seed=8), posterior.moments(inputs(4, seed=8), moving=True)
    assert len(prepared.profiles) == 2
    for d in DISTANCES:
        torch.testing.assert_close(
            prepared.moved(doubles([d]).expand(4)), moved_by_hand(posterior, x, d), rtol=1e-8, atol=1e-12
        )


@pytest.mark.parametrize("method", METHODS)
def test_several_groups_of_a_full_covariance_say_what_to_do(method):
    aware = {"*.bias": 2.0, "*": 1.0}
    likelihood, outputs = LIKELIHOODS["categorical"]
    train = inputs(12), targets(likelihood, 12, outputs)
    posterior = METHODS[method](mlp(outputs), likelihood, train, structure=laplace.Full, aware=aware)
    with pytest.raises(ValueError, match=r"one distance-aware group, got 2; use Transport\(drawn=True\)"):
        Transport()(posterior, inputs(3))
    assert Inflate()(posterior, inputs(3))(torch.ones(3)).spread.isfinite().all()
    assert Transport(drawn=True)(posterior, inputs(3))(torch.full((3,), 0.1)).outputs.isfinite().all()


def test_a_last_layer_without_bias():
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    train = inputs(12), targets(Categorical(), 12, 3)
    for structure in STRUCTURES.values():
        posterior = laplace.last_layer(model, Categorical(), train, structure=structure)
        assert posterior.linear == LastLayer("2", bias=False)
        prepared = posterior.moments(inputs(4), moving=True)
        torch.testing.assert_close(prepared.moved(doubles([1.5] * 4)), moved_by_hand(posterior, inputs(4), 1.5))


def test_blocks_of_another_layer_are_refused():
    posterior = posterior_of("last layer", "kronecker", "gaussian")
    block = posterior.gaussian.blocks[0]
    turned = replace(block, index=block.index.T.contiguous(), left=block.right, right=block.left)
    other = KroneckerGaussian(posterior.gaussian.mean, posterior.gaussian.variance, (turned,))
    with pytest.raises(ValueError, match="whole columns of the last layer"):
        replace(posterior, gaussian=other).moments(inputs(2))


# Outputs of draws.


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_linearised_outputs_are_the_first_order_expansion(structure, kind):
    posterior, x = posterior_of("fit", structure, kind), inputs(5, seed=8)
    deviation = posterior.draws - posterior.center
    expected = posterior.network(x) + torch.einsum("ncp,sp->snc", jacobian_of(posterior, x), deviation)
    torch.testing.assert_close(posterior.outputs(x), expected.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_last_layer_outputs_are_those_of_the_networks(structure, kind):
    posterior, x = posterior_of("last layer", structure, kind), inputs(5, seed=8)
    through = replace(posterior, linear=None)  # draw by draw through the whole network
    torch.testing.assert_close(posterior.outputs(x), through.outputs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_linear_model_is_its_own_expansion(structure):
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3)).double()
    train = inputs(12), targets(Categorical(), 12, 3)
    fits = [
        laplace.fit(model, Categorical(), train, structure=STRUCTURES[structure], linearised=True),
        laplace.fit(model, Categorical(), train, structure=STRUCTURES[structure], linearised=False),
        laplace.last_layer(model, Categorical(), train, structure=STRUCTURES[structure]),
    ]
    assert [type(f.linear) for f in fits] == [Linearised, type(None), LastLayer]
    one, two = (f.outputs(inputs(6, seed=8)) for f in fits[:2])
    torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(fits[0].moments(inputs(6)).variance, fits[2].moments(inputs(6)).variance)


class Branching(nn.Module):
    """Two heads, chosen for every input by its first coordinate."""

    def __init__(self, vectorises: bool) -> None:
        super().__init__()
        self.vectorises = vectorises
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.left, self.right = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        if self.vectorises:
            return torch.where(x[:, :1] > 0, self.left(h), self.right(h))
        return torch.stack([self.left(b) if a[0] > 0 else self.right(b) for a, b in zip(x, h, strict=True)])


def test_layers_that_run_for_some_inputs_have_no_factors():
    with pytest.raises(ValueError, match=r"`(left|right)` to run once .*laplace.Full or laplace.Diagonal"):
        laplace.fit(Branching(False).double(), Gaussian(0.4), (inputs(10), inputs(10, seed=4)))


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_models_that_do_not_vectorise_give_the_same(structure):
    train, x = (inputs(10), inputs(10, seed=4)), inputs(6, seed=8)
    one, two = (
        laplace.fit(Branching(v).double(), Gaussian(0.4), train, structure=STRUCTURES[structure]) for v in (True, False)
    )
    if structure == "diagonal":
        torch.testing.assert_close(two.draws, one.draws)
    else:  # its draws turn with eigenvectors, whose signs are free
        torch.testing.assert_close(two.gaussian.mean, one.gaussian.mean)
        torch.testing.assert_close(two.gaussian.covariance, one.gaussian.covariance)
    d = torch.linspace(0, 3, 6)
    torch.testing.assert_close(two.moments(x, True).moved(d), one.moments(x, True).moved(d))


# What must not matter.


def everything(posterior, x: Tensor) -> list[Tensor]:
    prepared = posterior.moments(x, moving=True)
    return [posterior.outputs(x), prepared.mean, prepared.variance, prepared.moved(torch.linspace(0, 5, len(x)))]


@each_structure
def test_memory_changes_nothing(method, structure, monkeypatch):
    x, wide = inputs(9, seed=8), posterior_of(method, structure, "categorical")
    expected = everything(wide, x)
    monkeypatch.setattr(linear, "MEMORY", 1)
    monkeypatch.setattr(curvature_sums, "MEMORY", 1)
    for value, other in zip(everything(wide, x), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-11, atol=1e-12)
    narrow = posterior_of.__wrapped__(method, structure, "categorical", batch_size=5)
    torch.testing.assert_close(covariance_of(narrow.gaussian), covariance_of(wide.gaussian), rtol=1e-10, atol=1e-12)


@each_structure
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_inputs_do_not_touch_each_other(method, structure, kind):
    posterior, x = posterior_of(method, structure, kind), inputs(9, seed=8)
    d = torch.linspace(0, 5, 9)
    whole = posterior.moments(x, True)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    shuffled = posterior.moments(x[order], True)
    torch.testing.assert_close(shuffled.variance, whole.variance[order], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shuffled.moved(d[order]), whole.moved(d)[order], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shuffled.mean, whole.mean[order], rtol=1e-12, atol=1e-14)
    for rows in (slice(0, 1), slice(1, 4)):
        part = posterior.moments(x[rows], True)
        torch.testing.assert_close(part.moved(d[rows]), whole.moved(d)[rows], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(posterior.outputs(x[rows]), posterior.outputs(x)[:, rows], rtol=1e-12, atol=1e-14)


@each_structure
def test_single_precision_is_close(method, structure):
    likelihood, outputs = LIKELIHOODS["categorical"]
    exact = posterior_of(method, structure, "categorical")
    train = inputs(12, dtype=torch.float32), targets(likelihood, 12, outputs)
    settings = {"structure": STRUCTURES[structure], "prior_scale": 1.2}
    single = METHODS[method](mlp(outputs).float(), likelihood, train, **settings)
    x, d = inputs(5, seed=8), torch.linspace(0, 5, 5)
    one, two = single.moments(x.float(), True), exact.moments(x, True)
    assert single.draws.dtype == single.outputs(x.float()).dtype == one.mean.dtype == torch.float32
    assert one.variance.dtype == one.moved(d).dtype == torch.float64
    torch.testing.assert_close(one.moved(d), two.moved(d), rtol=2e-4, atol=0)
    torch.testing.assert_close(one.mean.double(), two.mean, rtol=1e-5, atol=1e-6)


def assert_the_same_in_inference_mode(posterior, x: Tensor) -> None:
    """Also for inputs and parameters that were made inside it, and outside of it again."""
    expected = everything(posterior, x)
    with torch.inference_mode():
        made = replace(posterior, center=posterior.center.clone(), draws=posterior.draws.clone())
        inside = x.clone()
        found = [*everything(posterior, x), *everything(made, inside)]
    found += everything(made, inside)
    for value, other in zip(found, 3 * expected, strict=True):
        assert torch.equal(value, other)
    assert not any(value.requires_grad for value in [*expected, *found])


@each_structure
def test_inference_mode_changes_nothing(method, structure):
    assert_the_same_in_inference_mode(posterior_of(method, structure, "categorical"), inputs(5, seed=8))


def test_inference_mode_changes_nothing_where_a_model_does_not_vectorise():
    train = inputs(10), inputs(10, seed=4)
    posterior = laplace.fit(Branching(False).double(), Gaussian(0.4), train, structure=laplace.Full)
    assert_the_same_in_inference_mode(posterior, inputs(5, seed=8))


# The closed forms of Inflate and Transport.


def with_exact_draws(posterior):
    """2P draws μ ± √P r_i, whose mean and covariance are exactly those of the Gaussian."""
    rows = root_of(posterior.gaussian) * len(posterior.center) ** 0.5
    return replace(posterior, draws=torch.cat([posterior.center + rows, posterior.center - rows]))


def location_variance(likelihood, outputs: Tensor) -> Tensor:
    return likelihood.pooled(likelihood.locations(outputs).var(0, correction=0))


@every_posterior
def test_closed_transport_is_that_of_the_draws(method, structure, kind):
    posterior, x = posterior_of(method, structure, kind), inputs(5, seed=8)
    drawn = with_exact_draws(posterior)
    torch.testing.assert_close(torch.cov(drawn.draws.T, correction=0), covariance_of(posterior.gaussian))
    moved = Transport(step=None, drawn=True)(drawn, x)(doubles(DISTANCES))
    assert len(moved.outputs) == len(drawn.draws)
    expected = posterior.moments(x, moving=True).moved(doubles(DISTANCES))
    torch.testing.assert_close(location_variance(posterior.likelihood, moved.outputs), expected, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(moved.outputs.mean(0), posterior.moments(x).mean, rtol=1e-9, atol=1e-9)


@each_structure
def test_closed_transport_is_that_of_many_draws(method, structure):
    posterior, x = posterior_of(method, structure, "categorical", draws=20_000), inputs(5, seed=8)
    moved = Transport(step=None, drawn=True)(posterior, x)(doubles(DISTANCES))
    found = location_variance(posterior.likelihood, moved.outputs)
    # a variance of Gaussians has a relative standard error of at most √(2/S) = 0.01
    torch.testing.assert_close(found, posterior.moments(x, True).moved(doubles(DISTANCES)), rtol=0.05, atol=0)


@every_posterior
def test_distance_zero_is_the_base_posterior(method, structure, kind):
    posterior, x = posterior_of(method, structure, kind), inputs(5, seed=8)
    likelihood, base = posterior.likelihood, seen(posterior, x)
    for adjust in (Inflate(), Transport()):
        adjusted = adjust(posterior, x)
        for d, rows in ((torch.zeros(5), slice(None)), (doubles([0.0, 0.0, 2.0, 9.0, 0.0]), [0, 1, 4])):
            ensemble = adjusted(d)
            assert torch.equal(ensemble.outputs, base.outputs)
            assert torch.equal(ensemble.spread[rows], base.spread[rows])
            for statistic in (likelihood.mean, likelihood.variance, likelihood.entropy, likelihood.aleatoric):
                assert torch.equal(statistic(ensemble)[rows], statistic(base)[rows])


@every_posterior
def test_transport_grows_with_the_distance_inside_the_envelope(method, structure, kind):
    """V <= Transport <= k² V, and k² V is Inflate."""
    posterior, x = posterior_of(method, structure, kind), inputs(5, seed=8)
    inflate, transport = Inflate()(posterior, x), Transport()(posterior, x)
    base = seen(posterior, x).spread
    before = base
    assert (base > 0).all()
    for d in (1e-9, 1e-3, 0.1, 1.0, 10.0, 1e4, 1e8, 1e150):
        distance = torch.full((5,), d, dtype=torch.float64)
        wide, exact = inflate(distance).spread, transport(distance).spread
        assert wide.isfinite().all()
        assert exact.isfinite().all()
        k2 = (1 + d * posterior.prior.lead) ** 2
        torch.testing.assert_close(wide, base * k2)
        assert (exact >= before * (1 - 1e-12)).all()
        assert (exact <= wide * (1 + 1e-9)).all()
        assert d < 0.1 or (exact > base).all()
        before = exact


@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
@each_structure
def test_the_most_likely_class_stays(method, structure, kind):
    posterior, x = posterior_of(method, structure, kind), 3 * inputs(50, seed=8)
    likelihood, labels = posterior.likelihood, posterior.likelihood.class_logits(posterior.network(x)).argmax(-1)
    for adjust in (Inflate(), Transport()):
        before = None
        for d in (0.0, 0.1, 3.0, 1e3):
            probability = likelihood.mean(adjust(posterior, x)(torch.full((50,), d, dtype=torch.float64)))
            assert torch.equal(probability.argmax(-1), labels)
            torch.testing.assert_close(probability.sum(-1), torch.ones(50, dtype=torch.float64))
            assert before is None or (probability.max(-1).values <= before + 1e-12).all()
            before = probability.max(-1).values


def test_one_draw_is_enough_for_closed_forms():
    posterior, x = posterior_of("fit", "full", "categorical", draws=1), inputs(3)
    for adjust in (Inflate(), Transport()):
        assert adjust(posterior, x)(torch.ones(3)).spread.isfinite().all()
    for adjust in (Inflate(drawn=True), Transport(drawn=True), Transport(shift=True)):
        with pytest.raises(ValueError, match="single network"):
            adjust(posterior, x)


def test_shifting_the_mean_needs_draws():
    """The mean of draws moved to (Σ⁻¹ − C)⁻¹ Σ⁻¹ μ, which the closed form does not follow."""
    posterior, x = with_exact_draws(posterior_of("last layer", "full", "gaussian")), inputs(3)
    outputs = Transport(shift=True, step=None)(posterior, x)(doubles([1.0] * 3)).outputs
    sigma0 = posterior.prior.sigma0
    precision = torch.linalg.inv(posterior.gaussian.covariance)
    c = 1 / sigma0**2 - 1 / (sigma0 + 1) ** 2
    center = torch.linalg.solve(precision - c * torch.eye(len(precision)), precision @ posterior.center)
    expected = posterior.outputs_at(center[None], x)[0]
    torch.testing.assert_close(outputs.mean(0), expected, rtol=1e-9, atol=1e-9)


def test_a_closed_ensemble_is_one_draw_at_the_mean():
    posterior, x = posterior_of("fit", "full", "gaussian"), inputs(4)
    found = posterior.moments(x)
    ensemble = closed_ensemble(posterior.likelihood, found)
    assert torch.equal(ensemble.outputs, found.mean[None])
    torch.testing.assert_close(ensemble.spread, found.variance)
    torch.testing.assert_close(posterior.likelihood.variance(ensemble), found.variance + 0.4**2)
    torch.testing.assert_close(posterior.likelihood.mean(ensemble), found.mean)
    draws = replace(posterior, linear=None)
    assert len(seen(draws, x).outputs) == len(seen(posterior, x, drawn=True).outputs) == 50


def test_posteriors_of_draws_alone_are_untouched():
    """No linear outputs: adjustments look at draws, whatever `drawn` says."""
    model = mlp(2)
    deviations = {n: torch.full_like(p, 0.1) for n, p in model.named_parameters()}
    posterior = gaussian.diagonal(model, Gaussian(0.4), deviations, draws=20)
    ensemble = Transport()(posterior, inputs(3))(torch.ones(3))
    assert ensemble.outputs.shape == (20, 3, 2)
    assert not ensemble.spread.any()
    assert moments.aware_groups(posterior.prior) == [0]
