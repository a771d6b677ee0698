"""A trained network is enough: likelihood, posterior, and harm measured against the network itself."""

import pytest
import torch
from torch import nn

import dapcal
from dapcal.calibration.in_domain import scaled_where_it_helps
from dapcal.calibration.reference import OF_MOMENTS, choose_reference, outputs_alone
from dapcal.calibration.summary import leave_one_out
from dapcal.data import Labelled
from dapcal.ensembles import base_ensemble, seen
from dapcal.gaussians import DiagonalGaussian, FullGaussian, KroneckerGaussian, LowRankGaussian
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import dropout, ensemble, laplace, map, swag, variational
from dapcal.posteriors.plain import likelihood_for, refuse_sigmoids

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # few held-out inputs are wrong


def trained(outputs=3, hidden=16, steps=150, noise=0.3, seed=0, drop=0.0, n=300):
    """A network that fits its few training inputs closely, its data, and others of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * n, 2, generator=generator)
    score = x[:, 0] + x[:, 1].abs() + noise * torch.randn(2 * n, generator=generator)
    regression = outputs == "number"
    y = score[:, None] if regression else (score > 0).long() + (score > 1.5).long()
    y = y.clamp_max(1) if outputs == 1 else y
    width = 1 if regression else outputs
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Dropout(drop), nn.Linear(hidden, width))
    optimizer = torch.optim.Adam(network.parameters(), 0.03)
    for _ in range(steps):
        out = network(x[:n])
        loss = (
            nn.functional.mse_loss(out, y[:n])
            if regression
            else nn.functional.binary_cross_entropy_with_logits(out[:, 0], y[:n].float())
            if outputs == 1
            else nn.functional.cross_entropy(out, y[:n])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network, (x[:n], y[:n]), (x[n:], y[n:])


@pytest.mark.parametrize(("outputs", "kind"), [(3, Categorical), (1, Bernoulli), ("number", Gaussian)])
def test_a_trained_network_is_calibrated_as_it_is(outputs, kind, tmp_path):
    network, train, held_out = trained(outputs)
    network.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    calibrated = dapcal.calibrate(network, train=train, held_out=held_out)
    assert network.training, "the network is left in its mode"
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert isinstance(calibrated.posterior.likelihood, kind)
    summary = calibrated.summary()
    assert summary.rows == 150
    assert summary.calibrated.nll <= min(summary.network.nll, summary.posterior.nll) + 0.05
    far, near = calibrated(torch.full((1, 2), 30.0)), calibrated(train[0][:50])
    assert far.ood_p_value[0] < 0.05 < near.ood_p_value.median()
    calibrated.save(tmp_path / "m.dap")
    again = dapcal.load(tmp_path / "m.dap", network)
    assert again.summary() == summary
    assert str(summary.rows) in str(again.summary())


@pytest.mark.parametrize("noise", [None, 2.0])
def test_far_from_the_data_intervals_are_wide(noise):
    """Also where the noise level that was given is far too high in the domain, and was lowered there."""
    network, train, held_out = trained("number")
    likelihood = None if noise is None else Gaussian(noise)
    calibrated = dapcal.calibrate(network, likelihood, train=train, held_out=held_out)
    near, far = calibrated(held_out[0]), calibrated(torch.full((1, 2), 30.0))
    one_deviation = [float((said.interval(0.6827).upper - said.mean).mean()) for said in (near, far)]
    assert one_deviation[0] < 0.5
    assert one_deviation[1] > 2.0


def test_the_likelihood_that_was_given_counts():
    network, train, held_out = trained(3)
    calibrated = dapcal.calibrate(network, Categorical(2.0), train=train, held_out=held_out, temperature=False)
    assert calibrated.posterior.likelihood == Categorical(2.0)
    with pytest.raises(TypeError, match="already"):
        dapcal.calibrate(calibrated.posterior, Categorical(), train=train, held_out=held_out)


@pytest.mark.parametrize(
    ("outputs", "y", "words"),
    [
        (3, torch.tensor([0, 1, 5, 2]), "Categorical"),
        (3, torch.tensor([0, 1, 1, 0]), "Categorical"),  # an output that no target belongs to
        (1, torch.tensor([0, 3, 2, 1]), "counts"),
        (1, torch.tensor([0.0, 1.0, 1.0, 0.0]), "Bernoulli"),
        (2, torch.tensor([0.1, 1.0, 1.2, 0.0]), "NoiseHead"),
        (2, 2 * torch.ones(4, 2).long(), "whole-number"),
    ],
)
def test_what_is_in_doubt_is_asked_for(outputs, y, words):
    with pytest.raises(ValueError, match=words):
        likelihood_for(nn.Linear(2, outputs), Labelled(torch.randn(4, 2), y))


def test_outputs_of_a_softmax_are_refused():
    network = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    with pytest.raises(ValueError, match="logits"):
        likelihood_for(network, Labelled(torch.randn(4, 2), torch.tensor([0, 1, 1, 0])))


class _Squashed(nn.Module):
    """Probabilities in place of logits, made in the forward method, where no layer shows it."""

    def __init__(self, network, squash):
        super().__init__()
        self.network, self.squash = network, squash

    def forward(self, x):
        return self.squash(self.network(x))


@pytest.mark.parametrize("as_layer", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("outputs", "likelihood", "words"), [(1, Bernoulli(), "as a sigmoid does"), (3, Categorical(), "as a softmax does")]
)
def test_probabilities_in_place_of_logits_are_refused(outputs, likelihood, words, given, as_layer):
    network, train, held_out = trained(outputs)
    order = train[1].sort().indices  # a file is often sorted by its classes
    train = train[0][order], train[1][order]
    last, squash = (nn.Sigmoid(), torch.sigmoid) if outputs == 1 else (nn.Softmax(-1), lambda z: z.softmax(-1))
    squashed = nn.Sequential(network, last) if as_layer else _Squashed(network, squash)
    with pytest.raises(ValueError, match=words):
        dapcal.calibrate(squashed, likelihood if given else None, train=train, held_out=held_out)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("scale", [0.0, 0.02, 0.3])
def test_logits_near_zero_are_no_probabilities(scale, share):
    """Of networks that have learnt nothing, or next to nothing, with all of their logits in [0, 1]."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        outputs = (0.1 + scale * torch.rand(256, 1, generator=generator)) * (scale > 0)
        refuse_sigmoids(outputs, (torch.rand(256, generator=generator) < share).long())
        both = torch.cat([outputs, outputs.flip(0)], 1)
        refuse_sigmoids(both, (torch.rand(256, 2, generator=generator) < share).long())


def test_logits_that_are_all_slightly_positive_are_no_probabilities():
    """The truth is what they say as logits, between 0.5 and 0.73."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        outputs = torch.rand(256, 1, generator=generator)
        refuse_sigmoids(outputs, (torch.rand(256, 1, generator=generator) < outputs.sigmoid()).long()[:, 0])


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_probabilities_of_rare_and_of_frequent_classes_are_told_from_logits(share):
    generator = torch.Generator().manual_seed(0)
    p = (torch.logit(torch.tensor(share)) + 2 * torch.randn(256, 1, generator=generator)).sigmoid()
    y = (torch.rand(256, 1, generator=generator) < p).long()[:, 0]
    with pytest.raises(ValueError, match=r"torch\.logit"):
        refuse_sigmoids(p, y)
    refuse_sigmoids(torch.logit(p), y)


def calibrated_as_it_is(network, likelihood, train):
    return dapcal.calibrate(network, likelihood, train=train, held_out=train)


FITS = {
    "map": lambda network, likelihood, train: map.fit(network, likelihood, train, epochs=1),
    "swag": lambda network, likelihood, train: swag.fit(network, likelihood, train, epochs=4),
    "variational": lambda network, likelihood, train: variational.fit(network, likelihood, train, epochs=1),
    "laplace": laplace.fit,
    "ensemble": lambda network, likelihood, train: ensemble.fit(lambda: network, likelihood, train, epochs=1),
    "trained": lambda network, likelihood, _: ensemble.of([network, network], likelihood),
    "dropout": lambda network, likelihood, _: dropout.wrap(network, likelihood),
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_no_posterior_is_fitted_around_a_last_layer_of_probabilities(fit):
    network, train, _ = trained(3, steps=0, drop=0.1)
    with pytest.raises(ValueError, match="ends in logits, got one that ends in Softmax; leave"):
        fit(nn.Sequential(network, nn.Softmax(-1)), Categorical(), train)
    one = trained(1, steps=0, drop=0.1)[0]
    with pytest.raises(ValueError, match="ends in Sigmoid"):
        fit(nn.Sequential(one, nn.Sequential(nn.Sigmoid())), Bernoulli(), (train[0], train[1].clamp_max(1)))


def test_numbers_between_0_and_1_are_predicted_by_a_sigmoid_as_they_are():
    network, (x, y), _ = trained("number", steps=0)
    laplace.fit(nn.Sequential(network, nn.Sigmoid()), Gaussian(0.1), (x, y.sigmoid()))
    laplace.fit(nn.Sequential(trained(3)[0], nn.LogSoftmax(-1)), Categorical(), (x, torch.arange(len(x)) % 3))


@pytest.mark.parametrize(
    ("likelihood", "words"),
    [(Categorical, r"got the class Categorical; add \(\)"), ("categorical", "got 'categorical'")],
)
@pytest.mark.parametrize("fit", [*FITS.values(), calibrated_as_it_is], ids=[*FITS, "calibrate"])
def test_a_class_in_place_of_a_likelihood_is_named(fit, likelihood, words):
    network, train, _ = trained(3, steps=0, drop=0.1)
    with pytest.raises(TypeError, match=words):
        fit(network, likelihood, train)


@pytest.mark.parametrize("likelihood", [None, Categorical()])
def test_classes_from_1_to_k_are_to_be_numbered_from_0(likelihood):
    network, (x, y), held_out = trained(3, steps=0)
    with pytest.raises(ValueError, match="number them from 0: y - 1"):
        dapcal.calibrate(network, likelihood, train=(x, y + 1), held_out=(held_out[0], held_out[1] + 1))


def test_soft_labels_are_no_numbers():
    network, (x, _), held_out = trained(3, steps=0)
    soft = torch.rand(len(x), 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    with pytest.raises(ValueError, match=r"soft labels \(300, 3\).*y\.argmax\(1\).*multinomial.*Gaussian\(\)"):
        dapcal.calibrate(network, train=(x, soft), held_out=(held_out[0], soft))
    assert isinstance(likelihood_for(network, Labelled(x, 1.1 * soft)), Gaussian)
    dapcal.calibrate(network, Gaussian(0.1), train=(x, soft), held_out=(held_out[0], soft))


def test_a_network_without_a_last_linear_layer_is_taken_whole_or_refused(monkeypatch):
    network, train, held_out = trained(3)
    scaled = nn.Sequential(network, _Bounded())
    calibrated = dapcal.calibrate(scaled, train=train, held_out=held_out)
    assert isinstance(calibrated.posterior.gaussian, KroneckerGaussian)
    assert calibrated.summary().calibrated.nll < calibrated.summary().network.nll + 0.05
    monkeypatch.setattr("dapcal.posteriors.plain.LARGEST", 10)
    with pytest.raises(ValueError, match="too many"):
        dapcal.calibrate(scaled, train=train, held_out=held_out)


class _Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return 8 * torch.tanh(self.factor * x / 8)


def test_held_out_data_choose_the_prior_scale_of_a_laplace_approximation():
    network, train, held_out = trained(3, steps=600, n=60)
    chosen = laplace.last_layer(network, Categorical(), train, held_out=held_out)
    written_out = laplace.last_layer(network, Categorical(), train, prior_scale=laplace.HeldOut(held_out))
    assert torch.equal(chosen.prior.sigma0, written_out.prior.sigma0)

    def nll(posterior):
        from dapcal.ensembles import seen

        return float(-Categorical().log_prob(seen(posterior, held_out[0]), held_out[1]).mean())

    others = [laplace.last_layer(network, Categorical(), train, prior_scale=scale) for scale in (1e-4, 0.05, 1.0, 20.0)]
    assert nll(chosen) <= min(nll(other) for other in others) + 1e-3
    assert float(laplace.last_layer(network, Categorical(), train).prior.sigma0[0]) == 1.0
    with pytest.raises(ValueError, match="both"):
        laplace.last_layer(network, Categorical(), train, prior_scale=1.0, held_out=held_out)


GAUSSIANS = {
    "diagonal": lambda: DiagonalGaussian(torch.zeros(4), torch.tensor([1.0, 2.0, 0.5, 0.1])),
    "full": lambda: FullGaussian(torch.zeros(4), torch.diag(torch.arange(1.0, 5.0)) + 0.3),
    "low rank": lambda: LowRankGaussian(torch.zeros(4), torch.ones(4), torch.arange(8.0).reshape(4, 2)),
}


@pytest.mark.parametrize("name", GAUSSIANS)
def test_a_narrowed_gaussian_has_draws_narrowed_by_as_much(name):
    gaussian = GAUSSIANS[name]()
    wide, narrow = (g.sample(5, torch.Generator().manual_seed(0)) for g in (gaussian, gaussian.narrowed(0.3)))
    assert torch.allclose(narrow, 0.3 * wide, atol=1e-6)


def test_a_narrowed_posterior_lies_between_itself_and_its_network():
    network, train, held_out = trained(3, drop=0.3)
    network.eval()
    around = laplace.fit(network, Categorical(), train, linearised=False, draws=5)
    for posterior in (around, dropout.wrap(network, Categorical(), draws=5)):
        x = held_out[0][:20]
        alone = outputs_alone(posterior.alone, x)
        assert torch.equal(posterior.narrowed(1.0).outputs(x), posterior.outputs(x))
        assert torch.allclose(posterior.narrowed(0.0).outputs(x), alone.expand(5, -1, -1), atol=1e-5)
    linear = laplace.last_layer(network, Categorical(), train)
    assert torch.allclose(linear.narrowed(0.5).moments(x).variance, 0.25 * linear.moments(x).variance)


def test_a_posterior_that_is_worse_than_its_network_is_narrowed():
    """σ0 far too wide: the harm of a prior scale that nobody chose."""
    network, train, held_out = trained(3, hidden=100, noise=0.0, steps=60)
    posterior = laplace.last_layer(network, Categorical(), train, prior_scale=30.0)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out)
    summary = calibrated.summary()
    assert summary.posterior.nll > summary.network.nll + 0.01, "the case is one"
    assert summary.calibrated.nll <= summary.reference.nll + 0.03
    assert any("is worse than its network" in note for note in calibrated.notes)
    as_paper = dapcal.calibrate(posterior, train=train, held_out=held_out, guard=None)
    assert not any("is worse than its network" in note for note in as_paper.notes)


def test_an_ensemble_has_no_network_that_it_lies_around():
    networks = [trained(3, seed=seed)[0] for seed in range(3)]
    _, _, held_out = trained(3)
    posterior = dapcal.posteriors.ensemble.of(networks, Categorical())
    reference = choose_reference(posterior, Labelled(*held_out), drawn=False, scaling=False, guard=0.01)
    assert (reference.name, reference.network, reference.share) == ("posterior", None, 1.0)


def test_the_guard_counts_from_the_better_of_network_and_posterior():
    network, train, held_out = trained(3, hidden=100, noise=0.0, steps=60)
    posterior = laplace.last_layer(network, Categorical(), train, prior_scale=30.0)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, temperature=False)
    chooses = Labelled(held_out[0][calibrated.chooses], held_out[1][calibrated.chooses])
    alone = base_ensemble(Categorical(), outputs_alone(network.eval(), chooses.x)[None])
    best = float(-Categorical().log_prob(alone, chooses.y).mean())
    assert calibrated.curve.guard == pytest.approx(best + 0.01, abs=1e-6)


def test_with_few_rows_too_the_guard_counts_from_the_better_one():
    """Sixty rows hardly tell a network from its posterior, and still neither may be left behind."""
    network, _, held_out = trained(3, hidden=64, drop=0.3)
    network, posterior = network.eval(), dropout.wrap(network, Categorical(), draws=10)
    draws, narrowed = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        rows = torch.randperm(len(held_out[0]), generator=draws)[:60]
        chooses = Labelled(held_out[0][rows], held_out[1][rows])
        alone = Categorical().log_prob(base_ensemble(Categorical(), outputs_alone(network, chooses.x)[None]), chooses.y)
        together = Categorical().log_prob(base_ensemble(Categorical(), posterior.outputs(chooses.x)), chooses.y)
        found = choose_reference(posterior, chooses, drawn=False, scaling=False, guard=0.01)
        assert float(found.log_prob.mean()) == pytest.approx(max(alone.mean().item(), together.mean().item()), abs=1e-6)
        narrowed += found.share < 1
    assert narrowed > 0, "no case is one"


def test_a_posterior_is_narrowed_no_further_than_that_gains():
    """The network is the limit of narrow ones, and would leave no doubt."""
    network, train, held_out = trained(3, hidden=100, noise=0.0, steps=60)
    posterior = laplace.last_layer(network, Categorical(), train, prior_scale=30.0)
    data = Labelled(*held_out)
    found = choose_reference(posterior, data, scaling=False, guard=0.01)

    def nll(share):
        narrow = posterior.narrowed(share)
        return -float(Categorical().log_prob(seen(narrow, data.x), data.y).mean())

    values = {share: nll(share) for share in OF_MOMENTS}
    wider = [share for share in OF_MOMENTS if share > found.share]
    assert values[found.share] <= min(values.values()) + 0.001
    assert all(values[share] > min(values.values()) + 0.001 for share in wider)


def test_the_temperature_that_is_told_is_the_one_in_use():
    """Of a narrowed posterior it is its network's."""
    network, train, held_out = trained(3, hidden=100, noise=0.0, steps=60)
    posterior = laplace.last_layer(network, Categorical(), train, prior_scale=30.0)
    for scaling in (True, None):
        found = choose_reference(posterior, Labelled(*held_out), scaling=scaling, guard=0.01)
        assert found.share < 1
        told = [note for note in found.notes if "calibrated in the domain" in note]
        assert len(told) == (found.posterior.likelihood != Categorical())
        for note in told:
            number = float(note.partition("temperature=")[2].partition(")")[0])
            assert number == pytest.approx(found.posterior.likelihood.temperature, rel=0.01)


def logits(n, temperature, classes=3, seed=0):
    """Outputs that are too sure by a known temperature, and labels that follow the right probabilities."""
    generator = torch.Generator().manual_seed(seed)
    right = 2 * torch.randn(n, classes, generator=generator)
    y = torch.multinomial(right.softmax(-1), 1, generator=generator)[:, 0]
    return right * temperature, y


def test_a_temperature_is_taken_where_it_helps_rows_that_did_not_choose_it():
    outputs, y = logits(2000, 3.0)
    found = scaled_where_it_helps(lambda likelihood: base_ensemble(likelihood, outputs[None]), Categorical(), y)
    assert found.temperature == pytest.approx(3.0, rel=0.15)
    outputs, y = logits(2000, 1.0)
    kept = [
        scaled_where_it_helps(lambda likelihood, o=o: base_ensemble(likelihood, o[None]), Categorical(), y)
        for o, y in (logits(200, 1.0, seed=seed) for seed in range(20))
    ]
    assert sum(likelihood == Categorical() for likelihood in kept) >= 12  # it is right as it is


def test_few_errors_never_sharpen():
    y = torch.arange(3).repeat(50)
    outputs = 3 * nn.functional.one_hot(y, 3).float()  # all right: the sharpest would seem best
    found = scaled_where_it_helps(lambda likelihood: base_ensemble(likelihood, outputs[None]), Categorical(), y)
    assert found.temperature >= 1


def test_few_rows_lower_a_noise_level_only_if_that_gains_clearly():
    y = 0.2 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    read = lambda likelihood: base_ensemble(likelihood, torch.zeros(1, 60, 1))  # noqa: E731
    assert scaled_where_it_helps(read, Gaussian(2.0), y).noise == pytest.approx(0.2, rel=0.25)
    assert scaled_where_it_helps(read, Gaussian(0.05), y).noise == pytest.approx(0.2, rel=0.25)
    y[7] = 1.5  # one large error: half of the rows do not know of it
    assert scaled_where_it_helps(read, Gaussian(0.4), y) == Gaussian(0.4)


def test_a_noise_level_is_scaled_both_ways():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(500, 1, generator=generator)
    for noise in (0.2, 5.0):
        read = lambda likelihood: base_ensemble(likelihood, torch.zeros(1, 500, 1))  # noqa: E731
        assert scaled_where_it_helps(read, Gaussian(noise), y).noise == pytest.approx(1.0, rel=0.1)
    outputs = torch.stack([torch.zeros(500), torch.full((500,), -2.0)], -1)
    found = scaled_where_it_helps(lambda likelihood: base_ensemble(likelihood, outputs[None]), NoiseHead(), y)
    assert found != NoiseHead()


def test_leave_one_out_p_values_by_brute_force():
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0])
    expected = [
        (1 + sum(float(other) >= float(s) for j, other in enumerate(scores) if j != i)) / 4
        for i, s in enumerate(scores)
    ]
    assert leave_one_out(scores).tolist() == expected


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            6,
            "only 6 held-out inputs: half of them choose φ, and no p-value is "
            "below 1/(3 + 1) = 0.25; hold out a hundred or more",
        ),
        (
            49,
            "only 49 held-out inputs: half of them choose φ, and "
            "no p-value is below 1/(24 + 1) = 0.04; hold out a hundred or more",
        ),
        (50, "smallest possible p-value: 0.0385"),
    ],
)
def test_few_held_out_inputs_are_told(rows, told):
    network, train, (x, y) = trained()
    calibrated = dapcal.calibrate(network, train=train, held_out=(x[:rows], y[:rows]), candidates=3)
    assert [n for n in calibrated.notes if "p-value" in n] == [told]
