from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from dapcal.detectors.spectral import normalised, plain
from dapcal.likelihoods import Categorical
from dapcal.posteriors import map as map_posterior


def dense(layer: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """The matrix of a layer without bias, column by column."""
    bias = torch.zeros_like(layer.bias)
    units = torch.eye(torch.Size(shape).numel()).reshape(-1, *shape)
    return torch.func.functional_call(layer, {"bias": bias}, (units,)).flatten(1).T.detach()


def largest(matrix: torch.Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.detach())[0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def scaled(network: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(factor)
    return network


def iterated(network: nn.Module, x: torch.Tensor, times: int = 200) -> nn.Module:
    network.train()
    for _ in range(times):
        network(x)
    return network.eval()


@pytest.mark.parametrize("bound", [0.5, 1.7])
@pytest.mark.parametrize("last", [False, True])
def test_linear_layers_are_divided_by_the_svd_norm(bound, last):
    network = scaled(mlp(), 3.0)
    result = plain(iterated(normalised(network, bound, last=last), torch.randn(4, 2)))
    for index in (0, 2, 4):
        sigma = largest(network[index].weight)
        factor = max(1.0, sigma / bound) if index < 4 or last else 1.0
        torch.testing.assert_close(result[index].weight, network[index].weight / factor, rtol=1e-4, atol=1e-6)
    assert largest(network[4].weight) > bound  # else the last layer shows nothing


@pytest.mark.parametrize(
    "settings",
    [{}, {"padding": 1}, {"padding": "same"}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"groups": 2, "stride": 3}],
    ids=str,
)
def test_convolutions_are_divided_by_the_norm_of_the_dense_operator(settings):
    network = scaled(nn.Sequential(nn.Conv2d(2, 4, 3, **settings)), 4.0)
    x = torch.randn(1, 2, 7, 6)
    result = plain(iterated(normalised(network, 1.0, last=True, example=x), x, 500))
    sigma = largest(dense(network[0], (2, 7, 6)))
    assert sigma > 1
    torch.testing.assert_close(result[0].weight, network[0].weight / sigma, rtol=1e-3, atol=1e-6)


def test_reshaped_kernels_would_not_bound_the_operator():
    layer = nn.Conv2d(1, 1, 3, padding=1)
    nn.init.ones_(layer.weight)
    assert largest(dense(layer, (1, 9, 9))) > 2.5 * largest(layer.weight.flatten(1))


def test_small_layers_stay_as_they_are():
    network = scaled(mlp(), 0.1)
    x = torch.randn(4, 2)
    torch.testing.assert_close(normalised(network)(x), network(x), rtol=0, atol=0)


def test_gradient_is_that_of_the_normalised_weight():
    layer = scaled(nn.Sequential(nn.Linear(3, 4)), 5.0).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    network = iterated(normalised(layer, 1.0, last=True), x)
    (network(x) ** 2).sum().backward()
    weight = layer[0].weight.detach().clone().requires_grad_()
    ((x @ (weight / torch.linalg.matrix_norm(weight, 2)).T + layer[0].bias.detach()) ** 2).sum().backward()
    torch.testing.assert_close(network[0].parametrizations.weight.original.grad, weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["linear", "convolutional"])
def test_it_trains_as_a_posterior_and_keeps_the_bound(kind, blobs):
    """σ of every layer against svdvals after training, from weights that start far above the bound."""
    x, y = blobs[0]
    if kind == "convolutional":
        y = torch.arange(len(y)) % 2
        x = torch.randn(len(y), 1, 6, 6) + y[:, None, None, None]
    network = normalised(scaled(mlp() if kind == "linear" else cnn(), 4.0), 1.5, example=x[:1])
    fitted = map_posterior.fit(network, Categorical(), (x, y), epochs=30, learning_rate=1e-2, batch_size=32)
    trained = fitted.network
    result = plain(trained)
    torch.testing.assert_close(result(x), trained(x), rtol=0, atol=0)
    torch.testing.assert_close(fitted.outputs(x)[0], trained(x), rtol=1e-5, atol=1e-5)
    assert not any(parametrize.is_parametrized(m) for m in result.modules())
    assert list(result.state_dict()) == list(plain(network).state_dict())
    shapes = {0: (1, 6, 6), 2: (3, 6, 6)} if kind == "convolutional" else {0: (2,), 2: (8,)}
    norms = [largest(dense(result[index], shape)) for index, shape in shapes.items()]
    assert max(norms) <= 1.05 * 1.5
    assert max(norms) > 0.9 * 1.5  # the bound was felt
    assert (result(x).argmax(1) == y).float().mean() > 0.9


def test_training_resumes_with_its_directions(tmp_path, blobs):
    """Buffers of the power iteration are in the checkpoint: a run in two parts ends where one run does."""

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.number == 3:
            raise Stop

    network = normalised(scaled(mlp(), 4.0), 1.0)
    options = {"epochs": 6, "learning_rate": 1e-2, "batch_size": 32}
    whole = map_posterior.fit(network, Categorical(), blobs[0], **options).network
    parts = {**options, "checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(Stop):
        map_posterior.fit(network, Categorical(), blobs[0], progress=stop, **parts)
    resumed = map_posterior.fit(network, Categorical(), blobs[0], **parts).network
    for one, two in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_the_network_is_left_as_it_was():
    network = scaled(mlp(), 5.0).eval()
    before = copy.deepcopy(network.state_dict())
    result = normalised(network, 0.5)
    assert not any(m.training for m in result.modules())
    iterated(result, torch.randn(4, 2))
    plain(result)
    assert parametrize.is_parametrized(result[0])
    assert list(network.state_dict()) == list(before)
    assert all(torch.equal(network.state_dict()[n], t) for n, t in before.items())


def test_evaluation_does_not_move_the_weights():
    network = normalised(scaled(mlp(), 5.0), 0.5).eval()
    x = torch.randn(4, 2)
    first = network(x)
    torch.testing.assert_close(network(x), first, rtol=0, atol=0)
    assert plain(network.train()).training


def test_weights_of_zero_are_no_trouble():
    network = scaled(mlp(), 0.0)
    result = normalised(network)
    result(torch.randn(4, 2)).sum().backward()
    gradients = [p.grad for p in result.parameters() if p.grad is not None]
    assert all(g.isfinite().all() for g in gradients)
    with torch.no_grad():
        result[0].parametrizations.weight.original.copy_(10 * torch.ones(8, 2))
    assert largest(plain(iterated(result, torch.randn(4, 2)))[0].weight) < 3.01


def test_bad_input():
    with pytest.raises(ValueError, match="Expected `bound` > 0"):
        normalised(mlp(), 0.0)
    with pytest.raises(ValueError, match=r"convolution `0`.*pass some, x\[:1\]"):
        normalised(cnn())
    with pytest.raises(ValueError, match="`plain` first"):
        normalised(normalised(mlp()))
    circular = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))
    with pytest.raises(ValueError, match="zero padding, got 'circular'"):
        normalised(circular, last=True, example=torch.randn(1, 1, 5, 5))
