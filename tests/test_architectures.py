"""Architectures: the layer a person would name, every method that applies from fit to file, reasons where none does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import dapcal
from dapcal.calibrate import Calibrated
from dapcal.distances import Space
from dapcal.distances.projectors import Features, Identity, project
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble, laplace, samples, swag, variational, vogn
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior

# with so few held-out inputs, networks that know nothing yet, and weights that are used where they do not say much
pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")

CLASSES = 3
N = 24  # training inputs
QUICK = {"epochs": 1, "batch_size": 12, "learning_rate": 0.01}


# Networks, as people write them.


class Block(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)  # defined first, runs last
        self.conv1 = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(3)
        self.layer1 = nn.Sequential(Block(3, 4, 1), Block(4, 6, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer1(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(h), 1))


class Transformer(nn.Module):
    """Tokens (N, T) through an embedding, or vectors (N, T, 4) through a linear layer."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8) if tokens else nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class WithLogits(nn.Module):
    """Returns an object with `logits`, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classifier = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> SimpleNamespace:
        hidden = torch.tanh(self.encoder(x))
        return SimpleNamespace(logits=self.classifier(hidden), hidden_states=hidden)


class Lit(nn.Module):
    """A training harness around a network: a loss with class weights, normalisation, a counter."""

    def __init__(self) -> None:
        super().__init__()
        backbone = nn.Sequential(nn.Linear(6, 8), nn.GELU())
        self.model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(8, CLASSES)})
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(CLASSES))
        self.register_buffer("mean", torch.full((6,), 0.1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return self.criterion(self(x), y)

    def forward(self, x: Tensor) -> Tensor:
        return self.model["head"](self.model["backbone"](x - self.mean))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip


def conv_only() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, CLASSES, 1), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )  # fmt: skip


def normal(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(12, (n, 5), generator=generator)


class Architecture(NamedTuple):
    """A network with inputs for it; the layer whose input a person would call its features, and another layer."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    layer: str
    width: int  # of the features
    other: str
    other_width: int


ARCHITECTURES = {
    "mlp": Architecture(mlp, normal(6), "2", 8, "0", 6),
    "cnn": Architecture(cnn, normal(1, 8, 8), "6", 8, "4", 64),
    "resnet": Architecture(ResNet, normal(1, 8, 8), "fc", 6, "layer1.1", 4 * 64),
    "transformer of tokens": Architecture(lambda: Transformer(True), tokens, "head", 8, "encoder", 40),
    "transformer of vectors": Architecture(lambda: Transformer(False), normal(5, 4), "head", 8, "encoder.layers.0", 40),
    "lstm": Architecture(Recurrent, normal(5, 4), "head", 6, "lstm", 20),
    "logits": Architecture(WithLogits, normal(6), "classifier", 8, "encoder", 6),
    "lit": Architecture(Lit, normal(6), "model.head", 8, "model.backbone.1", 8),
    "convolutions alone": Architecture(conv_only, normal(1, 8, 8), "3", 5, "2", 5 * 64),
}
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def labelled(inputs: Callable[[int, torch.Generator], Tensor], n: int, seed: int) -> tuple[Tensor, Tensor]:
    return inputs(n, torch.Generator().manual_seed(seed)), torch.arange(n) % CLASSES


def data(name: str, n: int = N, seed: int = 1) -> tuple[Tensor, Tensor]:
    return labelled(ARCHITECTURES[name].inputs, n, seed)


@functools.cache
def trained(name: str) -> nn.Module:
    return map_posterior.fit(made(ARCHITECTURES[name].make), Categorical(), data(name), **QUICK).network


def point(name: str) -> NetworkPosterior:
    return map_posterior.point(trained(name), Categorical())


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(x)
    return getattr(found, "logits", found)


# Features.


@every_architecture
def test_default_features_enter_the_layer_that_a_person_would_name(name):
    architecture, x = ARCHITECTURES[name], data(name)[0]
    projector = Features().fit_projector(x, point(name))
    assert projector.layer == architecture.layer
    z = project(projector, x)
    assert z.shape == (N, architecture.width)
    head = trained(name).get_submodule(architecture.layer)
    # a convolution of single places and an average over them change places
    with torch.no_grad():
        outputs = nn.functional.linear(z, head.weight.flatten(1), head.bias)
    torch.testing.assert_close(outputs, outputs_of(trained(name), x), rtol=1e-4, atol=1e-5)


@every_architecture
def test_features_of_a_layer_by_name(name):
    architecture, x = ARCHITECTURES[name], data(name)[0]
    z = project(Features(architecture.other).fit_projector(x, point(name)), x)
    assert z.shape == (N, architecture.other_width)
    unit = project(Features(architecture.other, unit=True).fit_projector(x, point(name)), x)
    torch.testing.assert_close(unit, nn.functional.normalize(z))


@every_architecture
def test_an_unknown_layer_is_answered_with_the_candidates(name):
    with pytest.raises(ValueError, match=rf"no layer `last`; its layers are .*'{ARCHITECTURES[name].layer}'"):
        Features("last").fit_projector(data(name)[0], point(name))


def test_what_enters_an_embedding_is_no_point():
    x = data("transformer of tokens")[0]
    with pytest.raises(ValueError, match=r"floating-point numbers, got torch\.int64"):
        project(Features("embed").fit_projector(x, point("transformer of tokens")), x)


def test_a_network_without_layers_to_take_features_from():
    model = nn.Sequential(nn.LSTM(4, CLASSES, batch_first=True))
    names = r"Features\(layer=\.\.\.\), one of \['0'\]"
    with pytest.raises(ValueError, match=rf"no linear or convolutional layer.*{names}"):
        Features().fit_projector(torch.randn(2, 5, 4), map_posterior.point(model, Categorical()))


def test_convolutions_before_linear_layers_do_not_count():
    """The last layer that runs is a convolution, but a linear one before it has narrower features."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, CLASSES, 1), nn.AdaptiveAvgPool1d(1))
    projector = Features().fit_projector(torch.randn(2, 6), map_posterior.point(model, Categorical()))
    assert (projector.layer, projector.pool) == ("0", False)


# From training to a file.

METHODS: dict[str, Callable[..., NetworkPosterior]] = {
    "variational": functools.partial(variational.fit, draws=4, **QUICK),
    "several draws a gradient": functools.partial(variational.fit, draws=4, samples=2, **QUICK),
    "flipout": functools.partial(variational.fit, draws=4, flipout=True, **QUICK),
    "vogn": functools.partial(vogn.fit, draws=4, **QUICK),
    "swag": functools.partial(swag.fit, draws=4, start=0.0, per_epoch=2, **QUICK),
    "laplace": functools.partial(laplace.fit, draws=4, structure=laplace.Kronecker),
    "laplace sampled": functools.partial(
        laplace.fit, draws=4, structure=laplace.Diagonal, linearised=False, prior_scale=0.1
    ),
}
every_method = pytest.mark.parametrize("method", METHODS)


def calibrate(posterior: NetworkPosterior, train, held_out, **options) -> Calibrated:
    return dapcal.calibrate(posterior, train=train, held_out=held_out, candidates=3, **options)


def check_round_trip(own: Calibrated, x: Tensor, other: nn.Module, path) -> None:
    """Predictions are probabilities, the same in any batch, and come back from a file to the last bit."""
    prediction = own(x)
    assert prediction.probs.shape == (len(x), CLASSES)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(len(x)))
    assert prediction.ood_score.isfinite().all()
    alone = torch.cat([own(part).probs for part in x.split(5)])
    torch.testing.assert_close(alone, prediction.probs, rtol=1e-4, atol=1e-5)
    own.save(path)
    loaded = dapcal.load(path, other)(x)
    for field in ("probs", "epistemic", "distance", "ood_score", "ood_p_value"):
        assert torch.equal(getattr(loaded, field), getattr(prediction, field)), field


def check(name: str, posterior: NetworkPosterior, path, **options) -> Calibrated:
    own = calibrate(posterior, data(name), data(name, 16, 2), **options)
    check_round_trip(own, data(name, 12, 3)[0], made(ARCHITECTURES[name].make, 9), path)
    return own


@every_method
@every_architecture
def test_every_method_from_training_to_a_file(name, method, tmp_path):
    posterior = METHODS[method](trained(name), Categorical(), data(name))
    assert set(posterior.layout.names) == {n for n, _ in trained(name).named_parameters()}
    x = data(name, 5, 4)[0]
    assert posterior.outputs(x).shape == (4, 5, CLASSES)
    if method != "swag":  # the others keep the mean, or start there and move little
        torch.testing.assert_close(outputs_of(posterior.network, x), outputs_of(trained(name), x), rtol=0.5, atol=0.5)
    check(name, posterior, tmp_path / "model.dap")


@every_architecture
def test_an_ensemble_from_training_to_a_file(name, tmp_path):
    posterior = ensemble.fit(ARCHITECTURES[name].make, Categorical(), data(name), members=2, **QUICK)
    check(name, posterior, tmp_path / "model.dap")


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "convolutions alone"])
def test_a_last_layer_from_training_to_a_file(name, tmp_path):
    posterior = laplace.last_layer(trained(name), Categorical(), data(name), draws=4)
    layer = ARCHITECTURES[name].layer
    assert posterior.linear.layer == layer
    assert posterior.layout.names == (f"{layer}.weight", f"{layer}.bias")
    torch.testing.assert_close(outputs_of(posterior.network, data(name)[0]), outputs_of(trained(name), data(name)[0]))
    check(name, posterior, tmp_path / "model.dap")


def test_convolutions_alone_have_no_last_linear_layer():
    name = "convolutions alone"
    with pytest.raises(ValueError, match=r"no nn\.Linear layer.*'3'"):
        laplace.last_layer(trained(name), Categorical(), data(name))
    with pytest.raises(ValueError, match=r"name of an nn\.Linear, got `3`; the model has \[\]"):
        laplace.last_layer(trained(name), Categorical(), data(name), layer="3")


def test_convolutions_alone_are_calibrated_on_averaged_features(tmp_path):
    name = "convolutions alone"
    posterior = METHODS["variational"](trained(name), Categorical(), data(name))
    own = check(name, posterior, tmp_path / "model.dap", distance=Space(Features(), name="features"))
    assert own.distance.spaces[0].projector.pool
    default = calibrate(posterior, data(name), data(name, 16, 2))
    assert any("what enters the convolution `3`, averaged over places" in note for note in default.notes)


def test_a_spread_so_wide_that_a_little_distance_is_too_much():
    """Draws of a wide prior through batch norm: the guard holds at distances far smaller than usual ones."""
    posterior = laplace.fit(
        trained("resnet"), Categorical(), data("resnet"), draws=4, structure=laplace.Diagonal, linearised=False
    )
    assert posterior.likelihood.location_variance(posterior.outputs(data("resnet")[0])).min() > 1e6
    own = calibrate(posterior, data("resnet"), data("resnet", 16, 2))
    place = int((own.curve.phi - own.phi).abs().argmin())
    assert float(own.curve.nll[place] + own.curve.error[place]) <= own.curve.guard


def test_tokens_are_compared_by_their_features():
    name = "transformer of tokens"
    posterior = METHODS["laplace"](trained(name), Categorical(), data(name))
    notes = calibrate(posterior, data(name), data(name, 16, 2)).notes
    assert [note for note in notes if note.startswith("distance between features: AUROC")]
    assert not [note for note in notes if note.startswith("distance between inputs")]
    own = calibrate(posterior, data(name), data(name, 16, 2), distance=Space(Identity()))  # where one insists
    assert own(data(name)[0]).distance.eq(0).all()


@every_architecture
def test_features_by_name_serve_as_a_space(name, tmp_path):
    posterior = METHODS["variational"](trained(name), Categorical(), data(name))
    own = check(name, posterior, tmp_path / "model.dap", distance=Space(Features(ARCHITECTURES[name].other)))
    assert own.distance.spaces[0].projector.layer == ARCHITECTURES[name].other


# Tied parameters.


class Tied(nn.Module):
    """A next-token model whose decoder is its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(CLASSES, 4), nn.Linear(4, 4)
        self.decoder = nn.Linear(4, CLASSES, bias=False)
        self.decoder.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.body(self.tokens(x % CLASSES).mean(1))))


@every_method
def test_tied_parameters_count_once_and_stay_tied(method, tmp_path):
    train, model = labelled(tokens, N, 1), made(Tied)
    posterior = METHODS[method](model, Categorical(), train)
    assert posterior.layout.names == ("tokens.weight", "body.weight", "body.bias")
    assert posterior.network.decoder.weight is posterior.network.tokens.weight
    x = labelled(tokens, 6, 4)[0]
    if posterior.linear is None:
        state = {**posterior.shared, **posterior.layout.unflatten(posterior.draws[0])}
        torch.testing.assert_close(posterior.outputs(x)[0], functional_call(made(Tied, 9), state, (x,)).detach())
    check_round_trip(calibrate(posterior, train, labelled(tokens, 16, 2)), x, made(Tied, 9), tmp_path / "model.dap")


def test_an_ensemble_of_tied_networks(tmp_path):
    train, x = labelled(tokens, N, 1), labelled(tokens, 6, 4)[0]
    posterior = ensemble.fit(Tied, Categorical(), train, members=2, **QUICK)
    assert "decoder.weight" not in posterior.layout.names
    check_round_trip(calibrate(posterior, train, labelled(tokens, 16, 2)), x, made(Tied, 9), tmp_path / "model.dap")


def test_a_tied_last_layer_is_refused():
    with pytest.raises(ValueError, match=r"`decoder` are tied to another layer.*use laplace\.fit"):
        laplace.last_layer(made(Tied), Categorical(), labelled(tokens, N, 1))


# Frozen parameters.


def frozen(name: str) -> nn.Module:
    """All but the layer of the features' outputs."""
    model = made(ARCHITECTURES[name].make).requires_grad_(False)
    model.get_submodule(ARCHITECTURES[name].layer).requires_grad_(True)
    return model


@pytest.mark.parametrize("method", [*METHODS, "ensemble", "last layer"])
@pytest.mark.parametrize("name", ["resnet", "transformer of tokens", "lstm"])
def test_frozen_parameters_stay_and_are_not_random(name, method):
    model, layer = frozen(name), ARCHITECTURES[name].layer
    if method == "ensemble":
        posterior = ensemble.fit(lambda: frozen(name), Categorical(), data(name), members=2, **QUICK)
    elif method == "last layer":
        posterior = laplace.last_layer(model, Categorical(), data(name), draws=4)
    else:
        posterior = METHODS[method](model, Categorical(), data(name))
    learnt = {f"{layer}.weight", f"{layer}.bias"}
    own = {**posterior.layout.unflatten(posterior.draws), **posterior.shared}
    for parameter, value in model.named_parameters():
        if parameter not in learnt:
            assert torch.equal(own[parameter].expand(len(posterior.draws), *value.shape)[-1], value), parameter
    if method != "ensemble":  # which takes members as they are
        assert set(posterior.layout.names) == learnt
        assert {n for n, p in posterior.network.named_parameters() if p.requires_grad} == learnt


@pytest.mark.parametrize("method", METHODS)
def test_a_network_that_is_frozen_altogether_is_refused(method):
    model = made(mlp).requires_grad_(False)
    with pytest.raises(ValueError, match="parameters that require a gradient, got none; unfreeze some"):
        METHODS[method](model, Categorical(), data("mlp"))


def test_the_last_layer_of_a_frozen_network_is_that_of_the_network():
    frozen, free = (
        laplace.last_layer(made(mlp).requires_grad_(learning), Categorical(), data("mlp")) for learning in (False, True)
    )
    assert torch.equal(frozen.draws, free.draws)


# Batch norm and other buffers.


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in model.named_buffers() if "running" in n}


@every_method
def test_batch_norm_statistics(method):
    """Kept as they were trained; SWAG computes those of each draw."""
    posterior = METHODS[method](trained("resnet"), Categorical(), data("resnet"))
    names = set(statistics(trained("resnet")))
    assert len(names) == 14
    if method == "swag":
        assert set(posterior.buffers) == names
        assert all(len(b) == 4 for b in posterior.buffers.values())
        assert (posterior.buffers["layer1.1.bn2.running_mean"].std(0) > 0).any()
        return
    assert not posterior.buffers
    for name, value in statistics(trained("resnet")).items():
        assert torch.equal(posterior.shared[name], value), name


def test_members_of_an_ensemble_have_statistics_of_their_own():
    posterior = ensemble.fit(ResNet, Categorical(), data("resnet"), members=2, **QUICK)
    assert (posterior.buffers["bn1.running_mean"].std(0) > 0).any()
    assert posterior.buffers["bn1.num_batches_tracked"].dtype == torch.int64


BY_THE_BATCH = {
    "1d": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)), (6,)),
    "2d": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(), nn.Linear(72, 3)
        ),
        (1, 8, 8),
    ),
}


@pytest.mark.parametrize("method", [*METHODS, "last layer", "map", "state dicts"])
@pytest.mark.parametrize("kind", BY_THE_BATCH)
def test_batch_norm_without_statistics_is_refused(kind, method):
    """An input's prediction would depend on the inputs beside it."""
    make, shape = BY_THE_BATCH[kind]
    model, train = made(make), labelled(normal(*shape), N, 1)
    fits = {
        **METHODS,
        "last layer": laplace.last_layer,
        "map": map_posterior.fit,
        "state dicts": lambda m, likelihood, _: samples.from_state_dicts(m, likelihood, [m.state_dict()] * 2),
    }
    with pytest.raises(ValueError, match=r"\['1'\] use those of the batch.*track_running_stats=True.*GroupNorm"):
        fits[method](model, Categorical(), train)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm([4, 6, 6])], ids=repr)
def test_norms_of_single_inputs_are_accepted(norm, tmp_path):
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))

    train = labelled(normal(1, 8, 8), N, 1)
    posterior = variational.fit(made(make), Categorical(), train, draws=4, **QUICK)
    own = calibrate(posterior, train, labelled(normal(1, 8, 8), 16, 2))
    check_round_trip(own, labelled(normal(1, 8, 8), 12, 3)[0], made(make, 9), tmp_path / "model.dap")


class Buffers(nn.Module):
    """Buffers of several types, one of which is not in the state dict."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.register_buffer("shift", torch.full((6,), shift))
        self.register_buffer("mask", torch.tensor([True] * 5 + [False]))
        self.register_buffer("order", torch.arange(6).flip(0))
        self.register_buffer("rough", torch.ones(6, dtype=torch.bfloat16))
        self.register_buffer("unsaved", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, self.order] - self.shift) * self.mask * self.rough.to(x)
        return self.head(torch.relu(self.body(self.unsaved * chosen)))


@pytest.mark.parametrize("method", [*METHODS, "last layer"])
def test_buffers_of_any_type_are_kept(method, tmp_path):
    train, model = labelled(normal(6), N, 1), made(lambda: Buffers(0.3))
    posterior = METHODS.get(method, functools.partial(laplace.last_layer, draws=4))(model, Categorical(), train)
    for name, value in model.named_buffers():
        assert torch.equal(posterior.shared[name], value), name
        assert posterior.shared[name].dtype == value.dtype, name
    own = calibrate(posterior, train, labelled(normal(6), 16, 2))
    check_round_trip(own, labelled(normal(6), 12, 3)[0], made(Buffers, 9), tmp_path / "model.dap")


def test_members_of_an_ensemble_have_buffers_of_their_own(tmp_path):
    members = [made(lambda: Buffers(0.3), 1), made(lambda: Buffers(-0.7), 2)]
    members[1].order.copy_(torch.arange(6))
    posterior = ensemble.of(members, Categorical())
    x = labelled(normal(6), 12, 3)[0]
    torch.testing.assert_close(posterior.outputs(x), torch.stack([outputs_of(m, x) for m in members]))
    own = calibrate(posterior, labelled(normal(6), N, 1), labelled(normal(6), 16, 2))
    check_round_trip(own, x, made(Buffers, 9), tmp_path / "model.dap")


# What a network returns, and how it calls its layers.


class Returns(nn.Module):
    """Gives its outputs in some form."""

    def __init__(self, form: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body, self.head, self.form = nn.Linear(6, 8), nn.Linear(8, CLASSES), form

    def forward(self, x: Tensor) -> object:
        return self.form(self.head(torch.relu(self.body(x))))


@pytest.mark.parametrize("method", [*METHODS, "last layer", "map"])
def test_a_mapping_with_logits_is_as_good_as_a_tensor(method):
    train = labelled(normal(6), N, 1)
    fit = {"last layer": laplace.last_layer, "map": map_posterior.fit, **METHODS}[method]
    plain, mapped = (
        fit(made(lambda form=form: Returns(form)), Categorical(), train) for form in (as_it_is, in_mapping)
    )
    assert torch.equal(plain.outputs(train[0]), mapped.outputs(train[0]))


def as_it_is(outputs: Tensor) -> Tensor:
    return outputs


def in_mapping(outputs: Tensor) -> dict[str, Tensor]:
    return {"logits": outputs, "loss": outputs.sum()}


@pytest.mark.parametrize("method", [*METHODS, "last layer", "map"])
def test_a_tuple_is_refused_with_the_remedy(method):
    fit = {"last layer": laplace.last_layer, "map": map_posterior.fit, **METHODS}[method]
    with pytest.raises(TypeError, match=r"return a tensor .*got tuple; return the outputs alone"):
        fit(made(lambda: Returns(lambda outputs: (outputs, None))), Categorical(), labelled(normal(6), N, 1))


@pytest.mark.parametrize("places", [5, 12], ids=["other", "as many as a batch"])
@pytest.mark.parametrize("method", [*METHODS, "last layer", "map"])
def test_outputs_for_every_place_are_refused_with_the_remedy(method, places):
    """Also where the places are as many as the inputs of a minibatch."""
    fit = {"last layer": laplace.last_layer, "map": map_posterior.fit, **METHODS}[method]
    with pytest.raises(ValueError, match=r"Expected the model to return .*add a final layer that flattens"):
        fit(made(lambda: nn.Linear(4, CLASSES)), Categorical(), labelled(normal(places, 4), N, 1))


class ByKeyword(nn.Module):
    """Calls its layers with their inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=torch.relu(self.body(input=x)))


@pytest.mark.parametrize("method", [*METHODS, "last layer"])
def test_layers_may_be_called_by_keyword(method, tmp_path):
    train = labelled(normal(6), N, 1)
    fit = METHODS.get(method, functools.partial(laplace.last_layer, draws=4))
    posterior = fit(made(ByKeyword), Categorical(), train)
    plain = fit(made(lambda: Returns(as_it_is)), Categorical(), train)
    torch.testing.assert_close(posterior.outputs(train[0]), plain.outputs(train[0]))
    own = calibrate(posterior, train, labelled(normal(6), 16, 2))
    check_round_trip(own, labelled(normal(6), 12, 3)[0], made(ByKeyword, 9), tmp_path / "model.dap")


class Attention(nn.Module):
    """Attention of one's own: linear layers around torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(4, 8), nn.Linear(8, 24), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.embed(x)).chunk(3, -1))
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("method", [*METHODS, "last layer"])
def test_attention_by_a_function(method, tmp_path):
    train = labelled(normal(5, 4), N, 1)
    fit = METHODS.get(method, functools.partial(laplace.last_layer, draws=4))
    posterior = fit(made(Attention), Categorical(), train)
    x = labelled(normal(5, 4), 12, 3)[0]
    if posterior.linear is None:
        state = posterior.layout.unflatten(posterior.draws[1])
        expected = functional_call(made(Attention), {**posterior.shared, **state}, (x,)).detach()
        torch.testing.assert_close(posterior.outputs(x)[1], expected, rtol=1e-4, atol=1e-5)
    own = calibrate(posterior, train, labelled(normal(5, 4), 16, 2))
    check_round_trip(own, x, made(Attention, 9), tmp_path / "model.dap")
