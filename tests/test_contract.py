"""One contract for every posterior, every likelihood and every adjustment.

A posterior is a row of `POSTERIORS`: how it is fitted, and what it offers to adjustments. Networks are tiny and their
training is short: the contract is tested, not the quality. Only what can interact is crossed:

- Fitting meets the likelihood (its gradients, its curvature), so what a posterior is is asked of every posterior with
  every likelihood. Where both kinds of task take the same way (precision, order, global state), one likelihood of each
  kind is enough, and where a likelihood has no say (seeds, refusals), one in turn.
- An adjustment sees draws, their norms under a prior, the moments of a Gaussian or closed-form outputs, never how they
  were obtained. Posteriors that look alike to it are one of `VIEWS`. Draws, norms, a Gaussian and a closed form
  (`CROSSED`) meet every adjustment with every likelihood: d = 0, proper distributions, monotonicity. The other
  structures of a Gaussian meet every adjustment too, with the likelihoods in turn.
- What is saved is saved part by part: every posterior is saved once, and every adjustment with what it sees, so that
  each likelihood is saved many times. A search for φ sees an adjustment and a likelihood, not a Gaussian's structure.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dapcal
from dapcal.adjust import (
    ClosedForm,
    Inflate,
    MomentMatched,
    PriorMonteCarlo,
    Revert,
    Reweight,
    SelfNormalised,
    Transport,
    Unchanged,
)
from dapcal.calibrate import Calibrated
from dapcal.distances import Space
from dapcal.distances.projectors import Features, Identity
from dapcal.ensembles import seen
from dapcal.gaussians import DiagonalGaussian, FullGaussian, KroneckerGaussian, LowRankGaussian
from dapcal.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MeanAndNoise,
    MultiLabel,
    NoiseHead,
    Unconditional,
)
from dapcal.moving import moved
from dapcal.networks.forest_layout import Draw, Tree, forest
from dapcal.posteriors import dropout, ensemble, gaussian, hmc, laplace, samples, sgmcmc, swag, variational, vogn
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.linear import LastLayer, Linearised
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.predictions import StackedPredictions
from dapcal.posteriors.trees import TreePosterior
from dapcal.predictive import Prediction
from dapcal.types import Ensemble, Posterior

pytestmark = [
    pytest.mark.filterwarnings("ignore:The importance weights have collapsed"),
    pytest.mark.filterwarnings("ignore:No distance improves the calibration loss"),
    pytest.mark.filterwarnings("ignore:The calibration loss still falls"),
]

DRAWS = 26  # Pareto smoothing needs 25
FEW = 8  # where a draw takes steps of its own
MEMBERS = 4
SIGMA0 = 0.8
DISTANCES = (0.0, 1e-3, 1.0, 30.0, 1e6)


class Place(NamedTuple):
    """Where a model and its data are."""

    dtype: torch.dtype
    device: str = "cpu"


SINGLE, DOUBLE, GPU = Place(torch.float32), Place(torch.float64), Place(torch.float32, "cuda")


def inputs(n: int, seed: int, place: Place = SINGLE) -> Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(*place[::-1])


# Likelihoods.


def body(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, outputs))


class Case(NamedTuple):
    """A likelihood with a network for it; `one_head` is one with a single last layer."""

    likelihood: Likelihood
    outputs: int
    columns: int  # of the predictive mean: classes or targets
    model: Callable[[], nn.Module]
    one_head: Callable[[], nn.Module]
    aware: str = "*"


CASES = {
    "categorical": Case(Categorical(), 3, 3, lambda: body(3), lambda: body(3)),
    "bernoulli": Case(Bernoulli(), 1, 2, lambda: body(1), lambda: body(1)),
    "multi-label": Case(MultiLabel(), 2, 2, lambda: body(2), lambda: body(2)),
    "gaussian": Case(Gaussian(0.5), 1, 1, lambda: body(1), lambda: body(1)),
    "noise head": Case(NoiseHead(), 2, 1, lambda: MeanAndNoise(body(1), body(1)), lambda: body(2), "mean.*"),
}
CLASSES, LABELS, TARGETS = ("categorical", "bernoulli"), ("multi-label",), ("gaussian", "noise head")


def made(make: Callable[[], nn.Module], seed: int, place: Place = SINGLE) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(*place[::-1])


def data(kind: str, seed: int, n: int = 48, place: Place = SINGLE) -> tuple[Tensor, Tensor]:
    x = inputs(n, seed, place)
    signal = 1.5 * x[:, 0] - x[:, 1] + 0.5 * inputs(n, seed + 100, place)[:, 0]
    if kind in TARGETS:
        return x, torch.tanh(signal)
    if kind in LABELS:
        return x, torch.stack([signal > 0, signal.abs() > 1], 1).long()
    return x, torch.bucketize(signal, torch.tensor([-1.0, 1.0] if kind == "categorical" else [0.0]).to(signal))


# Posteriors.


class Problem(NamedTuple):
    """What a posterior is fitted to: a trained network, and options that most fits have."""

    case: Case
    model: nn.Module
    likelihood: Likelihood
    train: tuple[Tensor, Tensor]
    place: Place
    seed: int
    options: dict

    @property
    def members(self) -> list[nn.Module]:
        """Networks of other weights, which stand for a trained ensemble."""
        return [self.model, *(made(self.case.model, 10 + m, self.place) for m in range(MEMBERS - 1))]


class Row(NamedTuple):
    """How a posterior is fitted, and what it offers: a Gaussian, draws with a prior, or draws alone."""

    fit: Callable[[Problem], Posterior]
    offers: str  # "gaussian", "prior" or "draws"
    count: int = DRAWS
    linear: type | None = None  # outputs linear in the parameters, with closed-form moments
    diagonal: bool = False  # the Gaussian's structure
    one_head: bool = False  # needs a single last layer
    seeded: bool = True  # draws follow a seed; else they are brought
    network: bool = True


def by(fit: Callable[..., Posterior], **more) -> Callable[[Problem], Posterior]:
    return lambda p: fit(p.model, p.likelihood, p.train, **more, **p.options)


def fit_ensemble(p: Problem) -> Posterior:
    def make() -> nn.Module:
        return p.case.model().to(*p.place[::-1])

    return ensemble.fit(make, p.likelihood, p.train, members=MEMBERS, seed=p.seed, **QUICK)


def given_diagonal(p: Problem) -> Posterior:
    scale = {n: 0.1 + 0.05 * t.abs() for n, t in p.model.state_dict().items()}
    return gaussian.diagonal(p.model, p.likelihood, scale, **p.options)


def given_full(p: Problem) -> Posterior:
    size = sum(t.numel() for t in p.model.parameters())
    root = torch.randn(size, size, generator=torch.Generator().manual_seed(3)).to(p.train[0])
    covariance = 0.1 * root @ root.T / size + 0.01 * torch.eye(size).to(root)
    return gaussian.full(p.model, p.likelihood, covariance, [n for n, _ in p.model.named_parameters()], **p.options)


def brought(p: Problem, **options) -> Posterior:
    return samples.from_state_dicts(p.model, p.likelihood, [m.state_dict() for m in p.members], **options)


def trees_like_members(p: Problem) -> Posterior:
    """A tree for each network, which predicts its mean outputs on both sides of a threshold."""
    x, outputs = p.train[0], brought(p).outputs(p.train[0])
    is_left = x[:, 0] <= x[:, 0].median()
    draws = []
    for own in outputs.double().cpu():
        value = torch.stack([own[0], own[is_left.cpu()].mean(0), own[~is_left.cpu()].mean(0)]).numpy()
        places = (np.array([1, 0, 0]), np.array([2, 0, 0]), np.zeros(3, bool))
        tree = Tree(np.zeros(3, np.int64), np.full(3, float(x[:, 0].median())), *places, value)
        draws.append(Draw([tree], np.zeros(value.shape[1]), "numbers"))
    return moved(TreePosterior(forest(draws, x.dtype), p.likelihood, "numbers", 0.01), x.device)


QUICK = {"epochs": 3, "batch_size": 16, "learning_rate": 0.01}
CHAIN = {**QUICK, "cycles": 1, "exploration": 0.0}
NUTS = {"warm_up": 8, "max_tree_depth": 3, "target_accept": 0.95}
FIT, LAST = laplace.fit, laplace.last_layer

# adding a posterior = adding a row
POSTERIORS: dict[str, Row] = {
    "variational": Row(by(variational.fit, **QUICK), "gaussian", diagonal=True),
    "flipout": Row(by(variational.fit, flipout=True, **QUICK), "gaussian", diagonal=True),
    "vogn": Row(by(vogn.fit, **QUICK), "gaussian", diagonal=True),
    "laplace diagonal": Row(by(FIT, structure=laplace.Diagonal), "gaussian", linear=Linearised, diagonal=True),
    "laplace kronecker": Row(by(FIT, structure=laplace.Kronecker), "gaussian", linear=Linearised),
    "laplace full": Row(by(FIT, structure=laplace.Full), "gaussian", linear=Linearised),
    "laplace diagonal sampled": Row(by(FIT, structure=laplace.Diagonal, linearised=False), "gaussian", diagonal=True),
    "laplace kronecker sampled": Row(by(FIT, structure=laplace.Kronecker, linearised=False), "gaussian"),
    "laplace full sampled": Row(by(FIT, structure=laplace.Full, linearised=False), "gaussian"),
    "last layer full": Row(by(LAST, structure=laplace.Full), "gaussian", linear=LastLayer, one_head=True),
    "last layer kronecker": Row(by(LAST, structure=laplace.Kronecker), "gaussian", linear=LastLayer, one_head=True),
    "last layer diagonal": Row(
        by(LAST, structure=laplace.Diagonal), "gaussian", linear=LastLayer, diagonal=True, one_head=True
    ),
    "swag": Row(by(swag.fit, rank=3, start=0.0, **{**QUICK, "learning_rate": 0.05}), "gaussian"),
    "dropout": Row(lambda p: dropout.wrap(p.model, p.likelihood, draws=FEW, seed=p.seed), "draws", FEW),
    "ensemble": Row(fit_ensemble, "draws", MEMBERS),
    "ensemble of networks": Row(lambda p: ensemble.of(p.members, p.likelihood), "draws", MEMBERS, seeded=False),
    "sgld": Row(by(sgmcmc.sgld, **CHAIN), "prior", FEW),
    "sghmc": Row(by(sgmcmc.sghmc, **CHAIN), "prior", FEW),
    "nuts": Row(by(hmc.fit, **NUTS), "prior", FEW),
    "given diagonal": Row(given_diagonal, "gaussian", diagonal=True),
    "given full": Row(given_full, "gaussian"),
    "state dicts": Row(brought, "draws", MEMBERS, seeded=False),
    "state dicts with a prior": Row(
        lambda p: brought(p, prior_scale=SIGMA0, aware=p.options["aware"]), "prior", MEMBERS, seeded=False
    ),
    "stacked predictions": Row(
        lambda p: StackedPredictions(brought(p).outputs, p.likelihood), "draws", MEMBERS, seeded=False, network=False
    ),
    "trees": Row(trees_like_members, "draws", MEMBERS, seeded=False, network=False),
}

# a posterior for each way in which an adjustment can see one; the first four stand for draws, draws with a prior, a
# Gaussian and a closed form, the others for further structures
CROSSED = ("ensemble of networks", "state dicts with a prior", "given diagonal", "last layer full")
VIEWS = (
    *CROSSED, "given full", "laplace kronecker sampled", "swag", "laplace diagonal", "laplace kronecker",
    "laplace full", "last layer kronecker", "last layer diagonal",
)  # fmt: skip


@functools.cache
def problem(kind: str, one_head: bool, place: Place = SINGLE) -> Problem:
    case = CASES[kind]
    model, train = made(case.one_head if one_head else case.model, 0, place), data(kind, 1, place=place)
    found = map_posterior.fit(model, case.likelihood, train, epochs=40, batch_size=48, learning_rate=0.05)
    options = {"prior_scale": SIGMA0, "aware": "*" if one_head else case.aware}
    return Problem(case, found.network, found.likelihood, train, place, 0, options)


def fit(name: str, kind: str, place: Place = SINGLE, seed: int = 0) -> Posterior:
    row = POSTERIORS[name]
    own = problem(kind, row.one_head, place)
    return row.fit(own._replace(seed=seed, options={**own.options, "seed": seed, "draws": row.count}))


@functools.cache
def fitted(name: str, kind: str, place: Place = SINGLE) -> Posterior:
    return fit(name, kind, place)


# Adjustments.


class Rule(NamedTuple):
    """An adjustment, what it needs of a posterior, and what it promises."""

    adjust: Inflate | MomentMatched | Revert | Reweight | Transport | Unchanged
    needs: tuple[str, ...]
    proper: bool = True  # the prediction is a distribution at every distance
    kinds: tuple[str, ...] = tuple(CASES)  # likelihoods it is for
    diagonal: bool = False  # for diagonal Gaussians alone
    exact: bool = True  # d = 0 gives back every field of the base ensemble to the last bit
    keeps_mean: bool = True  # of targets, in closed form


ANY, PRIOR, MOMENTS = ("draws", "prior", "gaussian"), ("prior", "gaussian"), ("gaussian",)
ADJUSTMENTS = {
    "inflate": Rule(Inflate(), ANY),
    "inflate drawn": Rule(Inflate(drawn=True), ANY),
    "reweight": Rule(Reweight(), MOMENTS, proper=False),
    "reweight smooth": Rule(Reweight(smooth=True), MOMENTS, proper=False),
    "reweight normalise": Rule(Reweight(normalise=True), MOMENTS, exact=False),
    "reweight complete": Rule(Reweight(complete=True), MOMENTS, kinds=(*CLASSES, *LABELS), exact=False),
    "self-normalised": Rule(Reweight(SelfNormalised()), PRIOR),
    "self-normalised complete": Rule(
        Reweight(SelfNormalised(), complete=True), PRIOR, kinds=(*CLASSES, *LABELS), exact=False
    ),
    "matched": Rule(MomentMatched(), MOMENTS, proper=False, diagonal=True),
    "matched normalise": Rule(MomentMatched(normalise=True), MOMENTS, diagonal=True, exact=False),
    "transport": Rule(Transport(), MOMENTS),
    "transport drawn": Rule(Transport(drawn=True), MOMENTS),
    "transport shift": Rule(Transport(shift=True), MOMENTS),
    "revert": Rule(Revert(Unconditional((0.3,), (0.9,))), ANY, kinds=TARGETS, keeps_mean=False),
    "unchanged": Rule(Unchanged(), ANY),
}


def applies(row: Row, rule: Rule, kind: str) -> bool:
    return row.offers in rule.needs and kind in rule.kinds and (row.diagonal or not rule.diagonal)


def in_turn(kinds: tuple[str, ...], *places: int) -> str:
    """One likelihood for each posterior and adjustment, another for the next."""
    return kinds[sum(places) % len(kinds)]


def combinations(
    wanted: Callable[[Row, Rule], bool] = lambda row, rule: True, kinds=tuple(CASES), crossed=CROSSED, names=VIEWS
):
    """Adjustments with views of a posterior, and with every likelihood where the view is to be crossed."""
    found = []
    for (i, name), (j, (adjust, rule)) in itertools.product(enumerate(names), enumerate(ADJUSTMENTS.items())):
        row, possible = POSTERIORS[name], tuple(kind for kind in kinds if applies(POSTERIORS[name], rule, kind))
        if possible and wanted(row, rule):
            own = possible if name in crossed else (in_turn(possible, i, j),)
            found += [pytest.param(name, kind, adjust, id=f"{name}-{kind}-{adjust}") for kind in own]
    return pytest.mark.parametrize(("name", "kind", "adjust"), found)


def rows(wanted: Callable[[Row], bool] = lambda row: True, names=tuple(POSTERIORS)):
    return pytest.mark.parametrize("name", [name for name in names if wanted(POSTERIORS[name])])


def rows_in_turn(wanted: Callable[[Row], bool] = lambda row: True, names=tuple(POSTERIORS), kinds=(tuple(CASES),)):
    """Every posterior with one likelihood of each of `kinds`."""
    found = [
        pytest.param(name, in_turn(own, i), id=f"{name}-{in_turn(own, i)}")
        for i, name in enumerate(names)
        for own in kinds
        if wanted(POSTERIORS[name])
    ]
    return pytest.mark.parametrize(("name", "kind"), found)


BOTH_TASKS = (CLASSES, TARGETS)
every_kind = pytest.mark.parametrize("kind", CASES)


def constant(d: float, n: int) -> Tensor:
    return torch.full((n,), d, dtype=torch.float64)


def prediction_of(posterior: Posterior, adjusted: Callable[[Tensor], Ensemble], d: Tensor) -> Prediction:
    """What a user would see, at a given distance."""
    return Prediction(posterior.likelihood, adjusted(d), adjusted(0 * d), d, d, d, d)


def numbers(found: Ensemble) -> dict[str, Tensor]:
    return {"outputs": found.outputs, "log_weights": found.log_weights, "spread": found.spread} | dict(
        found.conditional._asdict()
    )


# What a posterior is.


@every_kind
@rows()
def test_it_is_a_posterior(name, kind):
    row, case, posterior = POSTERIORS[name], CASES[kind], fitted(name, kind)
    assert not [n for n in vars(Posterior) if not n.startswith("_") and not hasattr(posterior, n)]
    x = inputs(7, 9)
    outputs = posterior.outputs(x)
    assert outputs.shape == (row.count, 7, case.outputs)
    assert outputs.dtype == torch.float32
    assert outputs.device == x.device
    assert outputs.isfinite().all()
    assert not outputs.requires_grad
    assert (outputs.std(0) > 0).any()
    assert torch.equal(posterior.outputs(x), outputs)  # draws are fixed
    assert type(posterior.likelihood) is type(case.likelihood)
    assert (posterior.gaussian is not None) == (row.offers == "gaussian")
    assert (posterior.prior is not None) == (row.offers != "draws")
    assert (posterior.squared_norms is not None) == (row.offers != "draws")
    assert type(getattr(posterior, "linear", None)) is (row.linear or type(None))
    assert isinstance(posterior.gaussian, DiagonalGaussian) == row.diagonal
    if posterior.prior is not None:
        norms = posterior.squared_norms
        assert norms.shape == (row.count, len(posterior.prior.labels))
        assert norms.dtype == torch.float64
        torch.testing.assert_close(norms.sum(1), posterior.draws.double().square().sum(1))
        assert (posterior.prior.sigma0 == SIGMA0).all()
        assert sorted(posterior.prior.factor.tolist()) == (
            [0.0, 1.0] if kind == "noise head" and not row.one_head else [1.0]
        )
    if posterior.gaussian is not None:
        assert torch.equal(posterior.gaussian.mean, posterior.center)
        assert posterior.gaussian.mean.dtype == torch.float32


@every_kind
@rows(lambda row: row.network)
def test_its_network_stands_for_it(name, kind):
    posterior, x = fitted(name, kind), inputs(7, 9)
    network, row = posterior.network, POSTERIORS[name]
    assert not network.training
    found = network(x).detach()
    if name == "dropout":  # without its masks
        torch.testing.assert_close(found, problem(kind, False).model(x).detach())
        return
    torch.testing.assert_close(posterior.outputs_at(posterior.center[None], x)[0], found, rtol=1e-4, atol=1e-5)
    if row.offers != "gaussian":  # a draw, where there is no mean
        assert (posterior.draws == posterior.center).all(1).any()


def test_only_stacked_predictions_have_no_network():
    for name, row in POSTERIORS.items():
        assert (fitted(name, "categorical").network is None) == (not row.network), name


def test_every_posterior_looks_like_one_of_the_views():
    def view(name: str) -> tuple:
        return POSTERIORS[name].offers, type(fitted(name, "categorical").gaussian), POSTERIORS[name].linear

    assert {view(name) for name in VIEWS} == {view(name) for name in POSTERIORS}
    assert len({view(name) for name in VIEWS}) == len(VIEWS)


# d = 0.


@combinations()
def test_distance_zero_gives_back_the_base_posterior(name, kind, adjust):
    rule, posterior, x = ADJUSTMENTS[adjust], fitted(name, kind), inputs(6, 9)
    base = seen(posterior, x, drawn=not rule.adjust.closed_form)
    adjusted = rule.adjust(posterior, x)
    found = adjusted(torch.zeros(6))
    if not rule.exact:  # weights divided by a sum that is 1 up to rounding, or one more draw of no weight
        likelihood = posterior.likelihood
        torch.testing.assert_close(likelihood.mean(found), likelihood.mean(base), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(likelihood.variance(found), likelihood.variance(base), rtol=1e-9, atol=1e-9)
        return
    expected = numbers(base)
    for part, value in numbers(found).items():
        assert torch.equal(value, expected[part].expand_as(value)), part  # one spread of 0, or one for every output
    among_others = numbers(adjusted(torch.tensor([0.0, 3.0, 0.0, 0.1, 50.0, 0.0])))
    for part, value in among_others.items():
        keep = [0, 2, 5]
        one, two = (t[keep] if part == "spread" else t[:, keep] for t in (value, expected[part].expand_as(value)))
        assert torch.equal(one, two), part


@every_kind
@rows(lambda row: row.offers != "draws", VIEWS)
def test_a_normaliser_by_monte_carlo_over_the_prior(name, kind):
    posterior, x = fitted(name, kind), inputs(6, 9)
    adjusted = Reweight(PriorMonteCarlo(*data(kind, 1), draws=20, levels=3))(posterior, x)
    for part, value in numbers(adjusted(torch.zeros(6))).items():
        assert torch.equal(value, numbers(seen(posterior, x, drawn=True))[part]), part
    assert adjusted(constant(0.5, 6)).log_weights.isfinite().all()


@rows_in_turn(lambda row: row.offers == "gaussian", VIEWS, BOTH_TASKS)
def test_normalised_weights_do_not_depend_on_the_normaliser(name, kind):
    """Far away log Z is so large that digits of the weights are lost if it is subtracted first."""
    posterior, x = fitted(name, kind), inputs(2, 9)
    one, two = (Reweight(z, normalise=True)(posterior, x) for z in (ClosedForm(), SelfNormalised()))
    for d in (*DISTANCES, 1e12):
        weights, expected = (adjusted(constant(d, 2)).log_weights.exp() for adjusted in (one, two))
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


# Proper distributions.


@combinations(lambda row, rule: rule.proper, CLASSES)
def test_class_probabilities_sum_to_one(name, kind, adjust):
    posterior, x = fitted(name, kind), inputs(6, 9)
    adjusted = ADJUSTMENTS[adjust].adjust(posterior, x)
    classes = CASES[kind].columns
    for d in DISTANCES:
        prediction = prediction_of(posterior, adjusted, constant(d, 6))
        assert prediction.probs.shape == (6, classes)
        assert (prediction.probs >= 0).all(), d
        total = posterior.likelihood.mean(prediction.ensemble).sum(1)  # in float64
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-9)
        labels = [prediction.log_prob(torch.full((6,), k)).exp() for k in range(classes)]
        torch.testing.assert_close(torch.stack(labels, 1), prediction.probs, rtol=1e-5, atol=1e-6)
        for part in (prediction.entropy, prediction.mutual_information, prediction.epistemic, prediction.aleatoric):
            assert part.isfinite().all(), d
            assert (part >= -1e-6).all(), d
        assert (prediction.entropy <= np.log(classes) + 1e-5).all()
        torch.testing.assert_close(prediction.epistemic + prediction.aleatoric, prediction.variance)


@combinations(lambda row, rule: rule.proper, LABELS)
def test_label_probabilities_are_probabilities(name, kind, adjust):
    posterior, x = fitted(name, kind), inputs(6, 9)
    adjusted = ADJUSTMENTS[adjust].adjust(posterior, x)
    every = torch.tensor(list(itertools.product((0, 1), repeat=2)))
    for d in DISTANCES:
        prediction = prediction_of(posterior, adjusted, constant(d, 6))
        assert prediction.probs.shape == (6, 2)
        assert ((prediction.probs >= 0) & (prediction.probs <= 1)).all(), d
        for density in (prediction.log_prob, prediction.log_prob_mixture):
            total = sum(density(labels.expand(6, 2)).double().exp() for labels in every)
            torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)
        for part in (prediction.entropy, prediction.mutual_information, prediction.epistemic, prediction.aleatoric):
            assert part.isfinite().all(), d
            assert (part >= -1e-6).all(), d
        assert (prediction.entropy <= 2 * np.log(2) + 1e-5).all()


def integral(likelihood: Likelihood, found: Ensemble, row: int, mixture: bool) -> float:
    """∫ p(y) dy at one input, by trapezoids a tenth of a standard deviation wide, around every draw."""
    if mixture:
        center = found.conditional.mean[:, row, 0]
        deviation = (found.conditional.variance[:, row, 0] + found.spread[row, 0]).sqrt()
    else:
        center, deviation = likelihood.mean(found)[row], likelihood.variance(found)[row].sqrt()
    steps = torch.linspace(-8, 8, 161, dtype=torch.float64)
    y = (center[:, None] + deviation[:, None] * steps).flatten().sort().values
    n = len(y)
    here = Ensemble(
        found.outputs[:, [row]].expand(-1, n, -1),
        type(found.conditional)(*(t[:, [row]].expand(-1, n, *t.shape[2:]) for t in found.conditional)),
        found.log_weights[:, [row]].expand(-1, n),
        found.spread[[row]].expand(n, -1),
    )
    log_density = likelihood.log_prob_mixture if mixture else likelihood.log_prob
    density = log_density(here, y[:, None])
    assert density.isfinite().all()
    return float(torch.trapezoid(density.exp(), y))


@combinations(lambda row, rule: rule.proper, TARGETS)
def test_densities_integrate_to_one(name, kind, adjust):
    posterior, x = fitted(name, kind), inputs(3, 9)
    adjusted = ADJUSTMENTS[adjust].adjust(posterior, x)
    for d in DISTANCES:
        prediction = prediction_of(posterior, adjusted, constant(d, 3))
        assert (prediction.variance > 0).all(), d
        assert prediction.variance.isfinite().all(), d
        assert prediction.mean.isfinite().all(), d
        assert (prediction.epistemic >= 0).all(), d
        lower, upper = prediction.interval(0.9)
        assert ((lower < prediction.mean) & (prediction.mean < upper)).all(), d
        for mixture in (False, True):
            total = integral(posterior.likelihood, prediction.ensemble, 1, mixture)
            assert total == pytest.approx(1, abs=1e-3), (d, mixture)


# Monotone in d.


def closed(row: Row, rule: Rule) -> bool:
    """Whether an adjustment adds an analytic variance."""
    always = rule.adjust == Inflate() or isinstance(rule.adjust, Revert)
    return always or (rule.adjust == Transport() and row.linear is not None)


GROWING = (0.0, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e3, 1e6, 1e9)


@combinations(closed, LABELS)
def test_every_label_tends_to_one_half(name, kind, adjust):
    posterior, x = fitted(name, kind), inputs(40, 9)
    likelihood, adjusted = posterior.likelihood, ADJUSTMENTS[adjust].adjust(posterior, x)
    probs = torch.stack([likelihood.mean(adjusted(constant(d, 40))) for d in GROWING])  # (D, N, L) in float64
    assert ((probs - 0.5).abs().diff(dim=0) <= 1e-12).all()
    assert ((probs > 0.5) == (probs[0] > 0.5)).all()
    assert ((probs[-1] - 0.5).abs() < (probs[0] - 0.5).abs() - 1e-6).any()
    if adjust == "inflate":
        torch.testing.assert_close(probs[-1], torch.full_like(probs[-1], 0.5), rtol=0, atol=1e-3)


@combinations(closed, CLASSES)
def test_confidence_falls_to_one_over_the_classes(name, kind, adjust):
    posterior, x = fitted(name, kind), inputs(40, 9)
    likelihood, adjusted = posterior.likelihood, ADJUSTMENTS[adjust].adjust(posterior, x)
    found = [adjusted(constant(d, 40)) for d in GROWING]
    probs = torch.stack([likelihood.mean(e) for e in found])  # (D, N, K) in float64
    entropy = torch.stack([likelihood.entropy(e) for e in found])
    assert (probs.max(-1).values.diff(dim=0) <= 1e-12).all()
    assert (entropy.diff(dim=0) >= -1e-12).all()
    assert (probs.argmax(-1) == probs[0].argmax(-1)).all()
    assert (entropy[-1] > entropy[0] + 1e-6).any()
    if adjust == "inflate":  # Transport stops where data have pinned a direction down
        torch.testing.assert_close(probs[-1], torch.full_like(probs[-1], 1 / probs.shape[-1]), rtol=0, atol=1e-3)


@combinations(closed, TARGETS)
def test_epistemic_variance_grows_and_the_mean_stays_where_it_should(name, kind, adjust):
    posterior, x = fitted(name, kind), inputs(40, 9)
    likelihood, adjusted = posterior.likelihood, ADJUSTMENTS[adjust].adjust(posterior, x)
    found = [adjusted(constant(d, 40)) for d in GROWING]
    epistemic = torch.stack([likelihood.split(e, found[0]).epistemic for e in found])
    rounding = 0 if ADJUSTMENTS[adjust].keeps_mean else 1e-12  # a variance around another mean
    assert (epistemic.diff(dim=0) >= -rounding).all()
    assert (epistemic[4] > epistemic[0]).all()
    for d, e in zip(GROWING, found, strict=True):
        assert torch.equal(likelihood.mean(e), likelihood.mean(found[0])) or not ADJUSTMENTS[adjust].keeps_mean, d
        torch.testing.assert_close(likelihood.split(e, found[0]).aleatoric, likelihood.aleatoric(found[0]))


@every_kind
@rows(lambda row: row.linear is not None)
def test_closed_transport_stays_inside_the_envelope(name, kind):
    """V <= V_d <= k² V."""
    posterior, x = fitted(name, kind), inputs(20, 9)
    adjusted = Transport()(posterior, x)
    base, before = adjusted(torch.zeros(20)).spread, None
    for d in GROWING:
        spread = adjusted(constant(d, 20)).spread
        k2 = float(posterior.prior.widening(constant(d, 1))) ** 2
        assert (spread >= base * (1 - 1e-12)).all()
        assert (spread <= base * k2 * (1 + 1e-9)).all()
        assert before is None or (spread >= before * (1 - 1e-12)).all()
        before = spread


def covariance_of(own) -> Tensor:
    if isinstance(own, FullGaussian):
        return own.covariance.double()
    if isinstance(own, LowRankGaussian):
        return torch.diag(own.variance.double()) + own.factor.double() @ own.factor.double().T
    if isinstance(own, KroneckerGaussian):
        root = own.rotated(torch.diag(own.variance.double().sqrt()), back=True)
        return root.T @ root
    assert isinstance(own, DiagonalGaussian)
    return torch.diag(own.variance.double())


@rows_in_turn(lambda row: row.offers == "gaussian", VIEWS)
def test_moved_draws_keep_their_mean_and_spread_further(name, kind):
    """Transport is linear in a draw's deviation: δ -> T δ, so T Σ Tᵀ is the covariance of the moved draws."""
    posterior = fitted(name, kind)
    own, prior = posterior.gaussian, posterior.prior
    mean, base = own.mean.double(), covariance_of(own)
    scale = base.diagonal().sqrt()
    ends = torch.cat([mean[None], mean + torch.diag(scale)])  # the mean, and a step along every parameter
    before = base
    for d in GROWING[1:7]:
        moved = own.transport(ends, prior.precision_drop(constant(d, 1))[0], prior, False)
        torch.testing.assert_close(moved[0], mean, rtol=1e-9, atol=1e-12)
        step = (moved[1:] - moved[0]) / scale[:, None]
        now = step.T @ base @ step
        growth = (now - before) / torch.outer(now.diagonal(), now.diagonal()).sqrt()
        assert torch.linalg.eigvalsh(growth).min() > -1e-6, d
        k2 = float(prior.widening(constant(d, 1))) ** 2
        assert torch.linalg.eigvalsh((k2 * base - now) / torch.outer(scale, scale)).min() > -1e-5 * k2, d
        before = now
    assert before.trace() > 1.00001 * base.trace()


# What does not apply says what is missing.


def refused(posterior: Posterior, kind: str, adjust, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adjust(posterior, inputs(3, 9))
    with pytest.raises(ValueError, match=message):
        calibrate(posterior, kind, adjust)


@rows_in_turn(lambda row: row.offers == "draws")
def test_without_a_prior_reweight_says_how_to_set_it(name, kind):
    posterior = fitted(name, kind)
    for adjust in (Reweight(), Reweight(SelfNormalised()), Reweight(PriorMonteCarlo(*data(kind, 1)))):
        refused(posterior, kind, adjust, r"prior scale sigma0.*with_prior\(prior_scale\).*Inflate\(\)")


@rows_in_turn(lambda row: row.offers == "draws" and row.network, kinds=BOTH_TASKS)
def test_with_a_prior_reweight_works(name, kind):
    posterior = fitted(name, kind)
    if name == "dropout":  # masks are drawn, not weights
        assert not hasattr(posterior, "with_prior")
        return
    weighted = posterior.with_prior(SIGMA0, aware=CASES[kind].aware)
    ensemble_at = Reweight(SelfNormalised())(weighted, inputs(3, 9))(constant(0.5, 3))
    torch.testing.assert_close(ensemble_at.log_weights.exp().sum(0), torch.ones(3, dtype=torch.float64))
    assert ensemble_at.log_weights.std() > 0
    assert torch.equal(weighted.outputs(inputs(3, 9)), posterior.outputs(inputs(3, 9)))
    refused(weighted, kind, Reweight(), "no moments.*SelfNormalised")


@rows_in_turn(lambda row: row.offers == "prior")
def test_without_moments_the_closed_form_names_the_other(name, kind):
    refused(fitted(name, kind), kind, Reweight(ClosedForm()), r"no moments.*SelfNormalised\(\).*Inflate\(\)")


@rows_in_turn(lambda row: row.offers != "gaussian")
def test_transport_of_draws_names_inflate(name, kind):
    for adjust in (Transport(), Transport(drawn=True), Transport(shift=True)):
        refused(fitted(name, kind), kind, adjust, r"Gaussian posterior.*Inflate\(\)")


@rows_in_turn(lambda row: not row.diagonal)
def test_moment_matching_needs_a_diagonal_gaussian(name, kind):
    message = r"diagonal Gaussian posterior.*Transport\(shift=True\).*Inflate\(\)"
    refused(fitted(name, kind), kind, MomentMatched(normalise=True), message)


@rows_in_turn(lambda row: row.offers != "draws", VIEWS, (TARGETS,))
def test_only_classes_have_a_most_uncertain_answer(name, kind):
    refused(
        fitted(name, kind), kind, Reweight(SelfNormalised(), complete=True), r"only classification has.*Inflate\(\)"
    )


@every_kind
def test_a_single_network_has_no_spread(kind):
    point = map_posterior.point(problem(kind, False).model, CASES[kind].likelihood)
    for adjust in (Inflate(), Inflate(drawn=True), Reweight(SelfNormalised())):
        refused(point, kind, adjust, r"single network.*Fit a posterior")
    for adjust in (Reweight(), Transport()):  # calibration looks at the draws first
        with pytest.raises(ValueError, match="SelfNormalised" if adjust == Reweight() else "Inflate"):
            adjust(point, inputs(3, 9))
        with pytest.raises(ValueError, match=r"single network.*Fit a posterior"):
            calibrate(point, kind, adjust)


@rows_in_turn(lambda row: row.linear is not None)
def test_a_joint_prediction_of_closed_forms_asks_for_draws(name, kind):
    own = calibrate(fitted(name, kind), kind, Inflate())
    for adjust in (Inflate(), Transport()):
        with pytest.raises(ValueError, match=rf"{type(adjust).__name__}\(drawn=True\)"):
            replace(own, adjust=adjust).joint(inputs(3, 9))


@pytest.mark.parametrize("name", [n for n, row in POSTERIORS.items() if row.one_head])
def test_two_networks_have_no_last_layer(name):
    with pytest.raises(ValueError, match=r"use laplace\.fit"):
        POSTERIORS[name].fit(problem("noise head", False))


# Order and batches.


@combinations(crossed=())
def test_batches_and_order_do_not_matter(name, kind, adjust):
    posterior, x = fitted(name, kind, DOUBLE), inputs(6, 9, DOUBLE)
    d = torch.tensor([0.0, 0.7, 1e3, 0.01, 0.7, 0.0]).double()
    order = torch.tensor([4, 1, 5, 2, 0, 3])

    def moments(rows: Tensor) -> list[Tensor]:
        found, likelihood = ADJUSTMENTS[adjust].adjust(posterior, x[rows])(d[rows]), posterior.likelihood
        return [likelihood.mean(found), likelihood.variance(found), likelihood.entropy(found)]

    whole = moments(torch.arange(6))
    pieces = [torch.cat(parts) for parts in zip(*(moments(rows) for rows in torch.arange(6).split(4)), strict=True)]
    turned = [part[order.argsort()] for part in moments(order)]
    for one, two, three in zip(whole, pieces, turned, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(three, one, rtol=1e-9, atol=1e-9)


@rows_in_turn(kinds=BOTH_TASKS)
def test_outputs_do_not_depend_on_batches_and_order(name, kind):
    posterior, x = fitted(name, kind, DOUBLE), inputs(11, 9, DOUBLE)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    whole = posterior.outputs(x)
    torch.testing.assert_close(torch.cat([posterior.outputs(b) for b in x.split(4)], 1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(posterior.outputs(x[order])[:, order.argsort()], whole, rtol=1e-11, atol=1e-11)


# Calibrated, saved and loaded.


def spaces_of(posterior: Posterior) -> tuple[Space, ...]:
    features = () if posterior.network is None else (Space(Features(), name="features"),)
    return (Space(Identity(), name="inputs"), *features)


def calibrate(posterior: Posterior, kind: str, adjust, place: Place = SINGLE) -> Calibrated:
    return dapcal.calibrate(
        posterior,
        train=data(kind, 1, place=place),
        held_out=data(kind, 2, 8, place),
        ood=4 * inputs(2, 5, place),
        distance=spaces_of(posterior),
        adjust=adjust,
        candidates=3,
    )


FIELDS = ("mean", "variance", "epistemic", "entropy", "distance", "ood_score", "ood_p_value")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("contract") / "model.dap"


@functools.cache
def given_again(name: str, kind: str, place: Place = SINGLE):
    """What loading asks for: a network of other weights, the function, or nothing."""
    row, case = POSTERIORS[name], CASES[kind]
    if not row.network:
        return getattr(fitted(name, kind, place), "function", None)  # trees need none
    return made(case.one_head if row.one_head else case.model, 99, place)


def check_round_trip(name: str, kind: str, own: Calibrated, path) -> None:
    """A file and a network of other weights give the same predictions to the last bit."""
    own.save(path)
    loaded = dapcal.load(path, given_again(name, kind))
    assert loaded.adjust == own.adjust
    assert type(loaded.posterior.gaussian) is type(own.posterior.gaussian)
    assert getattr(loaded.posterior, "linear", None) == getattr(own.posterior, "linear", None)
    x = torch.cat([inputs(3, 9), 3 * inputs(3, 8)])
    one, two = own(x), loaded(x)
    for field in FIELDS:
        assert getattr(one, field).isfinite().all(), field
        assert torch.equal(getattr(one, field), getattr(two, field)), field
    assert (one.distance > 0).any()


@rows_in_turn()
def test_a_saved_posterior_predicts_the_same_to_the_last_bit(name, kind, path):
    check_round_trip(name, kind, replace(calibrate(fitted(name, kind), kind, Inflate()), phi=-1.0), path)


@combinations(names=CROSSED, crossed=("given diagonal",))
def test_every_adjustment_is_calibrated(name, kind, adjust, path):
    own = calibrate(fitted(name, kind), kind, ADJUSTMENTS[adjust].adjust)
    place = int((own.curve.phi - own.phi).abs().argmin())
    assert float(own.curve.phi[place]) == own.phi
    assert float(own.curve.nll[place] + own.curve.error[place]) <= own.curve.guard
    check_round_trip(name, kind, replace(own, phi=-1.0), path)  # a distance that counts, wherever the search ended


# Seeds and global state.


def global_state() -> tuple:
    return (
        tuple(torch.get_rng_state().tolist()),
        random.getstate(),
        tuple(np.random.get_state()[1].tolist()),  # noqa: NPY002
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


@rows_in_turn(kinds=BOTH_TASKS)
def test_fitting_is_reproducible_and_leaves_global_state_alone(name, kind):
    x = inputs(5, 9)
    expected = fitted(name, kind).outputs(x)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        before = global_state()
        posterior = fit(name, kind)
        outputs = posterior.outputs(x)
        calibrate(posterior, kind, Inflate())(x)
        assert global_state() == before
    assert torch.equal(outputs, expected)
    if isinstance(posterior, NetworkPosterior):
        assert torch.equal(posterior.draws, fitted(name, kind).draws)
    if posterior.gaussian is not None:
        assert torch.equal(covariance_of(posterior.gaussian), covariance_of(fitted(name, kind).gaussian))


@rows_in_turn(lambda row: row.seeded)
def test_another_seed_gives_other_draws(name, kind):
    x = inputs(5, 9)
    outputs, other = fitted(name, kind).outputs(x), fit(name, kind, seed=1).outputs(x)
    assert other.shape == outputs.shape
    assert torch.isclose(other, outputs).all(2).all(1).float().mean() < 0.5  # masks of few units may coincide


# dtype and device.


def applying(name: str, kind: str) -> list[str]:
    """Adjustments that apply, by name."""
    return [a for a, rule in ADJUSTMENTS.items() if applies(POSTERIORS[name], rule, kind)]


@rows_in_turn(kinds=BOTH_TASKS)
def test_float64_models_give_float64(name, kind):
    posterior, x = fitted(name, kind, DOUBLE), inputs(4, 9, DOUBLE)
    assert posterior.outputs(x).dtype == torch.float64
    assert posterior.network is None or {p.dtype for p in posterior.network.parameters()} == {torch.float64}
    if isinstance(posterior, NetworkPosterior):
        assert posterior.draws.dtype == posterior.center.dtype == torch.float64
    for adjust in applying(name, kind):
        found = prediction_of(posterior, ADJUSTMENTS[adjust].adjust(posterior, x), constant(0.5, 4))
        parts = [found.ensemble.outputs, found.mean, found.variance, found.epistemic, found.aleatoric, found.entropy]
        assert {part.dtype for part in parts} == {torch.float64}, adjust


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@rows()
def test_everything_stays_on_the_gpu(name, path):
    x = inputs(4, 9, GPU)
    for kind in CASES:
        posterior = fitted(name, kind, GPU)
        assert posterior.outputs(x).is_cuda
        own = calibrate(posterior, kind, Inflate(), GPU)
        own.save(path)
        loaded = dapcal.load(path, given_again(name, kind, GPU))
        for adjust in applying(name, kind):
            found, again = (replace(c, adjust=ADJUSTMENTS[adjust].adjust, phi=-1.0)(x) for c in (own, loaded))
            for field in FIELDS:
                one, two = getattr(found, field), getattr(again, field)
                assert one.is_cuda, (kind, adjust, field)
                assert two.is_cuda or not POSTERIORS[name].network, (kind, adjust, field)  # a function has no device
                torch.testing.assert_close(two.cpu(), one.cpu(), rtol=1e-5, atol=1e-6)
