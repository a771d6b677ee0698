from __future__ import annotations

import copy
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from cases import Fragile, Killed, doubles
from dapcal.detectors import due, duq, sngp
from dapcal.distances.projectors import FourierFeatures

FITS = {
    "sngp": partial(sngp.fit, dimension=256),
    "duq": partial(duq.fit, embedding=32),
    "due": partial(due.fit, inducing=10, samples=16),
}
SHORT = {"epochs": 2, "batch_size": 50, "learning_rate": 1e-2}


def make_body() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())


@pytest.fixture(params=FITS)
def fit(request):
    return FITS[request.param]


@pytest.fixture(scope="module", params=FITS)
def trained(request):
    """A detector trained on three clusters, and fresh points of theirs."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    y = torch.arange(600) % 3
    x = centers[y] + 0.4 * torch.randn(600, 2, generator=generator)
    detector = FITS[request.param](make_body(), 3, (x[:300], y[:300]), epochs=30, batch_size=50, learning_rate=1e-2)
    return detector, x[300:], y[300:]


def auroc(inside, outside):
    return float((outside[:, None] > inside).double().mean() + 0.5 * (outside[:, None] == inside).double().mean())


def circle(radius, n=200):
    angle = 2 * math.pi * torch.arange(n) / n
    return radius * torch.stack([angle.cos(), angle.sin()], 1)


# the family


def test_accurate_inside_and_alert_outside(trained):
    detector, x, y = trained
    assert (detector.probs(x).argmax(1) == y).float().mean() > 0.95
    assert auroc(detector(x), detector(circle(8.0))) > 0.9
    assert auroc(detector(x), detector(circle(30.0))) > 0.99


def test_probabilities_and_scores_have_their_shapes(trained):
    detector, x, _ = trained
    probs, score = detector.probs(x), detector(x)
    assert probs.shape == (len(x), 3)
    assert score.shape == (len(x),)
    assert not probs.requires_grad
    torch.testing.assert_close(probs.sum(1), torch.ones(len(x)))


def test_batches_do_not_matter(trained):
    detector, x, _ = trained
    parts = x.split([1, 7, len(x) - 8])
    torch.testing.assert_close(torch.cat([detector(part) for part in parts]), detector(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([detector.probs(p) for p in parts]), detector.probs(x), rtol=1e-4, atol=1e-5)


def test_the_seed_decides_and_nothing_else(fit, blobs):
    x = blobs[1][0]
    first = fit(make_body(), 3, blobs[0], seed=1, **SHORT)(x)
    state = torch.random.get_rng_state()
    again = fit(make_body(), 3, blobs[0], seed=1, **SHORT)(x)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(fit(make_body(), 3, blobs[0], seed=2, **SHORT)(x), first)


def test_the_body_is_left_as_it_was(fit, blobs):
    body = make_body().train()
    before = copy.deepcopy(body.state_dict())
    fit(body, 3, blobs[0], **SHORT)
    assert body.training
    assert list(body.state_dict()) == list(before)
    assert all(torch.equal(body.state_dict()[n], t) for n, t in before.items())
    assert all(p.requires_grad and p.grad is None for p in body.parameters())


@pytest.mark.parametrize("dies_at", [2, 5])
def test_a_killed_run_goes_on_to_the_same_result(fit, blobs, tmp_path, dies_at):
    """Another random body at the second start: all that a run depends on comes from the checkpoint."""
    x = blobs[1][0]
    whole = fit(Fragile(make_body()), 3, blobs[0], **SHORT)(x)
    options = {**SHORT, "checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(Killed):
        fit(Fragile(make_body(), dies_at), 3, blobs[0], **options)
    other = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    torch.testing.assert_close(fit(Fragile(other), 3, blobs[0], **options)(x), whole, rtol=0, atol=0)


def test_progress_and_held_out_nll(fit, blobs):
    epochs = []
    detector = fit(make_body(), 3, blobs[0], held_out=blobs[1], progress=epochs.append, **SHORT)
    assert [epoch.number for epoch in epochs] == [1, 2]
    assert epochs[1].loss < epochs[0].loss
    x, y = blobs[1]
    if not isinstance(detector, sngp.SNGP):  # whose held-out NLL is without variance
        nll = -detector.probs(x).log()[torch.arange(len(y)), y].mean()
        assert epochs[-1].held_out_nll == pytest.approx(float(nll), rel=1e-4)


def test_loaders_images_batch_norm_and_doubles(fit):
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()  # (N, 4, 3, 3), to be flattened
    y = torch.arange(40) % 2
    x = torch.randn(40, 1, 5, 5, dtype=torch.float64) + 3 * y[:, None, None, None]
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(0))
    detector = fit(body, 2, loader, epochs=15, learning_rate=5e-2)
    assert detector(x).dtype == torch.float64
    assert (detector.probs(x).argmax(1) == y).double().mean() > 0.95


def test_bfloat16(fit, blobs):
    assert fit(make_body(), 3, blobs[0], bf16=True, **SHORT)(blobs[1][0]).dtype == torch.float32


def test_bad_input(fit, blobs):
    with pytest.raises(TypeError, match=r"nn\.Module"):
        fit(nn.Linear, 3, blobs[0])
    with pytest.raises(ValueError, match="Expected `classes` >= 2"):
        fit(make_body(), 1, blobs[0])
    with pytest.raises(ValueError, match="labels"):
        fit(make_body(), 2, blobs[0], **SHORT)
    with pytest.raises(ValueError, match="running statistics"):
        fit(nn.Sequential(make_body(), nn.BatchNorm1d(16, track_running_stats=False)), 3, blobs[0])
    with pytest.raises(ValueError, match="NaN or inf"):
        fit(nn.Sequential(make_body(), nn.Threshold(math.inf, math.nan)), 3, blobs[0])


# SNGP


@pytest.mark.parametrize("weighted", [False, True])
def test_sngp_variance_is_the_dense_laplace_covariance(weighted, blobs):
    """φᵀ(ridge I + Σ_i w_i φ_i φ_iᵀ)⁻¹φ with one term per training input, by a matrix inverse."""
    (x, _), (other, _) = blobs
    detector = sngp.fit(make_body().double(), 3, (x.double(), blobs[0][1]), dimension=20, ridge=0.3, weighted=weighted,
                        mean_field=0.7, **SHORT)  # fmt: skip
    weight = detector.network.weight
    phi, new = detector.network(x.double()), detector.network(other.double())
    probs = (phi @ weight).softmax(1)
    expected = []
    for k in range(3):
        precision = 0.3 * torch.eye(20, dtype=torch.float64)
        for row, p in zip(phi, probs[:, k], strict=True):
            precision += torch.outer(row, row) * (p * (1 - p) if weighted else 1)
        expected.append((new @ torch.linalg.inv(precision) @ new.T).diagonal())
    variance = torch.stack(expected, 1)  # (N, K)
    found = detector.variance(other.double())
    torch.testing.assert_close(found.expand(-1, 3), variance)
    logits = new @ weight / (1 + 0.7 * variance).sqrt()
    torch.testing.assert_close(detector.logits(other.double()), logits)
    torch.testing.assert_close(detector(other.double()), 3 / (3 + logits.exp().sum(1)))
    torch.testing.assert_close(detector.probs(other.double()), logits.softmax(1))


def test_sngp_features_approximate_the_kernel(blobs):
    """Inner products of φ against exp(−‖h − h'‖²/(2ℓ²)) of the normalised body's features."""
    x = blobs[0][0][:40]
    detector = sngp.fit(make_body(), 3, blobs[0], dimension=2000, length_scale=0.7, epochs=0)
    features = detector.network.features(x)
    kernel = (-(torch.cdist(features, features) ** 2) / (2 * 0.7**2)).exp()
    phi = FourierFeatures(detector.network.frequencies, detector.network.phases)(features)
    assert kernel.min() < 0.6
    assert float((phi @ phi.T - kernel).abs().mean()) < 0.02  # 1/√D is 0.022


def test_sngp_far_from_the_data_has_the_prior_variance():
    """With data in one place, φ of far inputs is orthogonal to it: v = 1/ridge; at the data v = 1/(ridge + N)."""
    x = torch.zeros(100, 2)
    detector = sngp.fit(
        nn.Identity(), 2, (x, torch.arange(100) % 2), dimension=2048, length_scale=1.0, ridge=2.0, epochs=0
    )
    assert float(detector.variance(torch.full((1, 2), 50.0))) == pytest.approx(0.5, rel=0.1)
    assert float(detector.variance(x[:1])) == pytest.approx(1 / 102, rel=0.1)


def test_sngp_bounds_the_body(blobs):
    detector = sngp.fit(make_body(), 3, blobs[0], dimension=64, bound=0.5, epochs=10, learning_rate=1e-2)
    norms = [float(torch.linalg.matrix_norm(detector.network.body[i].weight, 2)) for i in (0, 2)]
    assert max(norms) <= 1.05 * 0.5


def test_sngp_layer_norm(blobs):
    detector = sngp.fit(make_body(), 3, blobs[0], dimension=64, layer_norm=True, **SHORT)
    assert isinstance(detector.network.norm, nn.LayerNorm)
    assert (detector.probs(blobs[1][0]).argmax(1) == blobs[1][1]).float().mean() > 0.9


@pytest.mark.parametrize("wrong", [{"ridge": 0.0}, {"mean_field": -1.0}, {"length_scale": 0.0}], ids=str)
def test_sngp_bad_input(wrong, blobs):
    with pytest.raises(ValueError, match="Expected `ridge` > 0"):
        sngp.fit(make_body(), 3, blobs[0], **wrong)
    with pytest.raises(ValueError, match="identical; a length scale cannot be found, give one"):
        sngp.fit(make_body(), 3, (torch.zeros(9, 2), torch.arange(9) % 3))


# DUQ


def test_duq_kernel_by_hand(blobs):
    detector = duq.fit(make_body(), 3, blobs[0], embedding=4, length_scale=0.3, **SHORT)
    network, x = detector.network, blobs[1][0][:5]
    for n, features in enumerate(network.body(x)):
        for c in range(3):
            embedded = network.weight[:, c] @ features
            centroid = network.sums[:, c] / network.counts[c]
            kernel = torch.exp(-((embedded - centroid) ** 2).sum() / (4 * 2 * 0.3**2))
            assert float(detector.log_kernel(x)[n, c].exp()) == pytest.approx(float(kernel), rel=1e-4)
    kernels = detector.log_kernel(x).exp()
    torch.testing.assert_close(detector.probs(x), kernels / kernels.sum(1, keepdim=True))
    assert detector(x).argsort().tolist() == (-kernels.max(1).values).argsort().tolist()


def test_duq_centroids_follow_the_steps(blobs):
    """Two epochs of one batch, by a loop over inputs with the weights after each step."""
    x, y = blobs[0]
    options = {"embedding": 4, "decay": 0.6, "batch_size": len(x), "schedule": lambda o, _: _constant(o)}
    start, one, two = (duq.fit(make_body(), 3, blobs[0], epochs=n, **options).network for n in (0, 1, 2))
    sums, counts = start.sums.clone(), start.counts.clone()
    assert counts.tolist() == [50, 50, 50]
    for network in (one, two):
        features = network.body(x)
        for c in range(3):
            total = sum(network.weight[:, c] @ features[i] for i in range(len(x)) if y[i] == c)
            sums[:, c] = 0.6 * sums[:, c] + 0.4 * total
            counts[c] = 0.6 * counts[c] + 0.4 * float((y == c).sum())
        torch.testing.assert_close(network.sums, sums, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(network.counts, counts)


def _constant(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def test_duq_gradient_penalty_by_hand():
    """A linear body and Σ_c exp(−(a_cᵀx − e_c)²/2): the gradient is −Σ_c K_c (a_cᵀx − e_c) a_c."""
    x, a, e = torch.randn(5, 3).double().requires_grad_(), torch.randn(2, 3).double(), doubles([0.3, -0.2])
    a.requires_grad_()
    kernel = torch.exp(-((x @ a.T - e) ** 2) / 2)
    norm = (-(kernel * (x @ a.T - e)) @ a).norm(dim=1)
    expected = ((norm - 1) ** 2).mean()
    found = duq.gradient_penalty(kernel, x)
    torch.testing.assert_close(found, expected)
    by_hand = torch.autograd.grad(expected, a, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found, a), by_hand)


def test_duq_cross_entropies():
    log_kernel = doubles([[-0.1, -2.0, -5.0], [-1.0, -0.5, -0.01]])
    y = torch.tensor([0, 2])
    expected = binary_cross_entropy(log_kernel.exp(), torch.eye(3).double()[y], reduction="none")
    torch.testing.assert_close(duq.cross_entropies(log_kernel, y), expected)
    underflown = torch.tensor([[-500.0, -500.0]], requires_grad=True)
    duq.cross_entropies(underflown, torch.tensor([0])).sum().backward()
    assert underflown.grad.tolist() == [[-1.0, 0.0]]
    assert duq.cross_entropies(torch.zeros(1, 2), torch.tensor([0])).isfinite().all()


def test_duq_penalty_matters(blobs):
    """A heavy one brings the gradients of Σ_c K_c nearer to length 1."""

    def roughness(penalty):
        detector = duq.fit(make_body(), 3, blobs[0], length_scale=1.0, penalty=penalty, epochs=10, learning_rate=1e-2)
        x = blobs[1][0].clone().requires_grad_()
        return float(duq.gradient_penalty(detector.network(x).exp(), x).detach())

    assert roughness(10.0) < 0.7 * roughness(0.0)


def test_duq_bad_input(blobs):
    for wrong in ({"length_scale": 0.0}, {"penalty": -1.0}, {"decay": 1.0}):
        with pytest.raises(ValueError, match="Expected `length_scale` > 0"):
            duq.fit(make_body(), 3, blobs[0], **wrong)
    tokens = (torch.zeros(6, 2, dtype=torch.long), torch.arange(6) % 3)
    with pytest.raises(ValueError, match="use penalty=0"):
        duq.fit(nn.Embedding(4, 5), 3, tokens)
    assert duq.fit(nn.Embedding(4, 5), 3, tokens, penalty=0.0, epochs=1)(tokens[0]).shape == (6,)


# DUE


def test_due_latent_moments_are_the_sparse_posterior(blobs):
    """m = c + k_xZ K⁻¹ᐟ² μ and v = k_xx − k_xZ K⁻¹ k_Zx + k_xZ K⁻ᐟ² S K⁻ᐟ² k_Zx, of whitened u, class by class."""
    detector = due.fit(make_body().double(), 3, (blobs[0][0].double(), blobs[0][1]), inducing=5, **SHORT)
    process, x = detector.network.process, blobs[1][0].double()[:7]
    strategy = process.variational_strategy.base_variational_strategy
    q, points = strategy._variational_distribution, strategy.inducing_points
    h = detector.network.features(x)
    means, deviations = [], []
    for c in range(3):
        scale, length = process.covar_module.outputscale[c], process.covar_module.base_kernel.lengthscale[c, 0, 0]
        kernel = lambda a, b: scale * torch.exp(-(torch.cdist(a, b) ** 2) / (2 * length**2))  # noqa: B023, E731
        root = torch.linalg.cholesky(kernel(points, points) + strategy.jitter_val * torch.eye(5, dtype=torch.float64))
        half = torch.linalg.solve_triangular(root, kernel(points, h), upper=False)  # (M, N)
        factor = q.chol_variational_covar[c].tril()
        means.append(process.mean_module.constant[c] + half.T @ q.variational_mean[c])
        deviations.append((scale - (half**2).sum(0) + ((factor.T @ half) ** 2).sum(0)).sqrt())
    mean, deviation = torch.stack(means, 1), torch.stack(deviations, 1)
    torch.testing.assert_close(detector.network(x), torch.cat([mean, deviation], 1), rtol=1e-3, atol=1e-3)
    probs = (mean + deviation * detector.noise.double()).softmax(-1).mean(0)
    torch.testing.assert_close(detector.probs(x), probs, rtol=1e-3, atol=1e-3)
    entropy = -(probs * probs.log()).sum(1)
    torch.testing.assert_close(detector(x), entropy, rtol=1e-3, atol=1e-3)


def test_due_centres_are_those_of_the_clusters(generator):
    middles = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = middles.repeat_interleave(50, 0) + 0.1 * torch.randn(150, 2, generator=generator)
    starts = [due.centres(points, 3, torch.Generator().manual_seed(seed)) for seed in range(20)]
    best = min(starts, key=lambda found: float(torch.cdist(points, found).min(1).values.sum()))
    means = points.reshape(3, 50, 2).mean(1)
    assert float(torch.cdist(means, best).min(1).values.max()) < 1e-5


def test_due_names_its_extra(monkeypatch, blobs):
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(ImportError, match=r"dapcal\[due\]"):
        due.fit(make_body(), 3, blobs[0])


def test_due_bad_input(blobs):
    for wrong in (0, 151):
        with pytest.raises(ValueError, match=rf"Expected `inducing` between 1 and 150 .*got {wrong}"):
            due.fit(make_body(), 3, blobs[0], inducing=wrong)
    with pytest.raises(ValueError, match="`faster` > 0"):
        due.fit(make_body(), 3, blobs[0], faster=0.0)


def test_due_trains_the_process_faster_than_the_body(blobs):
    optimizer = []

    def descent(parameters, rate):
        optimizer.append(torch.optim.SGD(parameters, lr=rate))
        return optimizer[-1]

    due.fit(make_body(), 3, blobs[0], faster=5.0, epochs=1, learning_rate=1e-2, optimizer=descent)
    process, body = optimizer[0].param_groups
    assert (process["initial_lr"], body["initial_lr"]) == (pytest.approx(0.05), 1e-2)
    assert [p.shape for p in body["params"]] == [
        p.shape for n in (0, 2) for p in (make_body()[n].bias, make_body()[n].weight)
    ]
    frozen = make_body().requires_grad_(False)
    assert due.fit(frozen, 3, blobs[0], epochs=1)(blobs[1][0]).isfinite().all()
