"""bayesian-torch: the plain copy runs as the network at its means, and the Gaussian is the layers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from bayesian_torch import layers
from bayesian_torch.models.bayesian import resnet_variational, simple_cnn_variational
from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss
from torch import nn

import dapcal
from dapcal.adapters.bayesian_torch import from_mean_field, plain_network
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors._training.mean_field import divergence

PRIOR = {
    "prior_mu": 0.0,
    "prior_sigma": 0.7,
    "posterior_mu_init": 0.0,
    "posterior_rho_init": -2.0,
    "moped_enable": False,
    "moped_delta": 0.5,
}
KINDS = ("Reparameterization", "Flipout")


def converted(kind="Reparameterization", **options):
    """A convolutional network after dnn_to_bnn, whose layers return outputs alone."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 3),
    )
    dnn_to_bnn(model, {**PRIOR, "type": kind, **options})
    model(torch.randn(30, 1, 6, 6))  # statistics of the batch norm
    return model.eval()


class Unpacking(nn.Module):
    """A custom forward that adds up the layers' KL terms."""

    def __init__(self, kind="Reparameterization", **prior):
        super().__init__()
        linear, convolution = getattr(layers, f"Linear{kind}"), getattr(layers, f"Conv1d{kind}")
        self.first = convolution(1, 4, 3, **prior)
        self.second = linear(16, 5, **prior)
        self.last = linear(5, 3, bias=False, **prior)

    def forward(self, x):
        x, total = self.first(x[:, None])
        x, kl = self.second(x.tanh().flatten(1))
        total = total + kl
        x = self.last(x.tanh(), return_kl=False)
        return x, total


def silenced(model):
    """The same network with σ = 0: its outputs are those of the means."""
    quiet = copy.deepcopy(model).eval()
    for name, parameter in quiet.named_parameters():
        if "rho_" in name:
            parameter.data.fill_(-200.0)
    return quiet


NETWORKS = {
    "converted": (lambda kind: converted(kind), (1, 6, 6)),
    "unpacking": (lambda kind: Unpacking(kind).eval(), (6,)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_copy_runs_as_the_network_at_its_means(network, kind):
    make, shape = NETWORKS[network]
    model, x = make(kind), torch.randn(9, *shape)
    quiet = silenced(model)(x)
    expected = quiet[0] if isinstance(quiet, tuple) else quiet
    posterior = from_mean_field(model, Categorical(), draws=4)
    torch.testing.assert_close(posterior.network(x), expected)
    assert posterior.outputs(x).shape == (4, 9, 3)
    assert posterior.outputs(x).std(0).min() > 0
    assert not any("mu_" in n or "rho_" in n or "prior_" in n for n in plain_network(model).state_dict())
    torch.testing.assert_close(copy.deepcopy(posterior.network)(x), expected)


@pytest.mark.parametrize("network", NETWORKS)
def test_draws_predict_as_the_network_does(network):
    make, shape = NETWORKS[network]
    model, x = make("Reparameterization"), torch.randn(3, *shape)
    posterior = from_mean_field(model, Categorical(), draws=4000)
    with torch.no_grad():
        theirs = [model(x) for _ in range(4000)]
    theirs = torch.stack([out[0] if isinstance(out, tuple) else out for out in theirs])
    ours = posterior.outputs(x)
    error = theirs.std(0) / 4000**0.5
    assert ((ours.mean(0) - theirs.mean(0)) / error).abs().max() < 6
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0.08, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prior_is_that_of_its_kl_term(kind):
    model = Unpacking(kind, prior_variance=0.3)
    posterior = from_mean_field(model, Categorical(), draws=1)
    assert posterior.prior.sigma0.tolist() == pytest.approx([0.3])
    gaussian = posterior.gaussian
    each = posterior.layout.unflatten(torch.stack([gaussian.mean, 0.5 * gaussian.variance.log()]))
    ours = sum(
        divergence(values[0], values[1], 0.3) / values[0].numel() for values in each.values()
    )  # theirs are means
    torch.testing.assert_close(ours, get_kl_loss(model))


def test_its_own_networks():
    with torch.no_grad():
        cnn = simple_cnn_variational.SCNN().eval()
        x = torch.randn(2, 1, 28, 28)
        torch.testing.assert_close(from_mean_field(cnn, Categorical(), draws=1).network(x), silenced(cnn)(x)[0])
        resnet = resnet_variational.ResNet(resnet_variational.BasicBlock, [1, 1, 1]).eval()
        x = torch.randn(2, 3, 16, 16)
        found = from_mean_field(resnet, Categorical(), draws=2)
        torch.testing.assert_close(found.network(x), silenced(resnet)(x)[0])
        assert "bn1.weight" not in found.layout.names
        assert "layer2.0.conv1.weight" in found.layout.names
        assert found.outputs(x).shape == (2, 2, 10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_convolution(transposed, dimensions, kind):
    name = f"Conv{'Transpose' if transposed else ''}{dimensions}d{kind}"
    options = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2, **({"output_padding": 1} if transposed else {})}
    prior = {"prior_mean": 0, "prior_variance": 0.5, "posterior_mu_init": 0, "posterior_rho_init": -3}
    layer = getattr(layers, name)(4, 6, 3, **options, **prior, bias=name != "ConvTranspose3dFlipout")  # fails with one
    x = torch.randn(5, 4, *[7] * dimensions)
    layer.dnn_to_bnn_flag = True  # some KL terms fail with groups
    torch.testing.assert_close(plain_network(layer)(x), silenced(layer)(x))


def test_a_recurrent_network():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = layers.LSTMReparameterization(2, 4)
            self.head = layers.LinearReparameterization(4, 1)

        def forward(self, x):
            states, _, total = self.lstm(x)
            x, kl = self.head(states[:, -1])
            return x, total + kl

    model, x = Sequence(), torch.randn(6, 5, 2)
    posterior = from_mean_field(model, Gaussian(), draws=3)
    torch.testing.assert_close(posterior.network(x), silenced(model)(x)[0])
    assert posterior.outputs(x).std(0).min() > 0


def test_a_shared_layer_stays_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = layers.LinearReparameterization(3, 3)
            self.two = self.one

        def forward(self, x):
            return self.two(self.one(x)[0])

    model, x = Twice(), torch.randn(4, 3)
    posterior = from_mean_field(model, Gaussian(), draws=2)
    assert posterior.layout.names == ("one.weight", "one.bias")
    torch.testing.assert_close(posterior.network(x), silenced(model)(x)[0])
    assert posterior.model.one is posterior.model.two


def test_the_network_that_was_passed_in_is_left_alone():
    model = Unpacking()
    before = copy.deepcopy(model.state_dict())
    from_mean_field(model, Categorical(), draws=2)
    assert isinstance(model(torch.randn(2, 6)), tuple)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_trained_and_calibrated_from_end_to_end(tmp_path):
    x = torch.randn(300, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    dnn_to_bnn(model, {**PRIOR, "type": "Flipout", "prior_sigma": 1.0, "posterior_rho_init": -4.0})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[:180]), y[:180]) + get_kl_loss(model) / 180).backward()
        optimizer.step()
    posterior = from_mean_field(model, Categorical(), draws=30)
    held_out = (x[180:], y[180:])
    calibrated = dapcal.calibrate(posterior, train=(x[:180], y[:180]), held_out=held_out, ood=9 * x)
    probs = calibrated(x[180:]).probs
    assert (probs.argmax(-1) == y[180:]).float().mean() > 0.85
    calibrated.save(tmp_path / "network.dap")
    torch.testing.assert_close(dapcal.load(tmp_path / "network.dap", plain_network(model))(x[180:]).probs, probs)


def shifted(model):
    model.last.prior_weight_mu.fill_(0.1)
    return model


def mixed(model):
    model.second.prior_weight_sigma[0] = 2.0
    return model


def prepared(model):
    model.first.prepare()
    return model


REFUSED = {
    "prior mean": (lambda: shifted(Unpacking()), r"prior with mean 0, got another for `last.mu_weight`.*prior_mean=0"),
    "prior scales": (lambda: mixed(Unpacking()), r"one prior scale for `second.mu_weight`, got 1 to 2; train"),
    "no layer": (lambda: nn.Linear(2, 2), r"bayesian-torch layers .* got Linear without any; convert"),
    "prepared": (
        lambda: prepared(Unpacking()),
        r"not prepared for quantisation, got a prepared Conv1dReparam.*convert",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        from_mean_field(make(), Categorical())
