"""Save and load: what comes back predicts the same, and whatever is wrong with a file is said."""

from __future__ import annotations

import functools
import itertools
import json
import math
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dapcal
from artefact_bytes import header_and_data, with_header
from dapcal import artifact, container, probing, saving
from dapcal.adjust import Inflate, PriorMonteCarlo, Reweight, SelfNormalised, Transport
from dapcal.calibrate import Calibrated
from dapcal.calibration.scales import Exp, ScaledSigmoid, Softplus
from dapcal.distances import ClassGaussian, Space, Standardised, hausdorff, mmd, nearest, verdicts
from dapcal.distances.projectors import Features, Identity, LayerFeatures, RandomFourier, Vae
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import dropout, gaussian, samples
from dapcal.posteriors.predictions import StackedPredictions
from dapcal.predictive import Prediction
from dapcal.types import Posterior

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")

X = torch.tensor([[0.1, 0.2], [1.0, -0.4], [3.0, 3.0], [-5.0, 0.0], [0.0, 9.0]])
HIDDEN = 6
IDENTITY = Space(Identity(), name="inputs")
FEATURES = Space(Features(), name="features")


def network(outputs: int = 3, seed: int = 3, hidden: int = HIDDEN) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def with_batch_norm(seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))
        model(torch.randn(50, 2))
    return model


def stacked(x: Tensor) -> Tensor:
    """Three networks whose outputs alone are known."""
    return torch.stack([network(seed=seed)(x) for seed in range(3)])


def diagonal(outputs: int = 3, likelihood=None) -> Posterior:
    model = network(outputs)
    scale = {n: torch.full_like(p, 0.2) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood or Categorical(), scale, draws=8)


def full() -> Posterior:
    size = HIDDEN * 3 + 3
    root = 0.1 * torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    covariance = root @ root.T / size + 0.01 * torch.eye(size)
    return gaussian.full(network(), Categorical(), covariance, ["2.weight", "2.bias"], draws=8)


def state_dicts(**options) -> Posterior:
    states = [network(seed=seed).state_dict() for seed in range(5)]
    return samples.from_state_dicts(network(), Categorical(), states, **options)


def batch_norm_ensemble() -> Posterior:
    states = [with_batch_norm(seed).state_dict() for seed in range(4)]
    return samples.from_state_dicts(with_batch_norm(), Categorical(), states)


def own_projector(x: Tensor) -> Tensor:
    return torch.stack([x.sin().sum(1), x.norm(dim=1)], 1)


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    return x, network()(x).argmax(-1)


def calibrate(posterior: Posterior, adjust=None, *distance: Space, y: Tensor | None = None, **options) -> Calibrated:
    x, labels = data()
    y = labels if y is None else y
    calibrated = dapcal.calibrate(
        posterior,
        train=(x[:40], y[:40]),
        held_out=(x[40:], y[40:]),
        ood=X[2:],
        distance=distance or (FEATURES,),
        adjust=adjust,
        candidates=6,
        **options,
    )
    # a φ at which the adjustment shows
    return replace(calibrated, phi=float(calibrated.scale.inverse(torch.tensor(0.5, dtype=torch.float64))))


@functools.cache
def plain(space: Space = FEATURES) -> Calibrated:
    return calibrate(diagonal(), Inflate(), space)


def assert_same(one: Prediction, two: Prediction) -> None:
    names = ["mean", "variance", "epistemic", "aleatoric", "entropy", "distance", "pre_distance"]
    for name in [*names, "ood_score", "ood_p_value"]:
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for name, a, b in zip(one.diagnostics._fields, one.diagnostics, two.diagnostics, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)
    assert (one.distance > 0).any()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.dap"


# What is stored.

ROUND_TRIPS = {
    # every adjustment on a diagonal posterior
    "inflate": (diagonal, Inflate(), FEATURES),
    "drawn": (diagonal, Inflate(drawn=True), FEATURES),
    "reweight": (diagonal, Reweight(), FEATURES),
    "self-normalised": (diagonal, Reweight(SelfNormalised()), FEATURES),
    "normalise": (diagonal, Reweight(normalise=True), FEATURES),
    "complete": (diagonal, Reweight(complete=True), FEATURES),
    "smooth": (diagonal, Reweight(smooth=True), FEATURES),
    "prior Monte Carlo": (diagonal, Reweight(PriorMonteCarlo(*(t[:10] for t in data()), draws=20)), FEATURES),
    "transport": (diagonal, Transport(), FEATURES),
    "shift": (diagonal, Transport(shift=True, step=None), FEATURES),
    # every other posterior
    "full, inflate": (full, Inflate(), FEATURES),
    "full, reweight": (full, Reweight(), IDENTITY),
    "full, transport": (full, Transport(), FEATURES),
    "state dicts, inflate": (state_dicts, Inflate(), FEATURES),
    "state dicts, drawn": (state_dicts, Inflate(drawn=True), IDENTITY),
    "state dicts with a prior, reweight": (
        functools.partial(state_dicts, prior_scale={"0.*": 1.0, "*": 0.5}, aware={"2.*": 1.0, "*": 0.3}),
        Reweight(SelfNormalised()),
        FEATURES,
    ),
    "batch norm, inflate": (batch_norm_ensemble, Inflate(), FEATURES),
    # every projector and metric
    "identity": (diagonal, Inflate(), IDENTITY),
    "unit features of a named layer": (diagonal, Inflate(), Space(Features("2", unit=True), radius=0.1)),
    "random Fourier, transport": (diagonal, Transport(), Space(RandomFourier(dimension=16))),
    "standardised inputs": (diagonal, Inflate(), Space(Standardised())),
    "VAE, reweight": (diagonal, Reweight(), Space(Vae(dimension=2, hidden=8, epochs=2))),
    "k-th neighbour, no radius": (diagonal, Inflate(), Space(metric=functools.partial(nearest, k=3), radius=None)),
    "sum over a set": (full, Inflate(), Space(metric=functools.partial(nearest, over="sum"))),
    "Hausdorff, full": (full, Transport(), Space(RandomFourier(dimension=8), hausdorff)),
    "Hausdorff, state dicts": (state_dicts, Inflate(), Space(Identity(), hausdorff)),
    "nearest class": (diagonal, Inflate(), Space(Features(unit=True), ClassGaussian())),
    "nearest class, inputs, reweight": (full, Reweight(), Space(Identity(), ClassGaussian(shrinkage=0.1))),
    "MMD": (diagonal, Reweight(), Space(Identity(), mmd)),
    "MMD, VAE": (state_dicts, Inflate(), Space(Vae(dimension=2, hidden=8, epochs=2), mmd)),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_a_loaded_posterior_predicts_the_same_to_the_last_bit(case, path):
    make, adjust, space = ROUND_TRIPS[case]
    calibrated = calibrate(make(), adjust, space)
    calibrated.save(path)
    fresh = with_batch_norm(seed=99) if make is batch_norm_ensemble else network(seed=99)
    loaded = dapcal.load(path, fresh)
    assert_same(loaded(X), calibrated(X))
    assert loaded.phi == calibrated.phi
    assert loaded.factor == calibrated.factor
    assert loaded.notes == calibrated.notes
    assert type(loaded.adjust) is type(calibrated.adjust)
    for one, two in zip(vars(loaded.curve).values(), vars(calibrated.curve).values(), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))


@pytest.mark.parametrize("adjust", [Inflate(drawn=True), Reweight(), Transport()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("metric", [nearest, functools.partial(nearest, over="sum"), hausdorff, mmd, ClassGaussian()])
def test_joint_predictions_come_back_too(adjust, metric, path):
    calibrated = calibrate(diagonal(), adjust, Space(Identity(), metric))
    calibrated.save(path)
    one, two = dapcal.load(path, network(seed=99)).joint(X), calibrated.joint(X)
    assert_same(one, two)
    y = torch.tensor([0, 1, 2, 0, 1])
    assert torch.equal(one.log_prob_joint(y), two.log_prob_joint(y))


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(Categorical(temperature=1.7), 3), (Bernoulli(0.4), 1), (Gaussian(0.3), 2), (NoiseHead(0.7, 0.01), 4)],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_every_likelihood_comes_back(likelihood, outputs, path):
    f = network(outputs)(data()[0]).detach()
    y = {1: (f[:, 0] > 0).long(), 3: f.argmax(-1)}.get(outputs, f[:, :2])
    calibrated = calibrate(diagonal(outputs, likelihood), Inflate(), FEATURES, y=y, temperature=False)
    calibrated.save(path)
    loaded = dapcal.load(path, network(outputs, seed=99))
    assert loaded.posterior.likelihood == likelihood
    assert_same(loaded(X), calibrated(X))
    assert torch.equal(loaded(X[:1]).log_prob(y[:1]), calibrated(X[:1]).log_prob(y[:1]))


@pytest.mark.parametrize("scale", [Exp(), Softplus(), ScaledSigmoid(20.0)], ids=lambda s: type(s).__name__)
def test_every_scale_comes_back(scale, path):
    calibrated = calibrate(diagonal(), Inflate(), FEATURES, scale=scale)
    calibrated.save(path)
    loaded = dapcal.load(path, network())
    assert loaded.scale == scale
    assert_same(loaded(X), calibrated(X))


def test_default_spaces_and_further_evidence_come_back(path, monkeypatch):
    monkeypatch.setattr(verdicts, "THRESHOLD", 0.0)  # every space counts, and normalised features beside them
    x, y = data()
    calibrated = dapcal.calibrate(diagonal(), train=(x[:40], y[:40]), held_out=(x[40:], y[40:]), temperature=True)
    calibrated.save(path)
    loaded = dapcal.load(path, network())
    assert [s.name for s in loaded.evidence.further] == [s.name for s in calibrated.evidence.further] != []
    assert_same(loaded(X), calibrated(X))
    assert loaded.posterior.likelihood.temperature == calibrated.posterior.likelihood.temperature != 1


def test_several_spaces_come_back(path):
    calibrated = calibrate(diagonal(), Inflate(), FEATURES, IDENTITY, Space(RandomFourier(dimension=8), mmd))
    calibrated.save(path)
    assert_same(dapcal.load(path, network())(X), calibrated(X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_come_back(dtype, path):
    model = network().to(dtype)
    scale = {n: torch.full_like(p, 0.2) for n, p in model.named_parameters()}
    x, y = data()
    x = x.to(dtype)
    calibrated = dapcal.calibrate(
        gaussian.diagonal(model, Categorical(), scale, draws=8),
        train=(x[:40], y[:40]),
        held_out=(x[40:], y[40:]),
        ood=X[2:].to(dtype),
        distance=FEATURES,
    )
    calibrated.save(path)
    loaded = dapcal.load(path, network().to(dtype))
    assert loaded(X.to(dtype)).probs.dtype == dtype
    assert_same(loaded(X.to(dtype)), calibrated(X.to(dtype)))


def test_a_loaded_posterior_can_be_saved_again(path, tmp_path):
    calibrated = calibrate(full(), Transport())
    calibrated.save(path)
    dapcal.load(path, network()).save(tmp_path / "again.dap")
    assert header_and_data((tmp_path / "again.dap").read_bytes()) == header_and_data(path.read_bytes())


def test_what_is_saved_beside_a_posterior_comes_back_without_a_model(path):
    calibrated = calibrate(full(), Inflate())
    about = {"columns": ["größe", "weight"], "scale": [0.1, 1e-300], "nested": {"empty": []}}
    further = {"train.x": X, "train.y": torch.arange(5)}
    artifact.save(calibrated, path, about, further)
    stored = artifact.open(path)
    assert stored.about == about
    assert stored.attachments.keys() == further.keys()
    assert all(torch.equal(stored.attachments[name], further[name]) for name in further)
    assert_same(dapcal.load(path, network())(X), calibrated(X))
    calibrated.save(path)
    assert (artifact.open(path).about, artifact.open(path).attachments) == ({}, {})


def test_what_could_not_be_loaded_is_not_saved(path):
    with pytest.raises(ValueError, match=r"finite `attachments`, got NaN or inf in 'rows'; drop or impute"):
        artifact.save(plain(), path, attachments={"rows": torch.tensor([1.0, math.nan])})
    assert not path.exists()


def test_the_model_passed_to_load_is_left_as_it_was(path):
    plain().save(path)
    model = network(seed=99).train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    dapcal.load(path, model)(X)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


# What is given again.


def test_stacked_predictions_are_given_again(path):
    calibrated = calibrate(StackedPredictions(stacked, Categorical()), Inflate(), IDENTITY)
    calibrated.save(path)
    assert_same(dapcal.load(path, stacked)(X), calibrated(X))


def test_a_projector_of_ones_own_is_given_again(path):
    calibrated = calibrate(diagonal(), Inflate(), Space(own_projector, name="mine"))
    calibrated.save(path)
    assert_same(dapcal.load(path, network(), projector=own_projector)(X), calibrated(X))
    assert_same(dapcal.load(path, network(), projector={"mine": own_projector})(X), calibrated(X))


def test_projectors_are_told_apart_by_the_name_of_their_space(path):
    three = Space(own_projector, name="mine"), FEATURES, Space(torch.sin, name="waves")
    calibrated = calibrate(diagonal(), Inflate(), *three)
    calibrated.save(path)
    loaded = dapcal.load(path, network(), projector={"waves": torch.sin, "mine": own_projector})
    assert_same(loaded(X), calibrated(X))


@pytest.mark.parametrize("projector", [None, {"yours": own_projector}, {}])
def test_a_missing_projector_is_named(projector, path):
    calibrate(diagonal(), Inflate(), Space(own_projector, name="mine")).save(path)
    with pytest.raises(ValueError, match=r"your projector \(.*'mine'.*pass it: dapcal\.load\(.*projector="):
        dapcal.load(path, network(), projector=projector)


def test_one_callable_does_not_stand_for_two_projectors(path):
    calibrate(diagonal(), Inflate(), Space(own_projector, name="mine"), Space(torch.sin, name="waves")).save(path)
    with pytest.raises(ValueError, match="name"):
        dapcal.load(path, network(), projector=own_projector)


def test_features_of_another_network_are_not_taken_for_the_posteriors(path):
    """A projector around a network of one's own must not come back around the posterior's network."""
    own = LayerFeatures(network(seed=50), "2")
    calibrated = calibrate(diagonal(), Inflate(), Space(own, name="mine"))
    try:
        calibrated.save(path)
    except TypeError:
        assert not path.exists()
    else:
        assert_same(dapcal.load(path, network(), projector=own)(X), calibrated(X))


@dataclass(frozen=True)
class Sharper(Categorical):
    """A likelihood of one's own."""


def test_a_likelihood_of_ones_own_is_given_again(path):
    calibrated = calibrate(diagonal(3, Sharper()), Inflate())
    calibrated.save(path)
    assert_same(dapcal.load(path, network(), likelihood=Sharper())(X), calibrated(X))
    with pytest.raises(ValueError, match=r"your likelihood \(Sharper.*pass it.*likelihood="):
        dapcal.load(path, network())


# Files that are not what they should be.


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("artifact") / "model.dap"
    plain().save(path)
    return path.read_bytes()


def edited(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """The file with another JSON description."""

    def edit(content: bytes) -> bytes:
        header, tensors = header_and_data(content)
        description = json.loads(header["__metadata__"]["dapcal"])
        changed = change(description)
        header["__metadata__"]["dapcal"] = changed if isinstance(changed, str) else json.dumps(description)
        return with_header(header, tensors)

    return edit


def flipped(where: float) -> Callable[[bytes], bytes]:
    """One bit of the tensors' bytes turned over."""

    def flip(content: bytes) -> bytes:
        start = 8 + struct.unpack("<Q", content[:8])[0]
        place = start + int(where * (len(content) - start - 1))
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    return flip


def without_checksum(content: bytes) -> bytes:
    header, tensors = header_and_data(content)
    del header["__metadata__"]["sha256"]
    return with_header(header, tensors)


def reshaped(content: bytes) -> bytes:
    """The same bytes, read as a matrix of another shape."""
    header, tensors = header_and_data(content)
    name = next(name for name in header if name.endswith("draws"))
    header[name]["shape"] = header[name]["shape"][::-1]
    return with_header(header, tensors)


def set_phi(description: dict) -> None:
    description["tree"]["fields"]["phi"] = {"float": (3.0).hex()}


BROKEN = {
    "truncated in the data": (lambda b: b[: len(b) * 3 // 4], "truncated.*save it again"),
    "truncated in the header": (lambda b: b[:100], "truncated.*save it again"),
    "without its last byte": (lambda b: b[:-1], "truncated.*save it again"),
    "with a byte too many": (lambda b: b + b"\0", "save it again"),
    "random bytes": (lambda _: random.Random(0).randbytes(5000), "save it again"),
    "text": (lambda _: b"phi = 3\n" * 100, "save it again"),
    "empty": (lambda _: b"", "save it again"),
    "pickle": (lambda _: pickle.dumps({"phi": 3}), "save it again"),
    "first byte of a tensor": (flipped(0.0), "changed after it was saved.*save it again"),
    "middle byte of a tensor": (flipped(0.5), "changed after it was saved.*save it again"),
    "last byte of a tensor": (flipped(1.0), "changed after it was saved.*save it again"),
    "another shape of a tensor": (reshaped, "changed after it was saved.*save it again"),
    "another φ": (edited(set_phi), "changed after it was saved.*save it again"),
    "no checksum": (without_checksum, "changed after it was saved.*save it again"),
    "broken JSON": (edited(lambda d: json.dumps(d)[:-10]), "save it again"),
    "JSON of something else": (edited(lambda _: "[1, 2]"), "save it again"),
    "later version": (edited(lambda d: d.update(version=3)), r"version 3.*reads versions 1 and 2.*use the version of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_a_remedy(case, saved, path):
    damage, words = BROKEN[case]
    path.write_bytes(damage(saved))
    with pytest.raises(ValueError, match=f"model.dap.*{words}"):
        dapcal.load(path, network())


def test_the_undamaged_file_survives_the_same_way_of_editing(saved, path):
    """So that the cases above fail for their own reason."""
    path.write_bytes(with_header(*header_and_data(saved)))
    assert dapcal.load(path, network())(X).probs.shape == (5, 3)


def test_a_missing_file_or_a_folder_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match=r"There is no file .*missing\.dap"):
        dapcal.load(tmp_path / "missing.dap", network())
    with pytest.raises(IsADirectoryError, match="folder is a folder; name the file"):
        dapcal.load(tmp_path / "folder", network())


def test_another_safetensors_file_is_refused(path):
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="safetensors file, but not one of dapcal's"):
        dapcal.load(path, network())


def test_not_a_number_in_a_tensor_is_refused(path):
    calibrated = plain()
    draws = calibrated.posterior.draws.clone()
    draws[0, 0] = math.nan
    replace(calibrated, posterior=replace(calibrated.posterior, draws=draws)).save(path)
    with pytest.raises(ValueError, match=r"NaN or inf in .*draws.*calibrate again"):
        dapcal.load(path, network())


def renamed() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, 3))


OTHER_MODELS = {
    "more layers": (lambda: network().append(nn.Linear(3, 3)), "another model.*3.bias.*only one of the two"),
    "other names": (renamed, "another model.*only one of the two"),
    "fewer parameters": (lambda: nn.Sequential(nn.Linear(2, 3)), "another model.*only one of the two"),
    "wider": (lambda: network(hidden=HIDDEN + 1), r"another model.*0\.weight.*\(7, 2\) here and \(6, 2\) there"),
    "more classes": (lambda: network(4), r"another model.*2\.weight.*\(4, 6\) here and \(3, 6\) there"),
    "with buffers": (with_batch_norm, "another model.*only one of the two"),
    "float64": (lambda: network().double(), "saved in torch.float32, the model has .*float64.*convert the model"),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
@pytest.mark.parametrize("space", [IDENTITY, FEATURES], ids=lambda s: s.name)
def test_another_model_is_refused(case, space, path):
    make, words = OTHER_MODELS[case]
    plain(space).save(path)
    with pytest.raises(ValueError, match=words):
        dapcal.load(path, make())


class Residual(nn.Module):
    """Parameters of the same names and shapes, and a way around the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(2, HIDDEN))
        self.add_module("2", nn.Linear(HIDDEN, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.children()
        return last(torch.tanh(first(x)) + x.mean(1, keepdim=True))


def with_activation(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, HIDDEN), activation, nn.Linear(HIDDEN, 3))


SAME_SHAPES = {
    "ReLU": lambda: with_activation(nn.ReLU()),
    "GELU": lambda: with_activation(nn.GELU()),
    "none": lambda: with_activation(nn.Identity()),
    "hard tanh": lambda: with_activation(nn.Hardtanh()),
    "residual": Residual,
}


@pytest.mark.parametrize("case", SAME_SHAPES)
@pytest.mark.parametrize("space", [IDENTITY, FEATURES], ids=lambda s: s.name)
def test_a_network_that_differs_in_what_has_no_parameters_is_refused(case, space, path):
    plain(space).save(path)
    with pytest.raises(ValueError, match=r"another model: .* answers otherwise .*; check .* activations"):
        dapcal.load(path, SAME_SHAPES[case]())
    dapcal.load(path, network())


def test_a_file_that_does_not_say_what_its_network_answers_is_taken_as_before(path, monkeypatch):
    monkeypatch.setattr(saving, "probe", lambda _: {})
    plain(IDENTITY).save(path)
    dapcal.load(path, SAME_SHAPES["ReLU"]())


class ByChance(nn.Module):
    """Answers that differ from call to call, in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.randn(len(x), 1)


def test_a_network_that_answers_by_chance_is_not_asked():
    posterior, example = samples.from_stacked(ByChance(), Categorical(), stacked_weights("inner.")), X[:1]
    assert probing.probe(Asked(posterior, example)) == {}
    posterior = samples.from_stacked(network(), Categorical(), stacked_weights())
    (name,) = probing.probe(Asked(posterior, example))
    assert name == "probe.cpu"


@dataclass(frozen=True)
class Asked:
    posterior: Posterior
    example: Tensor
    inputs: None = None


def stacked_weights(prefix: str = "") -> dict[str, Tensor]:
    states = [network(seed=seed).state_dict() for seed in range(3)]
    return {f"{prefix}{name}": torch.stack([state[name] for state in states]) for name in states[0]}


@pytest.mark.parametrize(("device", "noise", "fine"), [("cpu", 1e-4, True), ("cpu", 1e-2, False), ("cuda", 1e-2, True)])
def test_answers_may_differ_by_what_other_machines_round(device, noise, fine):
    asked = Asked(samples.from_stacked(network(), Categorical(), stacked_weights()), X[:1])
    (stored,) = probing.probe(asked).values()
    tensors = {f"probe.{device}": stored + noise * stored.abs().max()}
    if fine:
        probing.check_probe(asked, tensors, "file")
    else:
        with pytest.raises(ValueError, match="of another model"):
            probing.check_probe(asked, tensors, "file")
    one = stored.clone()
    one[0] += 9  # a choice inside a network that rounding has turned
    probing.check_probe(asked, {f"probe.{device}": one}, "file")


def test_a_function_in_place_of_the_network_is_refused(saved, path):
    path.write_bytes(saved)
    with pytest.raises((TypeError, ValueError), match=r"nn\.Module"):
        dapcal.load(path, stacked)


# Writing.


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new_one(path, monkeypatch):
    calibrated = plain()
    calibrated.save(path)
    before = path.read_bytes()

    def disk_full(file, *rest):
        file.write(before[:1000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container, "write", disk_full)
    with pytest.raises(OSError, match=r"Could not write .*model\.dap.*No space left.*untouched.*Check free space"):
        replace(calibrated, phi=1.0).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["model.dap"]


def test_a_real_limit_on_the_file_size_is_reported(path):
    """The kernel refuses the write, as it does on a full disk."""
    resource = pytest.importorskip("resource")
    calibrated = plain()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(OSError, match=r"Could not write .*Check free space") as caught:
            calibrated.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.__cause__ is not None
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("place", ["missing/model.dap", ""])
def test_a_place_that_cannot_be_written_to_is_named(place, tmp_path):
    with pytest.raises(OSError, match=r"Could not write .*permissions"):
        plain().save(tmp_path / place)
    assert list(tmp_path.iterdir()) == []


def test_the_file_may_be_read_by_whom_other_files_may_be_read(path):
    calibrate(full(), Inflate()).save(path)
    other = path.with_name("other")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_saving_again_replaces_the_file_at_once(path, monkeypatch):
    calibrated = plain()
    calibrated.save(path)
    before, seen, write = path.read_bytes(), [], container.write

    def watched(file, *rest):
        write(file, *rest)
        part = Path(file.name)
        seen.append((part != path, part.parent == path.parent, path.read_bytes() == before))

    monkeypatch.setattr(container, "write", watched)
    replace(calibrated, phi=1.25).save(path)
    assert seen == [(True, True, True)]  # beside the old file, which stays until the new one is complete
    assert dapcal.load(path, network()).phi == 1.25
    assert [p.name for p in path.parent.iterdir()] == ["model.dap"]


class OwnMetric:
    """A metric that is not dapcal's."""

    def __init__(self, points: Tensor) -> None:
        self.points = points

    def __call__(self, points: Tensor) -> Tensor:
        return torch.cdist(points, self.points).amin(1)

    def joint(self, points: Tensor) -> Tensor:
        return self(points).max()


class OwnScale(Exp):
    """A scale that is not dapcal's."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: {"adjust": lambda posterior, x: Inflate()(posterior, x)}, "function.*calibrated.adjust"),
        (lambda: {"scale": OwnScale()}, "OwnScale.*calibrated.scale"),
        (lambda: {"distance": calibrate(diagonal(), None, Space(Identity(), OwnMetric)).distance}, "OwnMetric"),
    ],
    ids=["adjustment", "scale", "metric"],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(change, words, path):
    calibrated = plain()
    calibrated.save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError, match=f"Cannot store a .*{words}.*given again at loading"):
        replace(calibrated, **change()).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["model.dap"]


def test_the_file_is_safetensors_and_nothing_is_unpickled(saved, path, monkeypatch):
    header, tensors = header_and_data(saved)
    ends = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    assert ends[0][0] == 0
    assert ends[-1][1] == len(tensors)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ends))  # no byte is anything else
    assert set(header["__metadata__"]) == {"dapcal", "blocks", "sha256"}
    path.write_bytes(saved)
    assert not zipfile.is_zipfile(path)

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert dapcal.load(path, network())(X).probs.shape == (5, 3)


# MC dropout


def dropping(rate: float = 0.4, hidden: int = HIDDEN) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Dropout(rate), nn.Linear(hidden, 3)
        )
        model(torch.randn(50, 2))
    return model


@pytest.mark.parametrize("space", [FEATURES, IDENTITY], ids=["features", "inputs"])
def test_a_dropout_posterior_round_trips_with_its_rates_and_weights(tmp_path, space):
    """The model given again has other weights, statistics and rates: what was stored counts."""
    calibrated = calibrate(dropout.wrap(dropping(), Categorical(), draws=6, seed=2), Inflate(), space)
    calibrated.save(tmp_path / "a.dap")
    other = dropping(0.9).train()
    other(9 * torch.randn(50, 2))
    again = dapcal.load(tmp_path / "a.dap", other)
    assert_same(calibrated(X), again(X))
    assert torch.equal(again.posterior.outputs(X), calibrated.posterior.outputs(X))
    assert other.training


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            nn.Sequential(*dropping()[:3], nn.Identity(), dropping()[4]),
            ValueError,
            r"dropout layers \['3'\], got one without",
        ),
        (dropping(hidden=5), ValueError, r"`0.weight` has shape \(5, 2\) here and \(6, 2\) there"),
        (
            nn.Sequential(*dropping(), nn.Linear(3, 3)),
            ValueError,
            r"\['5.bias', '5.weight'\] are parameters of only one",
        ),
        (dropping().double(), ValueError, "saved in torch.float32, the model has torch.float64"),
        (stacked, TypeError, "nn.Module"),
    ],
)
def test_a_dropout_posterior_refuses_another_model(tmp_path, model, error, message):
    calibrate(dropout.wrap(dropping(), Categorical(), draws=6)).save(tmp_path / "a.dap")
    with pytest.raises(error, match=message):
        dapcal.load(tmp_path / "a.dap", model)
