"""Projectors: the right layer, the right kernel, reproducible encoders, and refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from dapcal.distances import Standardised
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import (
    Features,
    Identity,
    LayerFeatures,
    RandomFourier,
    Vae,
    fitted,
    median_distance,
    project,
)
from dapcal.likelihoods import Categorical, MeanAndNoise, NoiseHead
from dapcal.networks import last_linear
from dapcal.posteriors import gaussian, predictions
from dapcal.posteriors import map as map_posterior


class HeadFirst(nn.Module):
    """Runs in another order than it is defined in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(6, 2), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def point(model: nn.Module, **options):
    return map_posterior.point(model, options.pop("likelihood", Categorical()), **options)


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 2))


def test_identity_flattens_and_keeps_the_dtype():
    x = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4)
    assert torch.equal(Identity()(x), x.reshape(2, 12))
    assert Identity()(x).dtype == torch.float64
    assert torch.equal(Identity()(torch.tensor([[1, 2]])), torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize(
    ("model", "shape", "layer"),
    [
        (nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), (3,), "2"),
        (nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2), nn.LogSoftmax(-1)), (3,), "2"),
        (cnn(), (1, 6, 6), "5"),
        (HeadFirst(), (3,), "head"),
        (nn.Linear(3, 2), (3,), ""),
    ],
)
def test_default_features_enter_the_linear_layer_that_runs_last(model, shape, layer):
    x = torch.randn(7, *shape)
    posterior = point(model)
    projector = Features().fit_projector(x, posterior)
    assert projector.layer == last_linear(posterior.network, x[:1]) == layer
    head = model.get_submodule(layer)
    z = project(projector, x)
    assert z.shape == (7, head.in_features)
    outputs = head(z)
    expected = model(x)
    expected = outputs.log_softmax(-1) if isinstance(model, nn.Sequential) and len(model) == 4 else outputs
    torch.testing.assert_close(expected, model(x))


def test_features_of_a_named_layer_are_flattened():
    model = cnn()
    x = torch.randn(4, 1, 6, 6)
    z = Features("1").fit_projector(x, point(model))(x)
    torch.testing.assert_close(z, model[0](x).flatten(1))


def test_unit_features_have_length_one():
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(9, 3)
    plain, unit = (Features(unit=u).fit_projector(x, point(model))(x) for u in (False, True))
    torch.testing.assert_close(unit, plain / plain.norm(dim=1, keepdim=True))


def test_unit_features_of_a_dead_input_are_zero():
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    assert torch.equal(
        Features(unit=True).fit_projector(torch.ones(1, 3), point(model))(-torch.ones(1, 3)).sum(), torch.tensor(0.0)
    )


def test_features_come_from_the_posterior_mean(posterior):
    x = torch.randn(5, 2)
    expected = posterior.network[1](posterior.network[0](x))
    torch.testing.assert_close(Features().fit_projector(x, posterior)(x), expected)


def test_features_run_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).train()
    x = torch.randn(8, 3)
    projector = Features().fit_projector(x, point(model))
    assert torch.equal(projector(x), projector(x))
    torch.testing.assert_close(projector(x[:1]), projector(x)[:1])


def test_a_restricted_prior_takes_the_mean_network():
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    x = torch.randn(4, 2)
    model = MeanAndNoise(net(), net())
    assert Features().fit_projector(x, point(model, likelihood=NoiseHead())).layer == "noise.2"
    aware = point(model, likelihood=NoiseHead(), aware="mean.*")
    projector = Features().fit_projector(x, aware)
    assert projector.layer == "mean.2"
    torch.testing.assert_close(projector(x), torch.tanh(model.mean[0](x)))


def test_a_restricted_prior_of_a_last_layer_posterior():
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    last = gaussian.full(model, Categorical(), 0.1 * torch.eye(15), ["2.weight"], draws=3)
    assert Features().fit_projector(torch.randn(4, 2), last).layer == "2"


def test_no_linear_layer():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(2, 1, 6, 6)
    with pytest.raises(ValueError, match=r"no nn\.Linear layer that runs; the layers are \['0', '1', '2'\]"):
        last_linear(model, x)
    with pytest.raises(ValueError, match=r"no linear or convo.*Features\(layer=\.\.\.\), one of \['0', '1', '2'\]"):
        Features().fit_projector(x, point(model))


def test_unknown_layer():
    with pytest.raises(ValueError, match=r"no layer `fc`; its layers are \['head', 'body'\]"):
        Features("fc").fit_projector(torch.randn(2, 3), point(HeadFirst()))


def test_a_layer_that_runs_twice():
    class Twice(HeadFirst):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x))) + self.head(self.body(x))

    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="`head` to run once in a forward pass, it ran 2 times"):
        Features().fit_projector(x, point(Twice()))(x)


class Meeting(nn.Module):
    """Waits until two threads are inside a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 2)
        self.barrier = Barrier(2, timeout=20)

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait()  # both have set their hooks
        hidden = self.head(self.body(x))
        self.barrier.wait()
        return hidden


def test_features_may_be_asked_for_by_several_threads_at_once():
    network = Meeting()
    features = LayerFeatures(network, "head")
    inputs = [torch.randn(4, 3), torch.randn(4, 3)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(features, inputs))
    for x, z in zip(inputs, found, strict=True):
        assert torch.equal(z, network.body(x))


def test_no_network():
    posterior = predictions.StackedPredictions(lambda x: x[None], Categorical())
    with pytest.raises(ValueError, match="no network to take features from; pass a projector"):
        Features().fit_projector(torch.zeros(2, 2), posterior)


@pytest.mark.parametrize("length", [0.7, 3.0])
def test_random_fourier_features_approximate_the_gaussian_kernel(length):
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = RandomFourier(20_000, length).fit_projector(x, None)(x)
    kernel = torch.exp(-(torch.cdist(x, x) ** 2) / (2 * length**2))
    assert z.dtype == torch.float64
    assert (z @ z.T - kernel).abs().max() < 0.04  # 1/√20,000 = 0.007


def test_random_fourier_length_is_the_median_distance_by_default():
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    median = torch.pdist(x).median().item()
    assert median_distance(x, torch.Generator().manual_seed(0)) == pytest.approx(median, rel=0.05)
    z = RandomFourier(20_000).fit_projector(x, None)(x[:30])
    kernel = torch.exp(-(torch.cdist(x[:30], x[:30]) ** 2) / (2 * median**2))
    assert (z @ z.T - kernel).abs().max() < 0.08


def test_length_scale_of_identical_points():
    with pytest.raises(ValueError, match="All training points are identical"):
        RandomFourier().fit_projector(torch.ones(5, 2), None)


@pytest.mark.parametrize("recipe", [RandomFourier, lambda seed: Vae(2, hidden=8, epochs=2, seed=seed)])
def test_recipes_are_seeded_and_leave_the_global_generator_alone(recipe):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    before = torch.random.get_rng_state()
    one, two, three = (recipe(seed=seed).fit_projector(x, None)(x) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.allclose(one, three)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_vae_keeps_clusters_apart_and_strangers_far():
    generator = torch.Generator().manual_seed(0)
    centers = torch.zeros(3, 10)
    centers[0, :5], centers[1, :5], centers[2, 5:] = 2.0, -2.0, 4.0

    def draw(cluster: int, n: int) -> Tensor:
        return centers[cluster] + 0.5 * torch.randn(n, 10, generator=generator)

    train = torch.cat([draw(0, 200), draw(1, 200)])
    encoder = Vae(2, hidden=32, epochs=60).fit_projector(train, None)
    one, two = encoder(draw(0, 50)), encoder(draw(1, 50))
    assert one.shape == (50, 2)
    within = torch.cat([torch.pdist(one), torch.pdist(two)])
    across = torch.cdist(one, two).flatten()
    labels = [0] * len(within) + [1] * len(across)
    assert roc_auc_score(labels, torch.cat([within, across])) > 0.98
    index = TorchIndex(encoder(train))
    inside, outside = (index.query(encoder(draw(c, 100)), 1)[0][:, 0] for c in (0, 2))
    assert roc_auc_score([0] * 100 + [1] * 100, torch.cat([inside, outside])) > 0.8


def test_vae_of_a_constant_column_is_finite():
    x = torch.cat([torch.randn(60, 2), torch.full((60, 1), 0.1)], 1)
    assert Vae(2, hidden=4, epochs=2).fit_projector(x, None)(x).isfinite().all()


@pytest.mark.parametrize("recipe", [Features(), RandomFourier(32), Standardised(), Vae(2, hidden=8, epochs=1)])
def test_projection_does_not_depend_on_batches_or_order(recipe):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    projector = fitted(recipe, x, point(HeadFirst()))
    z = project(projector, x)
    assert not z.requires_grad
    torch.testing.assert_close(project(projector, x, batch_size=7), z)
    torch.testing.assert_close(project(projector, x.flip(0)), z.flip(0))


def test_any_callable_is_a_projector():
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert fitted(double, torch.ones(2, 3), None) is double
    assert torch.equal(project(double, torch.ones(2, 3)), torch.full((2, 3), 2.0))


@pytest.mark.parametrize(
    ("projector", "message"),
    [
        (lambda x: x / x.sum(1, keepdim=True), "NaN or inf for 1 of 4 inputs"),
        (lambda x: x.log(), "NaN or inf for 1 of 4 inputs"),
        (lambda x: x[:, None], r"return \(4, P\) for 4 inputs, got \(4, 1, 3\); flatten it"),
        (lambda x: x.sum(1), r"got \(4,\); flatten it"),
        (lambda x: x[:2], r"got \(2, 3\)"),
        (lambda x: x.long(), "floating-point numbers, got torch.int64"),
    ],
)
def test_bad_projections_are_refused(projector, message):
    x = torch.ones(4, 3)
    x[1] = 0
    with pytest.raises(ValueError, match=message):
        project(projector, x)
