"""Several labels an input: each is a Bernoulli, from one draw to calibrated predictions."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import dapcal
from dapcal import label_metrics
from dapcal.adjust import Inflate, Transport
from dapcal.ensembles import base_ensemble, seen
from dapcal.likelihoods import Bernoulli, MultiLabel
from dapcal.posteriors import laplace
from dapcal.posteriors.linear import layer_index
from dapcal.posteriors.plain import likelihood_for
from dapcal.posteriors.predictions import StackedPredictions
from dapcal.types import Ensemble

S, N, L = 6, 5, 3


def drawn(temperature: float = 1.3) -> tuple[MultiLabel, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * torch.randn(S, N, L, generator=generator)
    return MultiLabel(temperature), outputs, torch.randint(2, (N, L), generator=generator)


def each(outputs: Tensor, log_weights: Tensor, spread: Tensor, temperature: float) -> list[tuple[Bernoulli, Ensemble]]:
    """The labels as ensembles of one Bernoulli each."""
    one = Bernoulli(temperature)
    return [
        (one, base_ensemble(one, outputs[..., [label]])._replace(log_weights=log_weights, spread=spread[:, [label]]))
        for label in range(L)
    ]


@pytest.mark.parametrize("total", [1.0, 0.2, 3.0])
@pytest.mark.parametrize("size", [0.0, 2.5])
def test_every_label_is_a_bernoulli(total, size):
    likelihood, outputs, y = drawn()
    weights = torch.rand(S, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_weights = (total * weights / weights.sum(0)).log()
    spread = size * torch.rand(N, L, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = base_ensemble(likelihood, outputs)._replace(log_weights=log_weights, spread=spread)
    alone = each(outputs, log_weights, spread, likelihood.temperature)
    p = torch.stack([one.mean(e)[:, 1] for one, e in alone], 1)
    torch.testing.assert_close(likelihood.mean(whole), p)
    torch.testing.assert_close(likelihood.variance(whole), p * (1 - p))
    sums = {
        "log_prob": sum(one.log_prob(e, y[:, label]) for label, (one, e) in enumerate(alone)),
        "entropy": sum(one.entropy(e) for one, e in alone),
        "expected_entropy": sum(one.expected_entropy(e) for one, e in alone),
    }
    torch.testing.assert_close(likelihood.log_prob(whole, y), sums["log_prob"])
    torch.testing.assert_close(likelihood.entropy(whole), sums["entropy"])
    torch.testing.assert_close(likelihood.expected_entropy(whole), sums["expected_entropy"])
    assert torch.equal(likelihood.doubt(whole), likelihood.entropy(whole))
    if total == 1:
        wrong = torch.stack([one.error(e, y[:, label]) for label, (one, e) in enumerate(alone)], 1)
        assert torch.equal(likelihood.error(whole, y), wrong.any(1))


def test_one_draw_against_torch():
    likelihood, outputs, y = drawn()
    expected = torch.distributions.Independent(
        torch.distributions.Bernoulli(logits=outputs.double() / likelihood.temperature), 1
    )
    torch.testing.assert_close(likelihood.log_likelihood(outputs.double(), y), expected.log_prob(y.double()))
    mean, variance, entropy = likelihood.conditional(outputs)
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(variance, expected.variance)
    torch.testing.assert_close(entropy, expected.entropy())
    base = base_ensemble(likelihood, outputs)
    mixture = torch.logsumexp(expected.log_prob(y.double()), 0) - torch.tensor(float(S)).log()
    torch.testing.assert_close(likelihood.log_prob_mixture(base, y), mixture)


def test_sure_logits_keep_their_digits():
    ensemble_ = base_ensemble(MultiLabel(), torch.full((2, 1, 2), 60.0))
    found = MultiLabel().log_prob(ensemble_, torch.tensor([[0, 0]]))
    torch.testing.assert_close(found, torch.tensor([-120.0], dtype=torch.float64))
    extreme = base_ensemble(MultiLabel(), torch.tensor([[[1e4, -1e4]]]))
    assert all(part.isfinite().all() for part in (*extreme.conditional, MultiLabel().entropy(extreme)))


@pytest.mark.parametrize("is_drawn", [False, True])
def test_inflate_widens_each_label_by_its_own_spread(is_drawn):
    likelihood, outputs, _ = drawn()
    distance = torch.linspace(0, 3, N)

    def inflated(own, z: Tensor) -> Tensor:
        return own.mean(Inflate(is_drawn)(StackedPredictions(lambda _: z, own), torch.zeros(N, 1))(distance))

    alone = [inflated(Bernoulli(likelihood.temperature), outputs[..., [label]])[:, 1] for label in range(L)]
    torch.testing.assert_close(inflated(likelihood, outputs), torch.stack(alone, 1))


def test_fisher_information_is_the_hessian():
    likelihood, outputs, y = drawn()
    root = likelihood.curvature_root(outputs[0].double())
    for row in range(N):
        hessian = torch.autograd.functional.hessian(
            lambda z, row=row: -likelihood.log_likelihood(z[None], y[[row]]).sum(), outputs[0, row].double()
        )
        torch.testing.assert_close(root[row] @ root[row].T, hessian)


@functools.cache
def problem(n: int = 240) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A network trained for a moment on two labels that overlap, and data of the same kind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(2 * n, 2)
        y = (torch.stack([x.sum(1), x[:, 0] - x[:, 1] ** 2 + 0.5], 1) + 0.7 * torch.randn(2 * n, 2) > 0).long()
        network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(network.parameters(), 0.03)
        for _ in range(80):
            loss = nn.functional.binary_cross_entropy_with_logits(network(x[:n]), y[:n].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network, (x[:n], y[:n]), (x[n:], y[n:])


@pytest.mark.parametrize("structure", [laplace.Full, laplace.Kronecker, laplace.Diagonal])
def test_a_laplace_approximation_has_the_hessian_of_the_log_joint(structure):
    """Of a last layer outputs are linear, so the Hessian of the log likelihood is the curvature exactly."""
    network, (x, y), _ = problem()
    network, x, y, likelihood, sigma0 = copy.deepcopy(network).double(), x[:20].double(), y[:20], MultiLabel(1.2), 0.9
    posterior = laplace.last_layer(network, likelihood, (x, y), structure=structure, prior_scale=sigma0, draws=2)
    features = torch.cat([network[:2](x), torch.ones(20, 1, dtype=torch.float64)], 1).detach()
    weight = torch.cat([network[2].weight, network[2].bias[:, None]], 1).detach()
    (rows, columns), size, own = weight.shape, weight.numel(), posterior.gaussian
    index = layer_index(posterior.layout, "2", bias=True).flatten()
    hessian = torch.autograd.functional.hessian(lambda w: -likelihood.log_likelihood(features @ w.T, y).sum(), weight)
    precision = hessian.reshape(size, size) + torch.eye(size, dtype=torch.float64) / sigma0**2
    if structure is laplace.Full:
        torch.testing.assert_close(own.covariance[index[:, None], index].double(), torch.linalg.inv(precision))
    elif structure is laplace.Diagonal:
        torch.testing.assert_close(own.variance[index].double(), 1 / precision.diagonal())
    else:  # G ⊗ A with G diagonal: given the outputs no label knows of another
        root = own.rotated(torch.diag(own.variance.double().sqrt()), back=True)
        covariance = (root.T @ root)[index[:, None], index].reshape(rows, columns, rows, columns)
        total = likelihood.curvature_root(features @ weight.T).square().sum((0, 2))  # G
        for label in range(rows):
            kronecker = total[label] * features.T @ features / len(features)
            expected = torch.linalg.inv(kronecker + torch.eye(columns, dtype=torch.float64) / sigma0**2)
            torch.testing.assert_close(covariance[label, :, label], expected)
        assert covariance[0, :, 1].abs().max() < 1e-9


def test_closed_form_moments_are_those_of_many_draws():
    network, train, _ = problem()
    posterior = laplace.last_layer(network, MultiLabel(), train, prior_scale=1.0, draws=4000, seed=0)
    x = torch.tensor([[0.5, 0.2], [4.0, 1.0]])
    closed, many = MultiLabel().mean(seen(posterior, x)), MultiLabel().mean(seen(posterior, x, drawn=True))
    torch.testing.assert_close(closed, many, atol=0.02, rtol=0)
    before, moved = (Transport()(posterior, x)(torch.full((2,), d)) for d in (0.0, 5.0))
    less = (MultiLabel().mean(before) - 0.5).abs() - (MultiLabel().mean(moved) - 0.5).abs()
    assert (less > 0).all()


@functools.cache
def calibrated():
    network, train, held_out = problem()
    return dapcal.calibrate(network, train=train, held_out=held_out)


def test_a_network_of_labels_is_calibrated_without_saying_so(tmp_path):
    network, (x, _), _ = problem()
    own = calibrated()
    assert isinstance(own.posterior.likelihood, MultiLabel)
    summary = own.summary()
    assert summary.calibrated.nll <= summary.network.nll + 0.05
    assert summary.calibrated.exact < summary.calibrated.accuracy
    assert "of labels, all right" in str(summary)
    far = own(torch.full((1, 2), 40.0))
    assert far.ood_p_value[0] < 0.05 < own(x[:50]).ood_p_value.median()
    assert (far.probs - 0.5).abs().max() < (far.base.probs - 0.5).abs().max()
    own.save(tmp_path / "m.dap")
    again = dapcal.load(tmp_path / "m.dap", network)
    assert torch.equal(again(x[:9]).mean, own(x[:9]).mean)
    assert again.summary() == summary
    deployed = own.module()(x[:9])
    for name in ("mean", "variance", "epistemic", "ood_score", "ood_p_value"):
        torch.testing.assert_close(getattr(deployed, name), getattr(own(x[:9]), name), rtol=1e-4, atol=1e-5)


def test_what_a_prediction_of_labels_tells():
    prediction = calibrated()(torch.cat([problem()[1][0][:7], torch.full((1, 2), 40.0)]))
    columns = prediction.columns()
    assert {
        name: columns[name].shape for name in ("prediction", "probability", "epistemic", "aleatoric")
    } == dict.fromkeys(("prediction", "probability", "epistemic", "aleatoric"), (8, 2))
    assert ((columns["probability"] > 0.5) == columns["prediction"]).all()
    assert set(columns["reason"]) <= {"", "ambiguous"} | {r for r in columns["reason"] if r.startswith("far from")}
    torch.testing.assert_close(prediction.epistemic + prediction.aleatoric, prediction.variance)
    labels = prediction.sample(4000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(labels.double().mean(0), prediction.probs.double(), atol=0.04, rtol=0)
    with pytest.raises(TypeError, match="use `probs`"):
        prediction.prediction_set()
    with pytest.raises(TypeError, match="no intervals"):
        prediction.interval()


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0, 1]), r"shape \(2, 3\), a 0 or 1 for every output, got \(2,\); for one class .*Categorical"),
        (torch.zeros(2, 4), r"shape \(2, 3\).*got \(2, 4\)"),
        (torch.tensor([[0.0, 1.0, torch.nan]] * 2), "whole numbers as labels, got NaN or inf; drop those rows"),
        (torch.tensor([[0.2, 1.0, 0.0]] * 2), r"soft labels between them; use \(y > 0.5\).long\(\)"),
        (torch.tensor([[0, 1, -1]] * 2), "labels 0 and 1, got -1 to 1; drop rows with labels that are not known"),
    ],
)
def test_targets_that_are_not_labels(y, message):
    with pytest.raises(ValueError, match=message):
        MultiLabel().check(torch.zeros(5, 2, 3), y)


def test_labels_that_training_has_never_seen():
    y = torch.tensor([[1, 0], [0, 0]])
    MultiLabel().check_held_out(y, torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match=r"Labels \[1\] are 1 in `held_out` but never in `train`"):
        MultiLabel().check_held_out(y, torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.eye(2)[torch.arange(8) % 2].long(), r"every row .* has one 1.*y.argmax\(1\), or MultiLabel\(\)"),
        (torch.eye(2)[torch.arange(8) % 2], r"one-hot classes or numbers; give Categorical\(\) with y.argmax\(1\)"),
        (torch.tensor([[0.0, 1.0], [1.0, 1.0]] * 4), r"may be labels or numbers; give MultiLabel\(\) or Gaussian"),
        (torch.tensor([[0, 3], [1, 1]] * 4), r"from 0 to 3; classes are \(N,\), labels zeros and ones"),
        (torch.zeros(8, 2, 2).long(), r"class at every place give PerPlace\(Categorical\(\), places=\(2, 2\)\)"),
        (torch.tensor([-1, 0, 1, 1] * 2), r"x\[y >= 0\]"),
    ],
)
def test_targets_that_are_in_doubt_are_asked_about(y, message):
    with pytest.raises(ValueError, match=message):
        likelihood_for(nn.Linear(2, 2), dapcal.data.Labelled(torch.randn(8, 2), y))


def test_probabilities_are_not_taken_for_logits():
    network, train, _ = problem()
    with pytest.raises(ValueError, match="as a sigmoid does; return the logits before it"):
        likelihood_for(nn.Sequential(network, nn.Sigmoid()), dapcal.data.Labelled(*train))


def test_metrics_label_by_label_against_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    probs, y = torch.rand(60, 3, generator=generator), torch.randint(2, (60, 3), generator=generator)
    y[:, 2] = 0
    found = label_metrics.per_label(probs, y)
    for label in range(3):
        p, truth = probs[:, label].double().numpy(), y[:, label].numpy()
        assert found.nll[label] == pytest.approx(sklearn.log_loss(truth, p, labels=[0, 1]))
        assert found.brier[label] == pytest.approx(sklearn.brier_score_loss(truth, p))
        assert found.accuracy[label] == pytest.approx(sklearn.accuracy_score(truth, p > 0.5))
        assert found.f1[label] == pytest.approx(sklearn.f1_score(truth, p > 0.5, zero_division=0))
        if label < 2:
            assert found.auroc[label] == pytest.approx(sklearn.roc_auc_score(truth, p))
    assert found.auroc[2] != found.auroc[2]
    assert found.macro["auroc"] == pytest.approx(sum(found.auroc[:2]) / 2)
    truth, guess = y.numpy(), (probs > 0.5).numpy()
    assert found.macro["f1"] == pytest.approx(sklearn.f1_score(truth, guess, average="macro", zero_division=0))
    assert label_metrics.subset_accuracy(probs, y) == pytest.approx(sklearn.accuracy_score(truth, guess))
    assert label_metrics.hamming_loss(probs, y) == pytest.approx(sklearn.hamming_loss(truth, guess))
    with pytest.raises(ValueError, match="not logits"):
        label_metrics.per_label(2 * probs, y)
