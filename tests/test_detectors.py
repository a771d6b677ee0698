"""Every detector through one contract, and the activations that they share."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dapcal import detectors
from dapcal.detectors.activations import Activations, Classifier, batchwise, classifier_of
from dapcal.detectors.layers import outputs_of, spread_out, weight_layers
from detector_cases import blobs, cnn, images, mlp, seen, trained

FITS = {
    "max_softmax": lambda network, train, held_out: detectors.logits.max_softmax(network),
    "entropy": lambda network, train, held_out: detectors.logits.entropy(network),
    "energy": lambda network, train, held_out: detectors.logits.energy(network),
    "max_logit": lambda network, train, held_out: detectors.logits.max_logit(network),
    "temperature": lambda network, train, held_out: detectors.temperature.fit(network, held_out),
    "odin": lambda network, train, held_out: detectors.odin.fit(
        network, held_out, temperatures=(1.0, 100.0), epsilons=(0.01, 0.1)
    ),
    "ddu": lambda network, train, held_out: detectors.ddu.fit(network, train),
    "mahalanobis": lambda network, train, held_out: detectors.mahalanobis.fit(network, train),
    "mahalanobis++": lambda network, train, held_out: detectors.mahalanobis.fit(network, train, unit=True),
    "knn": lambda network, train, held_out: detectors.knn.fit(network, train, k=10),
    "knn of raw features": lambda network, train, held_out: detectors.knn.fit(network, train, k=10, unit=False),
    "vim": lambda network, train, held_out: detectors.vim.fit(network, train),
    "fdbd": lambda network, train, held_out: detectors.fdbd.fit(network, train),
    "dac": lambda network, train, held_out: detectors.dac.fit(network, train, held_out, k=10),
    "gapa": lambda network, train, held_out: detectors.gapa.fit(network, train, k=10),
}
PROBABILITIES = ("temperature", "dac", "gapa")
DISTANCES = ("ddu", "mahalanobis", "knn of raw features", "vim")
NETWORKS = {"mlp": (mlp, blobs), "cnn": (cnn, images)}


def case(name: str, dtype: torch.dtype = torch.float32):
    """A trained network, training data and held-out data."""
    make, draw = NETWORKS[name]
    torch.manual_seed(0)
    train, held_out = draw(150, seed=0), draw(90, seed=1)
    network = trained(make(), *train).to(dtype)
    labels = torch.where(torch.arange(90) < 5, 0, held_out[1])  # some are wrong: a temperature needs errors
    return network, (train[0].to(dtype), train[1]), (held_out[0].to(dtype), labels)


CASES = {(name, dtype): case(name, dtype) for name in NETWORKS for dtype in (torch.float32, torch.float64)}


@pytest.fixture(scope="module")
def fitted():
    """Detectors by name, network and dtype, fitted once."""
    made: dict = {}

    def get(name: str, network: str, dtype: torch.dtype = torch.float32):
        key = name, network, dtype
        if key not in made:
            made[key] = FITS[name](*CASES[network, dtype])
        return made[key]

    return get


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", FITS)
def test_scores_are_finite_and_belong_to_their_input(fitted, name, network, dtype):
    detector, x = fitted(name, network, dtype), CASES[network, dtype][2][0]
    x = torch.cat([x[:30], 1e3 * x[30:40], x[40:50] + 1e3])
    scores = detector(x)
    assert scores.shape == (50,)
    assert scores.dtype == dtype
    assert scores.isfinite().all()
    assert not scores.requires_grad
    loose = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-9}
    torch.testing.assert_close(torch.cat([detector(part) for part in x.split(7)]), scores, **loose)
    torch.testing.assert_close(detector(x.flip(0)), scores.flip(0), **loose)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", FITS)
def test_the_network_and_the_global_state_stay_as_they_were(name, network):
    model, train, held_out = CASES[network, torch.float32]
    model = copy.deepcopy(model)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    detector = FITS[name](model, train, held_out)
    scores = detector(held_out[0])
    assert all(module.training for module in model.modules())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[-1].weight.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    with torch.no_grad():  # nor does a detector change with its network
        model[-1].weight += 1
    assert torch.equal(detector(held_out[0]), scores)


@pytest.mark.parametrize("name", FITS)
def test_without_gradients_and_in_inference_mode(fitted, name):
    network, train, held_out = CASES["mlp", torch.float32]
    x, scores = held_out[0], fitted(name, "mlp")(held_out[0])
    with torch.no_grad():
        assert torch.equal(fitted(name, "mlp")(x), scores)
    with torch.inference_mode():
        torch.testing.assert_close(fitted(name, "mlp")(x.clone()), scores)
        torch.testing.assert_close(FITS[name](network, train, held_out)(x), scores)


@pytest.mark.parametrize("name", FITS)
def test_loaders_and_data_sets_give_the_same(fitted, name):
    network, train, held_out = CASES["mlp", torch.float32]
    loader, data = DataLoader(TensorDataset(*train), batch_size=40), TensorDataset(*held_out)
    torch.testing.assert_close(FITS[name](network, loader, data)(held_out[0]), fitted(name, "mlp")(held_out[0]))


@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_have_the_score_as_entropy(fitted, name):
    x = CASES["mlp", torch.float64][2][0]
    detector = fitted(name, "mlp", torch.float64)
    p = detector.probs(x)
    assert p.shape == (90, 3)
    torch.testing.assert_close(p.sum(1), torch.ones(90, dtype=torch.float64))
    torch.testing.assert_close(detector(x), torch.special.entr(p).sum(1))


@pytest.mark.parametrize("name", DISTANCES)
def test_far_away_inputs_score_higher(fitted, name):
    x, detector = CASES["cnn", torch.float32][1][0], fitted(name, "cnn")
    assert detector(20 * x + 10).min() > detector(x).max()


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("bad", [torch.full((2, 2), torch.nan), torch.zeros(2), torch.zeros(0, 2)])
def test_bad_inputs_are_refused(fitted, name, bad):
    with pytest.raises(ValueError, match="`x`"):
        fitted(name, "mlp")(bad)


@pytest.mark.parametrize("fit", [detectors.ddu.fit, detectors.mahalanobis.fit])
def test_labels_of_classes_that_are_not_there(fit):
    network, (x, y), _ = CASES["mlp", torch.float32]
    with pytest.raises(ValueError, match="3"):
        fit(network, (x, y + 1))


@pytest.mark.parametrize("fit", [detectors.knn.fit, partial(detectors.dac.fit, held_out=blobs(9)), detectors.gapa.fit])
@pytest.mark.parametrize("k", [0, 41])
def test_too_few_training_inputs_for_k(fit, k):
    with pytest.raises(ValueError, match=rf"`k` between 1 and 40 \(training inputs\), got {k}; pass another"):
        fit(CASES["mlp", torch.float32][0], blobs(40), k=k)


@pytest.mark.parametrize("fit", [detectors.vim.fit, detectors.fdbd.fit, detectors.gapa.fit])
@pytest.mark.parametrize(
    "tail", [nn.Softplus(), nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1), nn.Flatten())]
)
def test_heads_that_are_no_linear_layer(fit, tail):
    with pytest.raises(ValueError, match=r"logits are those of its last linear layer.*end the network in nn\.Linear"):
        fit(nn.Sequential(mlp(), tail), blobs(60))


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
@pytest.mark.parametrize("name", NETWORKS)
def test_activations_are_those_of_the_parts(name, batch_size):
    network, (x, _), _ = CASES[name, torch.float64]
    classifier = classifier_of(network, x, batch_size)
    found = classifier(x)
    assert isinstance(found, Activations)
    assert classifier.layer == ("4" if name == "mlp" else "8")
    for one, two in zip(found, seen(network, x), strict=True):
        torch.testing.assert_close(one, two)
    assert not found.features.requires_grad


def test_one_forward_pass_an_input():
    sizes = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            sizes.append(len(x))
            return self.inner(x)

    x, y = blobs(100)
    detector = detectors.ddu.fit(Counting(), (x, y), batch_size=30)
    assert sizes == [1, 30, 30, 30, 10]  # the first finds the last layer
    sizes.clear()
    detector(x)
    assert sizes == [30, 30, 30, 10]


def test_a_network_that_ends_in_a_convolution_has_its_averaged_input_as_features():
    x, y = images(30)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    classifier = classifier_of(network, x)
    torch.testing.assert_close(classifier(x).features, network[:2](x).mean((2, 3)).detach())
    assert detectors.knn.fit(network, (x, y), k=3)(x).shape == (30,)


def test_one_logit_is_no_classifier():
    with pytest.raises(ValueError, match=r"two classes or more, got one; give both classes a logit"):
        detectors.logits.entropy(mlp(classes=1))(blobs(4)[0])


def test_a_layer_that_runs_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(self.layer(x))

    with pytest.raises(ValueError, match="to run once in a forward pass, it ran 2 times"):
        detectors.knn.fit(Twice(), blobs(9), k=1)


def test_scores_of_integer_inputs_have_the_default_dtype():
    assert batchwise(lambda batch: batch.double().sum(1), torch.ones(3, 2, dtype=torch.long), 2).dtype == torch.float32


def test_weight_layers_run_once_and_in_order():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.twice, self.first = nn.Linear(4, 3), nn.Linear(4, 4), nn.Conv1d(1, 4, 2)

        def forward(self, x):
            return self.last(self.twice(self.twice(self.first(x[:, None]).mean(2))))

    assert weight_layers(Tied(), torch.zeros(1, 2)) == ["first", "last"]


@pytest.mark.parametrize(
    ("names", "number", "expected"), [("abcde", 3, "ace"), ("abcd", 2, "ad"), ("abc", 1, "a"), ("", 3, "")]
)
def test_spread_out(names, number, expected):
    assert spread_out(names, number) == list(expected)


def test_outputs_are_averaged_over_places_and_tokens():
    conv, linear = nn.Conv2d(1, 4, 3), nn.Linear(4, 5)
    network = nn.Sequential(conv, nn.Flatten(2), nn.Unflatten(2, (9, 4)), linear, nn.Flatten(), nn.Linear(180, 3))
    x = images(6)[0]
    with outputs_of(network, ["0", "3"]) as found:
        network(x)
    torch.testing.assert_close(found["0"], conv(x).mean((2, 3)))
    torch.testing.assert_close(found["3"], network[:4](x).mean((1, 2)))
    assert not any(m._forward_hooks for m in network.modules())


def test_classifiers_are_what_they_say():
    network, (x, _), _ = CASES["mlp", torch.float32]
    classifier = classifier_of(network, x)
    assert isinstance(classifier, Classifier)
    assert not classifier.network.training
    assert network.training
    head = classifier.head(classifier(x))
    assert torch.equal(head.weight, network[-1].weight.detach().double())
    assert torch.equal(head.bias, network[-1].bias.detach().double())
