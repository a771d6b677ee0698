"""Prediction: its parts against brute force, for every adjustment and likelihood."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import dapcal
from cases import ADJUSTMENTS
from dapcal.adjust import Reweight, Transport
from dapcal.calibrate import Calibrated
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.ensembles import base_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, NoiseHead
from dapcal.posteriors import gaussian
from dapcal.posteriors.network import NetworkPosterior
from dapcal.predictive import Prediction

pytestmark = pytest.mark.filterwarnings("ignore:The importance weights have collapsed")

CLASSES = {"categorical": (Categorical(temperature=1.3), 3), "bernoulli": (Bernoulli(temperature=0.8), 1)}
TARGETS = {"gaussian": (Gaussian(0.3), 2), "noise head": (NoiseHead(factor=0.7), 4)}
LIKELIHOODS = CLASSES | TARGETS
IMPROPER = ("reweight", "smooth")
PAIRS = [(a, k) for a in ADJUSTMENTS for k in LIKELIHOODS if not (a == "complete" and k in TARGETS)]
every_pair = pytest.mark.parametrize(("adjust", "kind"), PAIRS)
every_class_pair = pytest.mark.parametrize(("adjust", "kind"), [p for p in PAIRS if p[1] in CLASSES])
every_target_pair = pytest.mark.parametrize(("adjust", "kind"), [p for p in PAIRS if p[1] in TARGETS])

NEAR = torch.tensor([[0.1, 0.2], [1.0, -0.4], [-0.7, 0.9]], dtype=torch.float64)
FAR = torch.tensor([[3.0, 3.0], [-5.0, 0.0], [0.0, 9.0]], dtype=torch.float64)
X = torch.cat([NEAR, FAR])


def network(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def diagonal(model: nn.Module, likelihood: Likelihood, scale: float = 0.15, seed: int = 2) -> NetworkPosterior:
    scales = {n: torch.full_like(p, scale) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood, scales, draws=40, seed=seed)


@functools.cache
def calibrated_for(kind: str) -> Calibrated:
    """φ = 0, distances in units of the held-out ones, on a small diagonal posterior."""
    likelihood, outputs = LIKELIHOODS[kind]
    model = network(outputs)
    posterior = diagonal(model, likelihood)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=generator, dtype=torch.float64)
    f = model(x).detach()
    y = {"categorical": f.argmax(-1), "bernoulli": (f[:, 0] > 0).long()}.get(kind, f[:, :2])
    space = Space(Identity(), radius=0.5, name="inputs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dapcal.DapcalWarning)  # φ is set below
        calibrated = dapcal.calibrate(
            posterior,
            train=(x[:60], y[:60]),
            held_out=(x[60:], y[60:]),
            ood=FAR,
            distance=space,
            candidates=10,
            guard=None,
        )
    return replace(calibrated, phi=math.log(0.2))


@functools.cache
def predict(adjust: str, kind: str, x: Tensor = X, joint: bool = False) -> Prediction:
    calibrated = replace(calibrated_for(kind), adjust=ADJUSTMENTS[adjust])
    return calibrated.joint(x) if joint else calibrated(x)


def targets(kind: str, n: int = len(X)) -> Tensor:
    classes = {"categorical": 3, "bernoulli": 2}.get(kind)
    return torch.arange(n) % classes if classes else torch.linspace(-1, 1, 2 * n, dtype=torch.float64).reshape(n, 2)


def draws_of(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Probabilities or locations (S, N, K) of every draw, and noise variances (S, N, K), without the library."""
    outputs, likelihood = prediction.ensemble.outputs, prediction.likelihood
    if isinstance(likelihood, Categorical):
        return torch.softmax(outputs / likelihood.temperature, -1), torch.zeros(())
    if isinstance(likelihood, Bernoulli):
        p = torch.sigmoid(outputs / likelihood.temperature)
        return torch.cat([1 - p, p], -1), torch.zeros(())
    if isinstance(likelihood, Gaussian):
        return outputs, torch.full_like(outputs, likelihood.noise**2)
    location, raw = outputs[..., :2], outputs[..., 2:]
    return location, ((torch.log1p(raw.exp()) + likelihood.floor) * likelihood.factor) ** 2


def moments(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Mean and variance of a regression prediction by hand: E[wf], noise + E[wf²] − E[wf]² + spread."""
    location, noise = draws_of(prediction)
    w = prediction.ensemble.log_weights.exp()[..., None]
    mean = (w * location).sum(0)
    spread = ((w * location**2).sum(0) - mean**2).clamp_min(0)
    return mean, (w * noise).sum(0) / w.sum(0) + spread + prediction.ensemble.spread


def test_the_chosen_distances_cover_zero_and_far():
    distance = predict("inflate", "categorical").distance
    assert (distance[:3] < 0.5).all()
    assert (distance == 0).any()
    assert (distance[3:] > 0.5).all()


@every_pair
def test_variance_splits_into_two_parts_that_are_never_negative(adjust, kind):
    prediction = predict(adjust, kind)
    assert (prediction.epistemic >= 0).all()
    assert (prediction.aleatoric >= 0).all()
    torch.testing.assert_close(prediction.epistemic + prediction.aleatoric, prediction.variance)
    shape = (6,) if kind in CLASSES else (6, 2)
    assert prediction.variance.shape == prediction.epistemic.shape == prediction.aleatoric.shape == shape
    assert len(prediction) == 6


@every_pair
def test_distance_adds_no_aleatoric_uncertainty(adjust, kind):
    prediction = predict(adjust, kind)
    assert (prediction.aleatoric <= prediction.base.aleatoric + 1e-12).all()


@every_class_pair
def test_probabilities_sum_to_the_total_weight(adjust, kind):
    prediction = predict(adjust, kind)
    total = prediction.probs.sum(-1)
    if adjust in IMPROPER:
        torch.testing.assert_close(total, prediction.diagnostics.total_weight)
        assert ((total - 1).abs() > 1e-3).any()
    else:
        torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("option", ["normalise", "complete"])
def test_the_total_weight_is_reported_also_where_it_was_mended(option):
    """W and the effective draws are those of the importance weights, before normalisation or completion."""
    literal = predict("reweight", "categorical").diagnostics
    mended = predict(option, "categorical").diagnostics
    torch.testing.assert_close(mended.total_weight, literal.total_weight)
    torch.testing.assert_close(mended.ess, literal.ess)


@every_class_pair
def test_entropies_are_not_negative(adjust, kind):
    prediction = predict(adjust, kind)
    assert (prediction.entropy >= 0).all()
    assert (prediction.mutual_information >= 0).all()
    assert (prediction.mutual_information <= prediction.entropy + 1e-12).all()


@pytest.mark.parametrize("kind", CLASSES)
def test_a_total_weight_above_one_leaves_no_negative_uncertainty(kind):
    model = network(LIKELIHOODS[kind][1])
    with torch.no_grad():
        model[2].bias[0] += 6  # a confident network
    posterior = diagonal(model, LIKELIHOODS[kind][0], seed=1)
    prediction = replace(calibrated_for(kind), posterior=posterior, adjust=Reweight())(X)
    assert (prediction.probs.max(-1).values > 1).any()
    parts = ("variance", "aleatoric", "epistemic", "entropy", "mutual_information")
    assert {part: float(getattr(prediction, part).min()) >= 0 for part in parts} == dict.fromkeys(parts, True)


@every_class_pair
def test_entropy_and_mutual_information_against_their_formulas(adjust, kind):
    prediction = predict(adjust, kind)
    p = prediction.probs
    entropy = -(p * p.log()).sum(-1)
    torch.testing.assert_close(prediction.entropy, entropy)
    base, _ = draws_of(prediction.base)
    w = prediction.base.ensemble.log_weights.exp()
    expected = (w * -(base * base.log()).sum(-1)).sum(0)
    torch.testing.assert_close(prediction.mutual_information, (entropy - expected).clamp_min(0))


@every_class_pair
def test_log_prob_against_brute_force_in_classification(adjust, kind):
    prediction, y = predict(adjust, kind), targets(kind)
    p, _ = draws_of(prediction)
    mean = (prediction.ensemble.log_weights.exp()[..., None] * p).sum(0)
    t = torch.sqrt(1 + math.pi / 8 * prediction.ensemble.spread[:, 0])
    tempered = mean.log() / t[:, None]
    expected = tempered.log_softmax(-1) + mean.sum(-1, keepdim=True).log()
    torch.testing.assert_close(prediction.log_prob(y), expected[torch.arange(6), y])
    torch.testing.assert_close(prediction.log_prob_mixture(y), expected[torch.arange(6), y])
    torch.testing.assert_close(prediction.probs, expected.exp())
    torch.testing.assert_close(prediction.variance, 1 - (expected.exp() ** 2).sum(-1))


@every_target_pair
def test_log_prob_against_brute_force_in_regression(adjust, kind):
    prediction, y = predict(adjust, kind), targets(kind)
    mean, variance = moments(prediction)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.variance, variance)
    torch.testing.assert_close(prediction.log_prob(y), Normal(mean, variance.sqrt()).log_prob(y).sum(-1))
    location, noise = draws_of(prediction)
    density = Normal(location, (noise + prediction.ensemble.spread).sqrt()).log_prob(y).sum(-1)
    mixture = (prediction.ensemble.log_weights.exp() * density.exp()).sum(0).log()
    torch.testing.assert_close(prediction.log_prob_mixture(y), mixture)
    entropy = Normal(mean, variance.sqrt()).entropy().sum(-1)
    torch.testing.assert_close(prediction.entropy, entropy)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_closed_form_inflate_adds_what_its_formula_says(kind):
    prediction = predict("inflate", kind)
    outputs, k = prediction.base.ensemble.outputs, 1 + prediction.distance  # σ0 = 1
    if kind in CLASSES:  # one variance per input: of the centred logits, averaged over the classes
        logits = outputs / 1.3 if kind == "categorical" else torch.cat([0 * outputs, outputs / 0.8], -1)
        centred = logits - logits.mean(-1, keepdim=True)
        v = centred.var(0, correction=0).mean(-1, keepdim=True)
    else:
        v = outputs[..., :2].var(0, correction=0)
    torch.testing.assert_close(prediction.ensemble.spread, v * (k**2 - 1)[:, None])


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("adjust", ["reweight", "transport"])
def test_weights_and_draws_against_their_formulas(adjust, kind):
    prediction, posterior = predict(adjust, kind), calibrated_for(kind).posterior
    c = 1 - 1 / (1 + prediction.distance) ** 2
    mean, variance = posterior.center, torch.full_like(posterior.center, 0.15**2)
    if adjust == "reweight":
        inside = 1 - c[:, None] * variance
        log_z = (0.5 * c[:, None] * mean**2 / inside - 0.5 * inside.log()).sum(1)
        expected = 0.5 * c * (posterior.draws**2).sum(1, keepdim=True) - log_z - math.log(40)
        torch.testing.assert_close(prediction.ensemble.log_weights, expected)
        return
    exact = replace(calibrated_for(kind), adjust=Transport(step=None))(X)
    for n, drop in enumerate(c):
        moved = mean + (posterior.draws - mean) / (1 - drop * variance).sqrt()
        torch.testing.assert_close(exact.ensemble.outputs[:, n], posterior.outputs_at(moved, X[n : n + 1])[:, 0])
    torch.testing.assert_close(prediction.ensemble.outputs, exact.ensemble.outputs, atol=1e-3, rtol=1e-3)


@every_target_pair
def test_interval_holds_the_mean_and_has_the_right_width(adjust, kind):
    prediction = predict(adjust, kind)
    for level, z in ((0.95, 1.959964), (0.5, 0.674490)):
        interval = prediction.interval(level)
        assert ((interval.lower < prediction.mean) & (prediction.mean < interval.upper)).all()
        width = 2 * z * prediction.variance.sqrt()
        torch.testing.assert_close(interval.upper - interval.lower, width, rtol=1e-6, atol=0.0)


@every_class_pair
def test_prediction_set_is_the_smallest_that_reaches_the_level(adjust, kind):
    prediction = predict(adjust, kind)
    for level in (0.5, 0.9):
        mask = prediction.prediction_set(level)
        assert mask.shape == prediction.probs.shape
        for p, chosen in zip(prediction.probs, mask, strict=True):
            assert chosen.any()
            assert p[chosen].sum() >= level or chosen.all()
            assert p[chosen].sum() - p[chosen].min() < level
            assert chosen.all() or p[chosen].min() >= p[~chosen].max()


@pytest.mark.parametrize("level", [0.0, 1.0, -1, 95])
def test_levels_outside_zero_and_one_are_refused(level):
    with pytest.raises(ValueError, match="`level` between 0 and 1"):
        predict("inflate", "categorical").prediction_set(level)
    with pytest.raises(ValueError, match="`level` between 0 and 1"):
        predict("inflate", "gaussian").interval(level)


@every_pair
def test_samples_follow_the_prediction(adjust, kind):
    prediction = predict(adjust, kind)
    generator = torch.Generator().manual_seed(0)
    if adjust in IMPROPER:
        with pytest.raises(ValueError, match=r"do not sum to one.*Reweight\(complete=True\)"):
            prediction.sample(10, generator)
        return
    n = 4000
    drawn = prediction.sample(n, generator)
    if kind in CLASSES:
        assert drawn.shape == (n, 6)
        p = prediction.probs
        frequency = torch.stack([(drawn == k).double().mean(0) for k in range(p.shape[1])], 1)
        assert ((frequency - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()
    else:
        assert drawn.shape == (n, 6, 2)
        deviation = prediction.variance.sqrt()
        assert ((drawn.mean(0) - prediction.mean).abs() < 5 * deviation / n**0.5).all()
        assert ((drawn.std(0) / deviation - 1).abs() < 5 / (2 * n) ** 0.5).all()


def test_samples_repeat_with_a_generator_and_differ_without():
    prediction = predict("inflate", "gaussian")
    one, two = (prediction.sample(3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(prediction.sample(3), prediction.sample(3))


@every_pair
def test_expect_is_the_weighted_mean_of_a_statistic(adjust, kind):
    prediction = predict(adjust, kind)
    if adjust == "inflate":
        with pytest.raises(ValueError, match=r"no draws to average.*Inflate\(drawn=True\)"):
            prediction.expect(lambda outputs: outputs)
        return
    w = prediction.ensemble.log_weights.exp()
    by_hand = sum(w[s][:, None] * prediction.ensemble.outputs[s].sin() for s in range(len(w)))
    torch.testing.assert_close(prediction.expect(torch.sin), by_hand)
    scalar = prediction.expect(lambda outputs: outputs.norm(dim=-1))
    torch.testing.assert_close(scalar, (w * prediction.ensemble.outputs.norm(dim=-1)).sum(0))
    location, _ = draws_of(prediction)
    torch.testing.assert_close(prediction.expect(lambda _: location), prediction.mean)


@pytest.mark.parametrize("adjust", [a for a in ADJUSTMENTS if a != "inflate"])
def test_the_expected_softmax_is_the_class_probabilities(adjust):
    prediction = predict(adjust, "categorical")
    torch.testing.assert_close(prediction.expect(lambda f: torch.softmax(f / 1.3, -1)), prediction.probs)


@every_pair
def test_base_is_the_posterior_as_it_was(adjust, kind):
    calibrated, prediction = calibrated_for(kind), predict(adjust, kind)
    plain = base_ensemble(calibrated.posterior.likelihood, calibrated.posterior.outputs(X))
    exact = adjust not in ("self-normalised", "normalise", "complete")  # these divide by a sum
    tolerance = 0.0 if exact else 1e-14
    expected = calibrated.posterior.likelihood.mean(plain)
    torch.testing.assert_close(prediction.base.mean, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        prediction.base.variance, calibrated.posterior.likelihood.variance(plain), rtol=0, atol=tolerance
    )
    inside = prediction.pre_distance == 0
    assert inside.any()
    assert torch.equal(prediction.mean[inside], prediction.base.mean[inside])
    assert torch.equal(prediction.variance[inside], prediction.base.variance[inside])
    assert (prediction.base.distance == 0).all()


@every_pair
def test_a_prediction_away_from_the_data_differs_from_the_base(adjust, kind):
    prediction = predict(adjust, kind)
    same = torch.allclose(prediction.variance[3:], prediction.base.variance[3:], rtol=1e-4)
    assert same == (adjust == "unchanged")


@pytest.mark.parametrize("adjust", ["inflate", "drawn", "transport"])
@pytest.mark.parametrize("kind", TARGETS)
def test_spread_grows_with_distance_in_regression(adjust, kind):
    prediction = predict(adjust, kind)
    assert (prediction.epistemic[3:] > prediction.base.epistemic[3:]).all()


@pytest.mark.parametrize("kind", TARGETS)
def test_probs_are_refused_in_regression(kind):
    prediction = predict("inflate", kind)
    with pytest.raises(TypeError, match="`probs` is for classification; regression has `mean` and `variance`"):
        _ = prediction.probs
    with pytest.raises(TypeError, match=r"holds the one class of an input.*use `interval`"):
        prediction.prediction_set()


@pytest.mark.parametrize("kind", CLASSES)
def test_intervals_are_refused_in_classification(kind):
    with pytest.raises(TypeError, match="`prediction_set`"):
        predict("inflate", kind).interval()


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_targets_of_another_length_are_refused(kind):
    with pytest.raises(ValueError, match=r"Expected .* shape"):
        predict("inflate", kind).log_prob(targets(kind, 4))


def collapsing(adjust: str) -> Calibrated:
    """Far inputs leave one draw of a posterior as wide as its prior."""
    posterior = diagonal(network(3), Categorical(), scale=0.9)
    return replace(calibrated_for("categorical"), posterior=posterior, adjust=ADJUSTMENTS[adjust], phi=3.0)


@pytest.mark.parametrize("adjust", [a for a, value in ADJUSTMENTS.items() if isinstance(value, Reweight)])
def test_collapsed_weights_warn_once_with_a_number_and_a_remedy(adjust):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prediction = collapsing(adjust)(X)
    assert [w.category for w in caught] == [dapcal.DapcalWarning]
    draws, diagnostics = len(prediction.ensemble.outputs), prediction.diagnostics
    count = int(((diagnostics.ess < max(2, draws / 10)) | (diagnostics.pareto_k > 0.7)).sum())
    assert 0 < count < 6
    message = str(caught[0].message)
    for words in (f"collapsed at {count} of 6 inputs", "prediction.diagnostics", "Inflate()", "Transport()"):
        assert words in message
    assert caught[0].filename == __file__


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_trustworthy_weights_do_not_warn(adjust):
    calibrated = replace(calibrated_for("categorical"), adjust=ADJUSTMENTS[adjust])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prediction = calibrated(NEAR)
    assert (prediction.diagnostics.ess > 15).all()


@pytest.mark.parametrize("adjust", ["inflate", "transport"])
def test_equal_weights_have_all_draws_and_weight_one(adjust):
    diagnostics = predict(adjust, "categorical").diagnostics
    torch.testing.assert_close(diagnostics.ess, torch.full((6,), 40.0, dtype=torch.float64))
    torch.testing.assert_close(diagnostics.total_weight, torch.ones(6, dtype=torch.float64))
    assert diagnostics.pareto_k.isnan().all()


@pytest.mark.parametrize(("aware", "contracted"), [("*", 4 + 3), ("2.*", 3), ("0.weight", 0)])
@pytest.mark.parametrize("adjust", ["inflate", "reweight", "transport"])
def test_parameters_wider_than_the_prior_are_counted(adjust, aware, contracted):
    model = network(3)
    scale = {n: torch.full_like(p, 1.2 if n.endswith("bias") else 0.15) for n, p in model.named_parameters()}
    posterior = gaussian.diagonal(model, Categorical(), scale, draws=10, aware=aware)
    calibrated = replace(calibrated_for("categorical"), posterior=posterior, adjust=ADJUSTMENTS[adjust])
    assert calibrated(NEAR).diagnostics.contracted == contracted


def test_completion_gives_the_missing_mass_to_the_uniform_answer():
    bare, complete = predict("reweight", "categorical"), predict("complete", "categorical")
    total = bare.diagnostics.total_weight[:, None]
    mass = total.clamp_max(1)
    torch.testing.assert_close(complete.probs, mass * bare.probs / total + (1 - mass) / 3)


# Joint predictions: one distance for a set, one density over all its targets (paper, section 3.1).

JOINT = ["drawn", "reweight", "self-normalised", "normalise", "complete", "smooth", "transport", "shift"]
JOINT_PAIRS = [p for p in PAIRS if p[0] in JOINT]


@pytest.mark.parametrize(("adjust", "kind"), JOINT_PAIRS)
def test_joint_density_against_brute_force(adjust, kind):
    prediction, y = predict(adjust, kind, joint=True), targets(kind)
    location, noise = draws_of(prediction)
    log_w = prediction.ensemble.log_weights[:, 0]
    if kind in CLASSES:
        density = location[:, torch.arange(6), y].log()
    else:
        density = Normal(location, noise.sqrt()).log_prob(y).sum(-1)
    by_hand = sum(log_w[s].exp() * density[s].exp().prod() for s in range(len(log_w))).log()
    torch.testing.assert_close(prediction.log_prob_joint(y), by_hand)
    assert prediction.log_prob_joint(y).shape == ()


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("adjust", ["reweight", "drawn"])
def test_joint_and_independent_predictions_differ(adjust, kind):
    y = targets(kind)
    joint, alone = predict(adjust, kind, joint=True), predict(adjust, kind)
    assert abs(joint.log_prob_joint(y) - alone.log_prob(y).sum()) > 0.01
    # the near inputs are predicted at the far ones' distance
    assert not torch.allclose(joint.variance[:3], alone.variance[:3], rtol=1e-3)


@pytest.mark.parametrize("adjust", JOINT)
def test_one_far_input_lends_its_distance_to_the_whole_set(adjust):
    with_far = torch.cat([NEAR, FAR[:1]])
    joint, alone = predict(adjust, "categorical", with_far, joint=True), predict(adjust, "categorical", with_far)
    assert joint.is_joint
    assert torch.equal(joint.distance, alone.distance.max().expand(4))
    assert alone.distance.argmax() == 3
    assert torch.equal(joint.ensemble.log_weights, joint.ensemble.log_weights[:, :1].expand(-1, 4))
    near = predict(adjust, "categorical", NEAR, joint=True)
    assert (near.distance < joint.distance[:3]).all()


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_joint_prediction_of_one_input_is_the_independent_one(kind):
    y = targets(kind)[3:4]
    joint, alone = predict("reweight", kind, FAR[:1], joint=True), predict("reweight", kind, FAR[:1])
    torch.testing.assert_close(joint.log_prob_joint(y), alone.log_prob_mixture(y)[0])


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_closed_form_inflate_refuses_a_joint_prediction(kind):
    with pytest.raises(ValueError, match=r"needs draws.*adjust=Inflate\(drawn=True\)"):
        predict("inflate", kind, joint=True)


@pytest.mark.parametrize("adjust", ["drawn", "reweight"])
def test_a_joint_density_of_independent_predictions_is_refused(adjust):
    with pytest.raises(ValueError, match=r"one distance for the whole set.*calibrated\.joint\(x\)"):
        predict(adjust, "categorical").log_prob_joint(targets("categorical"))


def test_completion_is_refused_in_regression():
    calibrated = replace(calibrated_for("gaussian"), adjust=Reweight(complete=True))
    with pytest.raises(ValueError, match=r"only classification has; use Inflate\(\) for regression"):
        calibrated(X)
