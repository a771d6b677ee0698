"""Likelihoods and what weighted draws predict, against torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions, nn

import dapcal
from dapcal.adjust import Inflate, Reweight, SelfNormalised
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.ensembles import base_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MeanAndNoise, NoiseHead
from dapcal.posteriors import samples
from dapcal.types import Conditional, Ensemble

S, N = 6, 5


def given(outputs: Tensor, likelihood: Likelihood):
    """The same p(y | outputs) from torch."""
    outputs = outputs.double()
    if isinstance(likelihood, Categorical):
        return distributions.Categorical(logits=outputs / likelihood.temperature)
    if isinstance(likelihood, Bernoulli):
        logit = outputs / likelihood.temperature
        return distributions.Categorical(logits=torch.cat([torch.zeros_like(logit), logit], -1))
    if isinstance(likelihood, Gaussian):
        normal = distributions.Normal(outputs, likelihood.noise)
    else:
        location, raw = outputs.chunk(2, -1)
        noise = (distributions.transforms.SoftplusTransform()(raw) + likelihood.floor) * likelihood.factor
        normal = distributions.Normal(location, noise)
    return distributions.Independent(normal, 1)


CLASSES = [Categorical(), Categorical(2.5), Bernoulli(), Bernoulli(0.4)]
NORMALS = [Gaussian(0.3), Gaussian(2.0), NoiseHead(), NoiseHead(factor=1.7, floor=0.1)]


def sizes(likelihood: Likelihood) -> tuple[int, int]:
    """Number of outputs, and of classes or targets."""
    return {Categorical: (3, 3), Bernoulli: (1, 2), Gaussian: (2, 2), NoiseHead: (4, 2)}[type(likelihood)]


def draw(likelihood: Likelihood, draws: int = S, inputs: int = N) -> tuple[Tensor, Tensor]:
    """Outputs (S, N, C) and targets (N,) or (N, K)."""
    generator = torch.Generator().manual_seed(7)
    outputs, k = sizes(likelihood)
    z = 2 * torch.randn(draws, inputs, outputs, generator=generator)
    if isinstance(likelihood, Categorical | Bernoulli):
        return z, torch.randint(k, (inputs,), generator=generator)
    return z, torch.randn(inputs, k, generator=generator)


def weighted(likelihood: Likelihood, total: float = 1.0, spread: Tensor | None = None) -> tuple[Ensemble, Tensor]:
    """An ensemble of unequal weights that sum to `total`, and the weights (S, N)."""
    outputs, _ = draw(likelihood)
    weights = torch.rand(S, N, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    weights = total * weights / weights.sum(0)
    spread = torch.zeros(N, 1, dtype=torch.float64) if spread is None else spread
    return Ensemble(outputs, likelihood.conditional(outputs), weights.log(), spread), weights


@pytest.mark.parametrize("likelihood", CLASSES + NORMALS)
def test_log_likelihood_is_torchs(likelihood):
    outputs, y = draw(likelihood)
    expected = given(outputs, likelihood).log_prob(y)
    found = likelihood.log_likelihood(outputs.double(), y)
    assert found.shape == (S, N)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(likelihood.log_likelihood(outputs[0].double(), y), expected[0])


@pytest.mark.parametrize("likelihood", CLASSES + NORMALS)
def test_log_likelihood_is_differentiable(likelihood):
    outputs, y = draw(likelihood, 2, 3)
    outputs = outputs.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: likelihood.log_likelihood(z, y), (outputs,))


@pytest.mark.parametrize("likelihood", CLASSES)
def test_conditional_moments_of_classes(likelihood):
    outputs, _ = draw(likelihood)
    expected = given(outputs, likelihood)
    mean, variance, entropy = likelihood.conditional(outputs)
    torch.testing.assert_close(mean, expected.probs)
    torch.testing.assert_close(variance, (expected.probs * (1 - expected.probs)).sum(-1))
    torch.testing.assert_close(entropy, expected.entropy())
    assert mean.dtype == torch.float64


@pytest.mark.parametrize("likelihood", NORMALS)
def test_conditional_moments_of_targets(likelihood):
    outputs, _ = draw(likelihood)
    expected = given(outputs, likelihood)
    mean, variance, entropy = likelihood.conditional(outputs)
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(variance, expected.variance)
    torch.testing.assert_close(entropy, expected.entropy())


@pytest.mark.parametrize("likelihood", CLASSES)
def test_extreme_logits(likelihood):
    outputs = torch.full((2, 1, sizes(likelihood)[0]), -1e4)
    outputs[..., 0] = 1e4
    ensemble = base_ensemble(likelihood, outputs)
    assert all(part.isfinite().all() for part in ensemble.conditional)
    assert likelihood.entropy(ensemble).item() == pytest.approx(0, abs=1e-12)
    assert likelihood.log_prob(ensemble, torch.tensor([sizes(likelihood)[1] - 1])).isfinite().all()
    assert likelihood.mean(ensemble).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("total", [1.0, 0.2, 1e-200, 3.0])
@pytest.mark.parametrize("likelihood", CLASSES)
def test_weighted_classes(likelihood, total):
    ensemble, weights = weighted(likelihood, total)
    _, y = draw(likelihood)
    p = torch.einsum("sn,snk->nk", weights, given(ensemble.outputs, likelihood).probs)
    torch.testing.assert_close(likelihood.mean(ensemble), p)
    torch.testing.assert_close(likelihood.variance(ensemble), 1 - (p**2).sum(-1))
    torch.testing.assert_close(likelihood.entropy(ensemble), -(p * p.log()).sum(-1).clamp_max(0))
    torch.testing.assert_close(likelihood.log_prob(ensemble, y), p[torch.arange(N), y].log())
    torch.testing.assert_close(likelihood.log_prob_mixture(ensemble, y), p[torch.arange(N), y].log())


@pytest.mark.parametrize("likelihood", CLASSES)
def test_a_spread_tempers_classes(likelihood):
    """softmax(log p̄ / t), t = √(1 + π/8 · V): order kept, confidence falls to 1/K."""
    confidence = []
    for size in (0.0, 1.0, 10.0, 1e9):
        ensemble, weights = weighted(likelihood, spread=torch.full((N, 1), size, dtype=torch.float64))
        p = torch.einsum("sn,snk->nk", weights, given(ensemble.outputs, likelihood).probs)
        found = likelihood.mean(ensemble)
        torch.testing.assert_close(found, (p.log() / math.sqrt(1 + math.pi / 8 * size)).softmax(-1))
        assert torch.equal(found.argmax(-1), p.argmax(-1))
        confidence.append(found.max(-1).values)
    assert (torch.stack(confidence).diff(dim=0) < 0).all()
    torch.testing.assert_close(
        confidence[-1], torch.full((N,), 1 / found.shape[-1], dtype=torch.float64), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("spread", [0.0, 0.7])
@pytest.mark.parametrize("likelihood", NORMALS)
def test_weighted_targets(likelihood, spread):
    k = sizes(likelihood)[1]
    ensemble, weights = weighted(likelihood, spread=torch.full((N, k), spread, dtype=torch.float64))
    _, y = draw(likelihood)
    parts = given(ensemble.outputs, likelihood).base_dist  # (S, N, K)
    wider = distributions.Normal(parts.mean, (parts.variance + spread).sqrt())
    mixture = distributions.MixtureSameFamily(
        distributions.Categorical(weights.T),
        distributions.Independent(distributions.Normal(wider.mean.transpose(0, 1), wider.stddev.transpose(0, 1)), 1),
    )
    torch.testing.assert_close(likelihood.mean(ensemble), mixture.mean)
    torch.testing.assert_close(likelihood.variance(ensemble), mixture.variance)
    torch.testing.assert_close(likelihood.log_prob_mixture(ensemble, y), mixture.log_prob(y.double()))
    moments = distributions.Independent(distributions.Normal(mixture.mean, mixture.stddev), 1)
    torch.testing.assert_close(likelihood.log_prob(ensemble, y), moments.log_prob(y.double()))
    torch.testing.assert_close(likelihood.entropy(ensemble), moments.entropy())
    torch.testing.assert_close(likelihood.aleatoric(ensemble), torch.einsum("sn,snk->nk", weights, parts.variance))


@pytest.mark.parametrize("total", [0.2, 3.0])
@pytest.mark.parametrize("likelihood", NORMALS)
def test_unnormalised_weights_give_unnormalised_moments(likelihood, total):
    """The paper's E[wf] and E[wf²] − E[wf]², never negative; noise over normalised weights."""
    ensemble, weights = weighted(likelihood, total)
    location = ensemble.conditional.mean
    mean = (weights[..., None] * location).sum(0)
    torch.testing.assert_close(likelihood.mean(ensemble), mean)
    noise = (weights[..., None] * ensemble.conditional.variance).sum(0) / total
    second = (weights[..., None] * location**2).sum(0) - mean**2
    torch.testing.assert_close(likelihood.variance(ensemble), noise + second.clamp_min(0))
    torch.testing.assert_close(likelihood.aleatoric(ensemble), noise)
    assert (likelihood.variance(ensemble) > 0).all()


@pytest.mark.parametrize("total", [1.0, 0.2])
@pytest.mark.parametrize("likelihood", CLASSES + NORMALS)
def test_expected_entropy(likelihood, total):
    ensemble, weights = weighted(likelihood, total)
    expected = (weights * given(ensemble.outputs, likelihood).entropy()).sum(0) / total
    torch.testing.assert_close(likelihood.expected_entropy(ensemble), expected)


@pytest.mark.parametrize("likelihood", CLASSES)
def test_samples_of_classes(likelihood, generator):
    ensemble, _ = weighted(likelihood)
    drawn = likelihood.sample(ensemble, 20_000, generator)
    assert drawn.shape == (20_000, N)
    k = sizes(likelihood)[1]
    frequency = torch.nn.functional.one_hot(drawn, k).double().mean(0)
    torch.testing.assert_close(frequency, likelihood.mean(ensemble), atol=0.02, rtol=0)


@pytest.mark.parametrize("likelihood", NORMALS)
def test_samples_and_intervals_of_targets(likelihood, generator):
    ensemble, _ = weighted(likelihood, spread=torch.full((N, 2), 0.5, dtype=torch.float64))
    drawn = likelihood.sample(ensemble, 20_000, generator)
    assert drawn.shape == (20_000, N, 2)
    mean, deviation = likelihood.mean(ensemble), likelihood.variance(ensemble).sqrt()
    assert ((drawn.mean(0) - mean).abs() < 5 * deviation / 20_000**0.5).all()
    torch.testing.assert_close(drawn.std(0), deviation, rtol=0.03, atol=0)
    for level in (0.5, 0.95, 0.999):
        lower, upper = likelihood.interval(ensemble, level)
        normal = distributions.Normal(mean, deviation)
        torch.testing.assert_close(normal.cdf(upper) - normal.cdf(lower), torch.full_like(mean, level))
        torch.testing.assert_close((lower + upper) / 2, mean)
        covered = ((drawn > lower) & (drawn < upper)).double().mean(0)
        torch.testing.assert_close(covered, torch.full_like(mean, level), atol=0.02, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_bernoulli_is_a_categorical_of_zero_and_the_logit(temperature):
    one, two = Bernoulli(temperature), Categorical(temperature)
    logit, y = draw(one)
    both = torch.cat([torch.zeros_like(logit), logit], -1)
    torch.testing.assert_close(one.log_likelihood(logit, y), two.log_likelihood(both, y))
    for first, second in zip(one.conditional(logit), two.conditional(both), strict=True):
        torch.testing.assert_close(first, second)
    alone, pair = base_ensemble(one, logit), base_ensemble(two, both)
    torch.testing.assert_close(one.mean(alone), two.mean(pair))
    torch.testing.assert_close(one.log_prob(alone, y), two.log_prob(pair, y))


@pytest.mark.parametrize("drawn", [False, True])
def test_bernoulli_is_inflated_like_a_categorical_of_zero_and_the_logit(drawn):
    logit, _ = draw(Bernoulli())
    distance = torch.linspace(0, 3, N)

    def inflated(likelihood: Likelihood, outputs: Tensor) -> Tensor:
        posterior = dapcal.posteriors.predictions.StackedPredictions(lambda _: outputs, likelihood)
        return likelihood.mean(Inflate(drawn)(posterior, torch.zeros(N, 1))(distance))

    both = torch.cat([torch.zeros_like(logit), logit], -1)
    torch.testing.assert_close(inflated(Bernoulli(), logit), inflated(Categorical(), both))


@pytest.mark.parametrize("likelihood", [Categorical(), Categorical(2.5), *NORMALS])
def test_location_variance(likelihood):
    outputs, _ = draw(likelihood)
    if isinstance(likelihood, Categorical):
        centred = outputs.double() / likelihood.temperature
        centred = centred - centred.mean(-1, keepdim=True)
        expected = centred.var(0, correction=0).mean(-1, keepdim=True)
        shifted = outputs + torch.randn(S, N, 1)  # a constant added to all logits of a draw says nothing
        torch.testing.assert_close(likelihood.location_variance(shifted), expected, rtol=1e-5, atol=1e-5)
    elif isinstance(likelihood, NoiseHead):
        expected = outputs[..., :2].double().var(0, correction=0)
    else:
        expected = outputs.double().var(0, correction=0)
    torch.testing.assert_close(likelihood.location_variance(outputs), expected)


@pytest.mark.parametrize("likelihood", CLASSES + NORMALS)
def test_stretch_pushes_locations_alone(likelihood):
    outputs, _ = draw(likelihood)
    k = torch.tensor([1.0, 1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    pushed = likelihood.stretch(outputs, k)
    assert torch.equal(pushed[:, :2], outputs[:, :2])
    locations = slice(2) if isinstance(likelihood, NoiseHead) else slice(None)
    before, after = outputs[..., locations], pushed[..., locations]
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.std(0), before.std(0) * k[:, None].float())
    if isinstance(likelihood, NoiseHead):
        assert torch.equal(pushed[..., 2:], outputs[..., 2:])


@pytest.mark.parametrize("likelihood", CLASSES)
def test_rescaled_temperature(likelihood):
    outputs, y = draw(likelihood)
    torch.testing.assert_close(
        likelihood.rescaled(3.0).log_likelihood(outputs, y), likelihood.log_likelihood(outputs / 3, y)
    )
    assert likelihood.rescaled(3.0).rescaled(2.0).temperature == pytest.approx(6 * likelihood.temperature)


@pytest.mark.parametrize("likelihood", NORMALS)
def test_rescaled_noise(likelihood):
    outputs, _ = draw(likelihood)
    before, after = likelihood.conditional(outputs), likelihood.rescaled(3.0).conditional(outputs)
    torch.testing.assert_close(after.variance, 9 * before.variance)
    assert torch.equal(after.mean, before.mean)


def test_gaussian_noise_is_free_on_a_log_scale():
    free = Gaussian(0.3).free()
    assert free["log_noise"].item() == pytest.approx(math.log(0.3))
    assert Gaussian(5.0).at(free).noise == pytest.approx(0.3)
    learning = {"log_noise": free["log_noise"].clone().requires_grad_()}
    Gaussian().at(learning).log_likelihood(torch.zeros(4, 1), torch.ones(4, 1)).sum().backward()
    assert learning["log_noise"].grad.item() == pytest.approx(4 * (1 / 0.09 - 1), rel=1e-5)
    assert Categorical().free() == {}


@pytest.mark.parametrize("noise", [0.0, -1.0, math.inf, math.nan])
def test_noise_must_be_positive(noise):
    with pytest.raises(ValueError, match="Expected `noise` > 0"):
        Gaussian(noise)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "message"),
    [
        (
            Categorical(),
            3,
            torch.tensor([0.0, 1.5]),
            "whole numbers as class labels, got fractions; for regression use Gau",
        ),
        (Categorical(), 3, torch.tensor([0.0, math.nan]), "whole numbers as class labels"),
        (Categorical(), 3, torch.tensor([0, 3]), r"between 0 and 2 \(the model's outputs\), got 0 to 3"),
        (Categorical(), 3, torch.tensor([-1, 0]), "got -1 to 0"),
        (Categorical(), 3, torch.tensor([0, 1, 2]), r"labels of shape \(2,\), got \(3,\)"),
        (Categorical(), 3, torch.eye(3)[:2], r"labels of shape \(2,\), got one-hot rows \(2, 3\); use y.argmax\(1\)"),
        (Categorical(), 3, torch.full((2, 3), 1 / 3), r"got soft labels \(2, 3\).*y.argmax\(1\)"),
        (Categorical(), 3, torch.ones(2, 3).long(), r"got zeros and ones \(2, 3\).*MultiLabel\(\)"),
        (Categorical(), 3, torch.zeros(2, 3) - 1, r"got \(2, 3\); give one class for every input"),
        (Categorical(), 3, torch.zeros(2, 4, 5), r"PerPlace\(Categorical\(\), places=\(4, 5\)\)"),
        (Categorical(), 3, torch.tensor([-100, 0]), r"got -100 to 0; drop rows .*\(x\[y >= 0\], y\[y >= 0\]\)"),
        (Categorical(), 1, torch.tensor([0, 1]), "at least 2 outputs .* use dapcal.likelihoods.Bernoulli"),
        (Bernoulli(), 2, torch.tensor([0, 1]), r"1 output \(a logit\) for Bernoulli, got 2"),
        (Bernoulli(), 1, torch.tensor([0, 2]), "between 0 and 1"),
        (Bernoulli(), 1, torch.tensor([-1.0, 1.0]), "got -1 to 1"),
        (
            Gaussian(),
            1,
            torch.tensor([0, 2]),
            r"floating-point targets for regression, got torch.int64; use y.float\(\)",
        ),
        (Gaussian(), 1, torch.tensor([0.0, math.nan]), "finite targets, got NaN or inf; drop those rows"),
        (Gaussian(), 1, torch.tensor([0.0, math.inf]), "finite targets"),
        (Gaussian(), 2, torch.zeros(2), r"targets of shape \(2, 2\), got \(2, 1\)"),
        (Gaussian(), 1, torch.zeros(2, 3), r"targets of shape \(2, 1\), got \(2, 3\)"),
        (NoiseHead(), 3, torch.zeros(2), "even number of outputs .*, got 3"),
        (NoiseHead(), 4, torch.zeros(2), r"targets of shape \(2, 2\)"),
        (NoiseHead(), 2, torch.tensor([0, 2]), "floating-point targets"),
    ],
)
def test_bad_targets_are_refused(likelihood, outputs, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check(torch.zeros(5, 2, outputs), y)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "expected"),
    [
        (Categorical(), 3, torch.tensor([0.0, 2.0]), torch.tensor([0, 2])),
        (Categorical(), 3, torch.tensor([[0], [2]], dtype=torch.uint8), torch.tensor([0, 2])),
        (Bernoulli(), 1, torch.tensor([True, False]), torch.tensor([1, 0])),
        (Gaussian(), 1, torch.tensor([0.5, 2.0]), torch.tensor([[0.5], [2.0]])),
        (NoiseHead(), 4, torch.ones(2, 2), torch.ones(2, 2)),
    ],
)
def test_good_targets_take_the_shape_that_is_wanted(likelihood, outputs, y, expected):
    for z in (torch.zeros(2, outputs), torch.zeros(5, 2, outputs)):
        checked = likelihood.check(z, y)
        assert torch.equal(checked, expected)
        assert checked.dtype == expected.dtype


def test_two_networks_as_one_model():
    model = MeanAndNoise(nn.Linear(3, 1), nn.Linear(3, 1))
    x = torch.randn(4, 3)
    torch.testing.assert_close(model(x), torch.cat([model.mean(x), model.noise(x)], 1))
    assert {n.split(".")[0] for n, _ in model.named_parameters()} == {"mean", "noise"}


def test_classes_have_no_intervals():
    with pytest.raises(TypeError, match="Categorical has no intervals; classification has `prediction_set`"):
        Categorical().interval(weighted(Categorical())[0], 0.9)


class Poisson(Likelihood):
    """Counts with rate exp(output): a user's own likelihood, three methods."""

    def conditional(self, outputs: Tensor) -> Conditional:
        rate = outputs.double().exp()
        return Conditional(rate, rate, torch.zeros_like(rate[..., 0]))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (y * outputs - outputs.exp() - torch.lgamma(y + 1)).sum(-1)

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        if (y < 0).any() or (y != y.round()).any():
            raise ValueError("Expected counts")
        return y.reshape(-1, 1).to(outputs.dtype)


def counts(deviation: float):
    """A posterior over log-linear rates under a unit prior, with training and held-out data that it fits."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.5 + deviation * torch.randn(100, 1, 2, generator=generator)
    bias = 1 + deviation * torch.randn(100, 1, generator=generator)
    posterior = samples.from_stacked(nn.Linear(2, 1), Poisson(), {"weight": weight, "bias": bias}, prior_scale=1.0)

    def data(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 2, generator=generator)
        return x, torch.poisson((0.5 * x.sum(1) + 1).exp(), generator=generator)

    return posterior, data(100), data(100)


def mixture(outputs: Tensor, weights: Tensor) -> distributions.Distribution:
    return distributions.MixtureSameFamily(
        distributions.Categorical(weights.T), distributions.Poisson(outputs[..., 0].double().exp().T)
    )


@pytest.mark.parametrize(
    ("adjust", "deviation", "surprise"), [(Inflate(drawn=True), 0.05, 1.7), (Reweight(SelfNormalised()), 0.3, 3.0)]
)
@pytest.mark.filterwarnings("ignore:The calibration loss still falls")
def test_a_likelihood_of_ones_own(adjust, deviation, surprise):
    posterior, train, held_out = counts(deviation)
    far = torch.tensor([[3.0, 3.0], [4.0, 1.0], [0.0, 5.0]])
    calibrated = dapcal.calibrate(
        posterior,
        train=train,
        held_out=held_out,
        ood=(far, (surprise * (0.5 * far.sum(1) + 1).exp()).round()),
        distance=Space(Identity(), radius=0.9, name="inputs"),
        adjust=adjust,
        loss=dapcal.calibration.losses.LogPredictive(),
    )
    x = torch.cat([far, train[0][:5]])
    prediction = calibrated(x)
    ensemble = prediction.ensemble
    expected = mixture(ensemble.outputs, ensemble.log_weights.exp())
    torch.testing.assert_close(prediction.mean[:, 0], expected.mean.float())
    torch.testing.assert_close(prediction.variance[:, 0], expected.variance.float(), rtol=1e-4, atol=1e-5)
    y = torch.tensor([20.0, 0.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    torch.testing.assert_close(prediction.log_prob(y), expected.log_prob(y.double()).float())
    torch.testing.assert_close(prediction.base.mean[3:], prediction.mean[3:])
    assert (prediction.mean[:3] - prediction.base.mean[:3]).abs().max() > 1e-3
    assert prediction.ood_p_value[:3].max() < 0.05
    with pytest.raises(TypeError, match="Poisson gives no predictive entropy"):
        _ = prediction.entropy
    with pytest.raises(TypeError, match="Poisson has no in-domain calibration"):
        dapcal.calibrate(posterior, train=train, held_out=held_out, temperature=True)


def test_a_likelihood_without_a_closed_form_refuses_a_spread():
    posterior, _, (x, y) = counts(0.1)
    ensemble = Inflate()(posterior, x)(torch.ones(len(x)))
    with pytest.raises(TypeError, match=r"Poisson has no density with an analytic spread; use Inflate\(drawn=True\)"):
        posterior.likelihood.log_prob(ensemble, y[:, None])
