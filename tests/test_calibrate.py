"""calibrate: φ, the guard, the calibration inputs, the losses, and p-values, on small blobs and curves."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dapcal
from dapcal.adjust import Inflate, Reweight, Transport
from dapcal.calibrate import Calibrated
from dapcal.calibration.gap import GapCrossValidation
from dapcal.calibration.inputs import Around, Chosen, Given, Hardest, Misclassified
from dapcal.calibration.losses import EmpiricalBayes, LogMarginal, LogPredictive, Loss, Target
from dapcal.calibration.scales import Exp, ScaledSigmoid, Softplus
from dapcal.calibration.search import Point, search
from dapcal.data import Labelled, split
from dapcal.distances import Space
from dapcal.distances.projectors import Features, Identity
from dapcal.likelihoods import Categorical, Gaussian, NoiseHead
from dapcal.posteriors import gaussian, map, samples
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.predictions import StackedPredictions
from dapcal.types import Posterior

CENTERS = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
FAR = torch.tensor([[30.0, 30.0], [-40.0, 3.0], [0.0, 12.0], [7.0, -7.0]])
INPUTS = Space(Identity(), name="inputs")


def blobs(n: int, seed: int, deviation: float = 1.2) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    return CENTERS[y] + deviation * torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)), y


TRAIN, HELD_OUT, TEST = blobs(150, 0), blobs(260, 1), blobs(300, 2)


def network(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))


def around(model: nn.Module, likelihood, scale: float = 0.2, **options) -> NetworkPosterior:
    scales = {n: torch.full_like(p, scale) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood, scales, **{"draws": 16, "seed": 1} | options)


@functools.cache
def trained() -> nn.Module:
    return map.fit(network(), Categorical(), TRAIN, epochs=40, learning_rate=0.03).network


@functools.cache
def posterior() -> NetworkPosterior:
    return around(trained(), Categorical())


@functools.cache
def calibrated() -> Calibrated:
    return dapcal.calibrate(posterior(), train=TRAIN, held_out=HELD_OUT)


def calibrate(base: Posterior | None = None, **options) -> Calibrated:
    """Given far inputs, distance between inputs: the quick way."""
    given = {"train": TRAIN, "held_out": HELD_OUT, "ood": FAR, "distance": INPUTS, "candidates": 15}
    return dapcal.calibrate(base or posterior(), **given | options)


def halves(seed: int = 0) -> tuple[Labelled, Labelled]:
    rows = split(len(HELD_OUT[0]), torch.Generator().manual_seed(seed))
    return Labelled(*HELD_OUT).subset(rows[0]), Labelled(*HELD_OUT).subset(rows[1])


def curve_data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator) @ torch.tensor([[1.0, 0.9], [0.0, 0.45]])
    return x, torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:] + 0.1 * torch.randn(n, 1, generator=generator)


@functools.cache
def regression(outputs: int = 1) -> NetworkPosterior:
    likelihood = Gaussian(0.1) if outputs == 1 else NoiseHead()
    fitted = map.fit(network(outputs), likelihood, curve_data(100, 0), epochs=60, learning_rate=0.03)
    return around(fitted.network, fitted.likelihood, 0.05)


# The default call.


def test_the_default_call_leaves_accuracy_and_lowers_far_confidence():
    near, far = calibrated()(TEST[0]), calibrated()(FAR)
    assert torch.equal(near.probs.argmax(-1), near.base.probs.argmax(-1))
    accuracy = (near.probs.argmax(-1) == TEST[1]).double().mean()
    assert accuracy > 0.8
    confidence = far.probs.max(-1).values
    assert (confidence < far.base.probs.max(-1).values - 0.1).all()
    assert (confidence < 0.6).all()
    assert (far.epistemic > far.base.epistemic).all()
    assert far.probs.shape == (4, 3)


def test_the_default_call_says_what_it_decided():
    notes = " / ".join(calibrated().notes)
    for words in ("for the model's own errors", "synthetic outliers", "distances used:", "misclassified held-out"):
        assert words in notes


def test_test_data_pay_little_for_it():
    prediction = calibrated()(TEST[0])
    rise = prediction.base.log_prob(TEST[1]).mean() - prediction.log_prob(TEST[1]).mean()
    assert rise < 0.05


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_default_call_widens_a_regression_away_from_the_data(outputs):
    result = dapcal.calibrate(regression(outputs), train=curve_data(100, 0), held_out=curve_data(100, 1))
    far = result(torch.tensor([[4.0, -4.0], [-6.0, 6.0]]))
    assert (far.epistemic > 4 * far.base.epistemic).all()
    torch.testing.assert_close(far.aleatoric, far.base.aleatoric)
    assert torch.equal(far.mean, far.base.mean)
    x, y = curve_data(200, 2)
    prediction = result(x)
    assert prediction.base.log_prob(y).mean() - prediction.log_prob(y).mean() < 0.03


def test_a_network_alone_and_no_prior_are_enough_for_inflate():
    states = [{n: t + 0.3 * k for n, t in trained().state_dict().items()} for k in (-1, 0, 1)]
    ensemble = samples.from_state_dicts(trained(), Categorical(), states)
    assert ensemble.prior is None
    stacked = StackedPredictions(ensemble.outputs, Categorical())
    one, two = (calibrate(p)(FAR) for p in (ensemble, stacked))
    assert (one.probs.max(-1).values < one.base.probs.max(-1).values).all()
    torch.testing.assert_close(one.probs, two.probs)
    default = dapcal.calibrate(stacked, train=TRAIN, held_out=HELD_OUT)  # no network: distances between inputs
    assert [space.name for space in default.distance.spaces] == ["inputs"]
    assert math.isfinite(default.phi)


# The search.


class Counting(nn.Sequential):
    """Counts forward calls over all of its copies."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("distance", [None, INPUTS], ids=["default", "inputs"])
@pytest.mark.parametrize("adjust", [Inflate(), Inflate(drawn=True), Reweight(), Reweight(complete=True)], ids=repr)
@pytest.mark.filterwarnings("ignore:The calibration loss still falls")
def test_more_values_of_phi_cost_no_forward_pass(adjust, distance):
    counting = Counting(*trained())
    base = around(counting, Categorical())
    calls, tried = [], []
    for candidates in (5, 40):
        Counting.calls = 0
        result = calibrate(base, adjust=adjust, distance=distance, candidates=candidates)
        calls.append(Counting.calls)
        tried.append(len(result.curve.phi))
    assert calls[0] == calls[1] > 0
    assert tried[0] < 30 < 40 <= tried[1]


def test_phi_minimises_the_loss_among_what_the_guard_allows():
    curve, phi = calibrated().curve, calibrated().phi
    assert (curve.phi.diff() > 0).all()
    allowed = curve.nll + curve.error <= curve.guard
    assert allowed.any()
    assert not allowed.all()
    best = int(torch.where(allowed, curve.loss, torch.inf).argmin())
    assert float(curve.phi[best]) == phi
    assert 0 < best < len(curve.phi) - 1
    assert curve.loss[best] < curve.base_loss


def test_the_loss_of_reweight_has_an_inner_minimum():
    wide = around(trained(), Categorical(), 0.5)
    result = calibrate(wide, adjust=Reweight(), ood=2 * TEST[0], guard=None)
    curve, best = result.curve, int(result.curve.loss.argmin())
    assert float(curve.phi[best]) == result.phi
    assert 0 < best < len(curve.phi) - 1
    assert curve.loss[best] < min(curve.loss[0], curve.loss[-1]) - 1e-3
    assert curve.guard == math.inf


def test_the_curve_repeats_what_predictions_say():
    first, _ = halves()
    result = calibrate()
    at = int((result.curve.phi == result.phi).nonzero())
    prediction = result(first.x)
    assert float(-prediction.log_prob(first.y).mean()) == pytest.approx(float(result.curve.nll[at]), abs=1e-5)
    assert float(-prediction.base.log_prob(first.y).mean()) == pytest.approx(result.curve.base_nll, abs=1e-5)
    loss = ((result(FAR).probs - 1 / 3) ** 2).sum(-1).mean()
    assert float(loss) == pytest.approx(float(result.curve.loss[at]), abs=1e-5)


@pytest.mark.parametrize("adjust", [Inflate(), Inflate(drawn=True), Reweight(), Transport(step=0.5)], ids=repr)
@pytest.mark.parametrize("guard", [0.001, 0.003, 0.03])
@pytest.mark.filterwarnings("ignore:No distance improves")
@pytest.mark.filterwarnings("ignore:The calibration loss still falls")
def test_the_guard_holds_on_the_half_that_chose_phi(adjust, guard):
    result = calibrate(adjust=adjust, guard=guard, candidates=10)
    first, _ = halves()
    prediction = result(first.x)
    rise = prediction.base.log_prob(first.y).mean() - prediction.log_prob(first.y).mean()
    assert float(rise) <= guard + 1e-5
    assert result.curve.guard == pytest.approx(result.curve.base_nll + guard)


def test_a_looser_guard_reaches_further():
    tight, loose = calibrate(guard=0.001), calibrate(guard=0.05)
    assert tight.phi < loose.phi
    assert float(loose.curve.loss.min()) <= float(tight.curve.loss.min()) + 1e-9
    with pytest.warns(dapcal.DapcalWarning, match="upper edge of the search"):
        free = calibrate(guard=None)
    assert free.phi > loose.phi
    assert free.curve.guard == math.inf


def test_a_loss_that_falls_to_the_end_warns_whatever_its_last_digits():
    """Near the end the loss is flat, and rounding decides which φ is smallest."""
    with pytest.warns(dapcal.DapcalWarning, match="upper edge of the search"):
        calibrate(adjust=Reweight(), guard=None)


def test_a_loss_that_nothing_improves_warns_whatever_its_last_digits():
    """Rounding noise in a flat loss must not pass for a minimum."""

    def evaluate(factor: float) -> Point:
        return Point(loss=1 + max(factor - 1e-4, 0) + (1e-14 if factor < 1.1e-8 else 0), nll=0.0)

    with pytest.warns(dapcal.DapcalWarning, match="No distance improves the calibration loss"):
        search(evaluate, Exp(), 1.0, 0.01)


@pytest.mark.parametrize("best", [-7.77, -3.3, 0.0, 0.5, 5.2])
@pytest.mark.parametrize("candidates", [29, 30, 100])
def test_the_search_finds_a_minimum_between_grid_points(best, candidates):
    def evaluate(factor: float) -> Point:
        return Point((math.log(factor) - best) ** 2 if factor else 1e3, 0.0)

    phi, curve = search(evaluate, Exp(), 1.0, 0.01, candidates)
    assert phi == pytest.approx(best, abs=0.01)
    assert float(curve.phi[curve.loss.argmin()]) == phi


@pytest.mark.parametrize("edge", [-7.77, -3.3, 0.0, 0.5, 5.2])
@pytest.mark.parametrize("candidates", [29, 30, 100])
def test_the_search_goes_as_far_as_the_guard_allows(edge, candidates):
    def evaluate(factor: float) -> Point:
        return Point(-factor, 0.0 if factor <= math.exp(edge) else 1.0)

    phi, _ = search(evaluate, Exp(), 1.0, 0.01, candidates)
    assert edge - 0.01 <= phi <= edge


def test_no_value_of_phi_is_tried_twice():
    assert calibrated().curve.phi.diff().min() > 1e-9


class Shifted:
    """A scale of one's own: g(φ) = exp(φ + 1)."""

    def __call__(self, phi: Tensor) -> Tensor:
        return (phi + 1).exp()

    def inverse(self, factor: Tensor) -> Tensor:
        return factor.log() - 1


@pytest.mark.parametrize("scale", [Softplus(), ScaledSigmoid(1e4), Shifted()], ids=lambda s: type(s).__name__)
def test_another_scale_finds_the_same_factor(scale):
    plain, other = calibrate(), calibrate(scale=scale)
    assert other.factor == pytest.approx(plain.factor, rel=0.03)
    assert other.factor == pytest.approx(float(scale(torch.tensor(other.phi, dtype=torch.float64))))
    if isinstance(scale, Shifted):
        assert other.phi == pytest.approx(plain.phi - 1, abs=1e-9)


def test_a_sigmoid_keeps_the_factor_under_its_upper_end():
    upper = 0.5 * calibrate().factor
    with pytest.warns(dapcal.DapcalWarning, match="upper edge"):
        assert calibrate(scale=ScaledSigmoid(upper)).factor < upper


# Data.


class Pairs(Dataset):
    """A data set of pairs, labels as plain numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.x[row], int(self.y[row])


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        lambda d: Labelled(*d),
        lambda d: TensorDataset(*d),
        lambda d: Pairs(*d),
        lambda d: DataLoader(Pairs(*d), 7),
    ],
    ids=["list", "Labelled", "TensorDataset", "Dataset", "DataLoader"],
)
def test_every_way_of_giving_data_gives_the_same(wrap):
    ood = FAR, torch.tensor([0, 1, 2, 0])
    plain = calibrate(ood=ood, loss=LogPredictive())
    other = calibrate(train=wrap(TRAIN), held_out=wrap(HELD_OUT), ood=wrap(ood), loss=LogPredictive())
    assert other.phi == plain.phi
    assert torch.equal(other(TEST[0]).probs, plain(TEST[0]).probs)
    assert torch.equal(other(TEST[0]).ood_p_value, plain(TEST[0]).ood_p_value)


def test_the_halves_of_the_held_out_data_are_disjoint_and_seeded():
    seen: list[Labelled] = []

    def spy(_posterior: Posterior, train: Labelled, held_out: Labelled) -> Chosen:
        assert torch.equal(train.x, TRAIN[0])
        seen.append(held_out)
        return Chosen(FAR, None, "far inputs")

    results = [calibrate(ood=spy, seed=seed) for seed in (0, 0, 5)]
    assert torch.equal(seen[0].x, seen[1].x)
    assert torch.equal(results[0].evidence.held_out, results[1].evidence.held_out)
    assert not torch.equal(seen[0].x, seen[2].x)
    assert "far inputs" in results[0].notes[-1]
    for seed, part, result in zip((0, 0, 5), seen, results, strict=True):
        first, second = halves(seed)
        assert torch.equal(part.x, first.x)
        rows = {tuple(row) for row in HELD_OUT[0].tolist()}
        ones, twos = ({tuple(row) for row in half.x.tolist()} for half in (first, second))
        assert ones | twos == rows
        assert not ones & twos
        # the p-values come from the other half
        scores = result(second.x).ood_score.sort().values
        torch.testing.assert_close(result.evidence.held_out, scores, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_an_odd_number_of_held_out_inputs_loses_none():
    one, two = split(7, torch.Generator().manual_seed(0))
    assert sorted([*one.tolist(), *two.tolist()]) == list(range(7))
    x, y = HELD_OUT
    assert len(calibrate(held_out=(x[:51], y[:51])).evidence.held_out) == 25


# Calibration inputs.


@pytest.mark.parametrize(
    ("ood", "words"),
    [
        (FAR, "4 given inputs"),
        ((FAR, torch.tensor([0, 1, 2, 0])), "4 given inputs"),
        (Given(FAR), "4 given inputs"),
        (Around(), "200 draws from 32 Gaussians"),
        (Around(centers=FAR, number=20), "20 draws from 4 Gaussians"),
        (Misclassified(), "misclassified held-out inputs"),
        (Hardest(), "hardest 30 %"),
        (Hardest(0.5), "hardest 50 %"),
        (None, "misclassified held-out inputs"),
    ],
    ids=["tensor", "pair", "Given", "Around", "centers", "Misclassified", "Hardest", "half", "default"],
)
@pytest.mark.parametrize("adjust", [Inflate(), Reweight()], ids=["inflate", "reweight"])
def test_every_source_of_calibration_inputs(ood, words, adjust):
    result = calibrate(ood=ood, adjust=adjust, distance=replace(INPUTS, radius=0.5))
    assert words in result.notes[-1]
    assert math.isfinite(result.phi)
    far = result(FAR[2:])
    assert (far.probs.max(-1).values < far.base.probs.max(-1).values).all()


def test_given_inputs_decide():
    wide = around(trained(), Categorical(), 0.5)
    one, two = (calibrate(wide, adjust=Reweight(), ood=s * TEST[0], guard=None) for s in (2, 4))
    assert one.phi > two.phi + 0.1  # twice as far: a smaller factor


def test_calibration_inputs_inside_the_radius_are_replaced_with_a_warning():
    with pytest.warns(dapcal.DapcalWarning, match=r"all lie inside the radius.*held-out inputs outside it instead"):
        result = calibrate(ood=TRAIN[0][:20])
    assert "held-out inputs outside the radius" in result.notes[-1]


def test_few_mistakes_give_the_hardest_inputs_with_a_warning():
    x, y = HELD_OUT
    right = trained()(x).argmax(-1) == y
    with pytest.warns(dapcal.DapcalWarning, match=r"Only \d held-out inputs.*hardest 30 %.*`ood`") as caught:
        result = calibrate(held_out=(x[right], y[right]), ood=None)
    assert "hardest 30 %" in result.notes[-1]
    assert [w.filename for w in caught] == [__file__]


# Distances.


def test_the_largest_of_several_spaces_counts():
    features = Space(Features(), name="features")
    both = calibrate(distance=(INPUTS, features))
    one, two = (calibrate(distance=space).distance for space in (INPUTS, features))
    d0 = torch.maximum(one(TEST[0]), two(TEST[0]))
    assert torch.equal(both(TEST[0]).pre_distance, d0)
    assert (one(TEST[0]) > two(TEST[0])).any()
    assert (two(TEST[0]) > one(TEST[0])).any()
    assert torch.equal(both(TEST[0]).distance, d0 * both.factor)


def test_training_inputs_are_at_distance_zero_with_and_without_a_radius():
    for radius in (0.9, 0.5, None):
        result = calibrate(distance=replace(INPUTS, radius=radius))
        prediction = result(TRAIN[0])
        assert (prediction.distance == 0).all()
        assert torch.equal(prediction.probs, prediction.base.probs)
        assert (result(FAR).distance > 0).all()


@pytest.mark.parametrize("adjust", [Reweight(), Transport(), Transport(shift=True)], ids=repr)
def test_factors_per_group_change_the_adjustment(adjust):
    plain = replace(calibrate(), adjust=adjust, phi=-3.0)
    grouped = around(trained(), Categorical(), aware={"0.*": 0.1, "*": 1.0})
    subset = around(trained(), Categorical(), aware="2.*")
    assert torch.equal(grouped.draws, posterior().draws)
    probs = [replace(plain, posterior=p)(FAR).probs for p in (posterior(), grouped, subset)]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert (probs[one] - probs[two]).abs().max() > 1e-4
    again = around(trained(), Categorical(), aware={"0.*": 1.0, "2.*": 1.0})  # two groups that are as one
    torch.testing.assert_close(replace(plain, posterior=again)(FAR).probs, probs[0])


def test_factors_per_group_reach_calibrate():
    one = calibrate(adjust=Reweight())
    two = calibrate(around(trained(), Categorical(), aware={"0.*": 0.1, "*": 1.0}), adjust=Reweight())
    assert one.curve.base_loss == two.curve.base_loss
    assert float(one.curve.loss.min()) != float(two.curve.loss.min())


# In-domain calibration.


def test_a_temperature_never_raises_the_held_out_nll_and_composes():
    sharp = replace(posterior(), likelihood=Categorical(temperature=0.3))
    plain, tempered = (calibrate(sharp, temperature=flag) for flag in (False, True))
    assert tempered.curve.base_nll < plain.curve.base_nll - 0.01
    assert tempered.posterior.likelihood.temperature > 0.3
    # once more changes nothing: it multiplies the temperature that is there already
    again = calibrate(tempered.posterior, temperature=True)
    assert again.posterior.likelihood.temperature == pytest.approx(tempered.posterior.likelihood.temperature, rel=1e-2)
    assert again.curve.base_nll <= tempered.curve.base_nll + 1e-5
    assert (tempered(FAR).probs.max(-1).values < tempered(FAR).base.probs.max(-1).values).all()


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_noise_level_is_calibrated_in_regression(outputs):
    base = regression(outputs)
    noisy = replace(base, likelihood=base.likelihood.rescaled(4.0))
    data = {"train": curve_data(100, 0), "held_out": curve_data(100, 1)}
    plain, tempered = (dapcal.calibrate(noisy, temperature=flag, **data) for flag in (False, True))
    assert tempered.curve.base_nll < plain.curve.base_nll - 0.1
    x, y = curve_data(100, 2)
    assert tempered(x).log_prob(y).mean() > plain(x).log_prob(y).mean()


# p-values.


def test_far_inputs_get_the_smallest_p_value():
    prediction = calibrated()(FAR)
    smallest = 1 / (len(calibrated().evidence.held_out) + 1)
    torch.testing.assert_close(prediction.ood_p_value, torch.full_like(prediction.ood_p_value, smallest))
    inside = calibrated()(TEST[0])
    assert inside.ood_p_value.mean() > 0.4
    assert (prediction.ood_score.min() > inside.ood_score.quantile(0.99)).all()


@pytest.mark.filterwarnings("ignore:The calibration loss still falls")
def test_p_values_are_valid_in_distribution():
    """P(p <= a) <= a over held-out sets and test inputs together, and not far below."""
    small = []
    for seed in range(20):
        held_out, test = blobs(42, 100 + seed), blobs(60, 1000 + seed)
        result = calibrate(held_out=held_out, seed=seed, candidates=4, distance=(INPUTS, Space(Features())))
        small.append((result(test[0]).ood_p_value <= 0.1).double().mean())
    share = torch.stack(small)  # 2/22 = 0.091 is exact for 21 held-out scores
    assert share.mean() < 0.1 + 2 * share.std() / len(share) ** 0.5
    assert share.mean() > 0.05


def test_p_values_do_not_depend_on_phi_or_the_adjustment():
    other = replace(calibrated(), phi=2.0, adjust=Inflate(drawn=True))
    assert torch.equal(other(TEST[0]).ood_p_value, calibrated()(TEST[0]).ood_p_value)


# Losses.


def refit(x: Tensor, y: Tensor) -> NetworkPosterior:
    return around(map.fit(network(), Categorical(), (x, y), epochs=4, learning_rate=0.05).network, Categorical())


LOSSES = {
    "target": Target(),
    "own gamma": Target(gamma=(0.2, 0.3, 0.5)),
    "log predictive": LogPredictive(),
    "log marginal": LogMarginal(draws=50),
    "empirical Bayes": EmpiricalBayes(),
    "gap": GapCrossValidation(refit, regions=2),
}


@pytest.mark.parametrize("adjust", [Inflate(), Reweight()], ids=["inflate", "reweight"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("ignore:No distance improves")
@pytest.mark.filterwarnings("ignore:The calibration loss still falls")
def test_every_loss_runs_through_calibrate(loss, adjust):
    labelled = None if loss == "gap" else (HELD_OUT[0][:60] * 1.5, HELD_OUT[1][:60])
    result = calibrate(ood=labelled, loss=LOSSES[loss], adjust=adjust, candidates=15)
    assert math.isfinite(result.phi)
    assert result.curve.loss.isfinite().all()
    assert result.curve.loss.max() > result.curve.loss.min()
    allowed = torch.where(result.curve.nll + result.curve.error <= result.curve.guard, result.curve.loss, torch.inf)
    assert float(result.curve.phi[allowed.argmin()]) == result.phi
    assert result(FAR).probs.isfinite().all()


@pytest.mark.parametrize("loss", ["target", "log predictive", "log marginal", "empirical Bayes", "gap"])
@pytest.mark.filterwarnings("ignore:No distance improves")
@pytest.mark.filterwarnings("ignore:The calibration loss still falls")
def test_every_loss_runs_in_regression(loss):
    def again(x: Tensor, y: Tensor) -> NetworkPosterior:
        fitted = map.fit(network(1), Gaussian(0.3), (x, y), epochs=4, learning_rate=0.05)
        return around(fitted.network, fitted.likelihood, 0.05)

    losses = LOSSES | {"gap": GapCrossValidation(again, regions=2)}
    x, y = curve_data(60, 3)
    result = dapcal.calibrate(
        regression(),
        train=curve_data(100, 0),
        held_out=curve_data(100, 1),
        ood=None if loss == "gap" else (2 * x, y),
        loss=losses[loss],
        distance=INPUTS,
        candidates=15,
    )
    assert math.isfinite(result.phi)
    assert result(4 * x).variance.isfinite().all()


@dataclass(frozen=True)
class Constant(Loss):
    """A loss of one's own: the factor should be 2."""

    def __call__(self, problem):
        return lambda factor: (torch.tensor(factor).log() - math.log(2)).square().expand(len(problem.x))


def test_a_loss_of_ones_own():
    assert calibrate(loss=Constant(), guard=None).factor == pytest.approx(2.0, rel=0.02)
    with pytest.raises(TypeError, match=r"derive it from dapcal\.calibration\.losses\.Loss"):
        calibrate(loss=lambda problem: lambda factor: torch.zeros(len(problem.x)))
    with pytest.raises(TypeError, match=r"derive it from dapcal\.types\.Adjustment"):
        calibrate(adjust=lambda posterior, x: None)


def test_the_guard_counts_its_own_uncertainty():
    """The rise of the NLL plus its standard error stays within the guard, so few held-out inputs make φ cautious."""
    curve, phi = calibrated().curve, calibrated().phi
    at = int((curve.phi == phi).nonzero())
    assert curve.error[at] > 0
    assert curve.nll[at] + curve.error[at] <= curve.guard < curve.base_nll + 0.01 + 1e-6


def test_unknown_classes_may_be_ood_inputs():
    """Labels of OOD inputs are looked at only by losses that need them."""
    result = calibrate(ood=(FAR, torch.full((len(FAR),), 99)))
    assert result.phi == calibrate(ood=FAR).phi


@pytest.mark.filterwarnings("ignore:No distance improves")
def test_the_log_predictive_is_read_on_all_held_out_inputs_by_default():
    assert calibrate(ood=None, loss=LogPredictive()).notes[-1] == "calibrated on all held-out inputs"


def test_a_calibrated_posterior_has_a_short_repr():
    assert repr(calibrated()).startswith("Calibrated(phi=")
    assert len(repr(calibrated())) < 200


def test_gap_cross_validation_refuses_ood_inputs_it_would_not_look_at():
    with pytest.raises(ValueError, match="does not look at `ood`; leave it out"):
        calibrate(ood=FAR, loss=GapCrossValidation(refit))


def test_the_most_likely_class_stays_ahead_where_probabilities_round_to_one_number():
    """Softened to 1/K up to the last digit of float32."""
    found = calibrated()(TEST[0])
    flat = replace(found, ensemble=found.ensemble._replace(spread=torch.full_like(found.ensemble.spread, 1e14)))
    assert flat.probs.dtype == torch.float32
    assert torch.equal(flat.probs.argmax(-1), found.base.probs.argmax(-1))
    assert torch.allclose(flat.probs, torch.full_like(flat.probs, 1 / flat.probs.shape[1]), atol=1e-6)
