"""Deployed modules and programs predict what calibrated posteriors do; what does not deploy is refused."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dapcal
from cases import trace_once
from dapcal import deploy
from dapcal.adjust import Inflate, Revert, Reweight
from dapcal.deploy import programs, spaces
from dapcal.distances import Space, Standardised, hausdorff, nearest
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import Features, Identity, RandomFourier
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, MultiLabel, NoiseHead, Poisson
from dapcal.posteriors import dropout, ensemble, gaussian, laplace
from dapcal.types import DapcalWarning

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
OUTPUTS = {Categorical: 3, Bernoulli: 1, MultiLabel: 3, Poisson: 2, Gaussian: 2, NoiseHead: 2}


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, outputs)
    )


def normed(outputs: int) -> nn.Module:
    """No plain chain, and buffers that differ between members."""
    norm = nn.BatchNorm1d(12)
    norm.running_mean.normal_()
    return nn.Sequential(nn.Linear(4, 12), norm, nn.Tanh(), nn.Linear(12, outputs))


def cnn(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 6, 2, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, outputs),
    )  # fmt: skip


def convolutional(outputs: int) -> nn.Module:
    """No linear layer: its features are averaged over places."""
    return nn.Sequential(*list(cnn(outputs))[:3], nn.Conv2d(6, outputs, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def data(likelihood, network: nn.Module, n: int, seed: int):
    """Inputs, and targets that the network explains but for some noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    with torch.no_grad():
        outputs = network.eval()(x)
    outputs = outputs + 0.3 * torch.randn(outputs.shape, generator=generator)
    if isinstance(likelihood, Categorical):
        return x, outputs.argmax(-1)
    if isinstance(likelihood, Bernoulli):
        return x, (outputs[:, 0] > 0).long()
    if isinstance(likelihood, MultiLabel):
        return x, (outputs > 0).long()
    if isinstance(likelihood, Poisson):
        return x, torch.poisson(outputs.exp(), generator=generator)
    return x, outputs[:, :1] if isinstance(likelihood, NoiseHead) else outputs


def calibrated_of(posterior_of, likelihood, make=mlp, seed=0, **options) -> dapcal.calibrate.Calibrated:
    torch.manual_seed(seed)
    networks = [make(OUTPUTS[type(likelihood)]) for _ in range(3)]
    train = data(likelihood, networks[0], 120, seed)
    posterior = posterior_of(networks, likelihood, train)
    options.setdefault("distance", [Space(Features()), Space(Identity(), partial(nearest, k=3), name="inputs")])
    held_out = data(likelihood, networks[0], 80, seed + 1)
    with warnings.catch_warnings():  # nothing here is trained: the best φ would be at an edge of the search
        warnings.simplefilter("ignore", DapcalWarning)
        calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, seed=seed, **options)
    return replace(calibrated, phi=-0.5 - 0.1 * seed)


def members(networks, likelihood, train):
    return ensemble.of(networks, likelihood)


def with_prior(networks, likelihood, train):
    """A Gaussian whose draws run through the network, with σ0 ≠ 1 and parameters that no distance widens."""
    scale = {n: torch.full_like(p, 0.2) for n, p in networks[0].named_parameters()}
    posterior = gaussian.diagonal(networks[0], likelihood, scale, draws=6)
    return posterior.with_prior(0.7, aware=["*weight"])


def last_layer(networks, likelihood, train, structure=laplace.Full):
    return laplace.last_layer(networks[0], likelihood, train, structure=structure, prior_scale=0.5)


def queries(calibrated) -> Tensor:
    """Near the training inputs, far from them, and training inputs themselves."""
    near = torch.randn(8, 4, generator=torch.Generator().manual_seed(9))
    points = next(s for s in calibrated.distance.spaces if isinstance(s.projector, Identity)).metric.index.points
    return torch.cat([30 * near[:1], points[:2], near, 30 * near[1:4], 1e4 * near[4:7]])  # 17


def assert_same(found: dict[str, Tensor] | deploy.Predicted, calibrated, x: Tensor) -> None:
    found = found if isinstance(found, dict) else found._asdict()
    assert list(found) == list(deploy.Predicted._fields)
    wanted = calibrated(x)
    for name, value in found.items():
        torch.testing.assert_close(
            torch.as_tensor(value), getattr(wanted, name), **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )


LIKELIHOODS = [
    Categorical(1.3), Bernoulli(0.8), MultiLabel(0.9), Poisson(), Gaussian(0.3), NoiseHead(factor=1.2, floor=0.02),
]  # fmt: skip
POSTERIORS = {
    "ensemble": members,
    "draws under a prior": with_prior,
    "last layer, full": last_layer,
    "last layer, Kronecker": partial(last_layer, structure=laplace.Kronecker),
    "last layer, diagonal": partial(last_layer, structure=laplace.Diagonal),
}


# Modules


@pytest.mark.parametrize("posterior_of", POSTERIORS.values(), ids=POSTERIORS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: type(likelihood).__name__)
def test_the_module_predicts_what_the_calibrated_posterior_does(posterior_of, likelihood):
    calibrated = calibrated_of(posterior_of, likelihood)
    x = queries(calibrated)
    module = deploy.module(calibrated)
    predicted = module(x)
    assert_same(predicted, calibrated, x)
    assert (predicted.distance[:1] > 0).all()
    assert not any(value.requires_grad for value in predicted)
    assert_same(module.train()(x), calibrated, x)  # dropout stays off


@pytest.mark.parametrize("posterior_of", POSTERIORS.values(), ids=POSTERIORS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS[-2:], ids=lambda likelihood: type(likelihood).__name__)
def test_a_module_reverts_too(posterior_of, likelihood):
    calibrated = calibrated_of(posterior_of, likelihood, adjust=Revert())
    x = queries(calibrated)
    module = deploy.module(calibrated)
    assert_same(module(x), calibrated, x)
    assert not torch.isclose(module(x).mean[:1], deploy.module(replace(calibrated, adjust=Inflate()))(x).mean[:1]).any()
    other = deploy.module(calibrated_of(posterior_of, likelihood, seed=5, adjust=Revert()))
    other.load_state_dict(module.state_dict())  # the training targets are in it
    assert_same(other(x), calibrated, x)


@pytest.mark.parametrize("make", [normed, cnn, convolutional])
def test_members_that_are_no_plain_chain(make):
    calibrated = calibrated_of(members, Categorical(), make)
    assert_same(deploy.module(calibrated)(queries(calibrated)), calibrated, queries(calibrated))


@pytest.mark.parametrize(
    ("make", "space"),
    [
        (mlp, Space(Features(unit=True), radius=None)),
        (mlp, Space(Features("3"), partial(nearest, k=120))),
        (mlp, Space(RandomFourier(20))),
        (mlp, Space(Standardised())),
        (cnn, Space(Features("3"))),
    ],
)
def test_every_space(make, space):
    calibrated = calibrated_of(members, Gaussian(0.3), make, distance=[space, Space(Identity(), name="inputs")])
    assert_same(deploy.module(calibrated)(queries(calibrated)), calibrated, queries(calibrated))


def test_a_state_dict_holds_every_number():
    one = calibrated_of(last_layer, NoiseHead(factor=1.2, floor=0.02), seed=0)
    two = calibrated_of(last_layer, NoiseHead(factor=0.9, floor=0.01), seed=5)
    module = deploy.module(two)
    x = queries(one)
    module.load_state_dict(deploy.module(one).state_dict())
    assert_same(module(x), one, x)
    assert_same(deploy.module(two)(x), two, x)  # nothing was shared


def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others_alone():
    calibrated = calibrated_of(members, Categorical())
    module, x = deploy.module(calibrated), queries(calibrated)
    broken = x.clone()
    broken[3, 1], broken[5, 0] = torch.nan, torch.inf
    predicted = module(broken)
    odd = torch.tensor([3, 5])
    assert all(value[odd].isnan().all() for value in predicted)
    rest = torch.tensor([i for i in range(17) if i not in (3, 5)])
    for value, wanted in zip(predicted, module(x), strict=True):
        torch.testing.assert_close(value[rest], wanted[rest])


def test_a_score_equal_to_held_out_ones_counts_them():
    """Pieces over an infinite scale are 0 to the last bit, and so is their sum."""
    calibrated = calibrated_of(members, Categorical())
    evidence = calibrated.evidence
    held_out = torch.tensor([-1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    tied = replace(evidence, scale=torch.full_like(evidence.scale, torch.inf), held_out=held_out)
    calibrated = replace(calibrated, evidence=tied)
    assert_same(deploy.module(calibrated)(queries(calibrated)), calibrated, queries(calibrated))
    assert (calibrated(queries(calibrated)).ood_p_value == 0.8).all()


class Meeting(nn.Module):
    """Lets threads meet inside a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.barrier is not None:
            self.barrier.wait(20)
        return x


def test_threads_do_not_see_each_others_features():
    network = nn.Sequential(nn.Linear(4, 5), Meeting(), nn.Linear(5, 2), Meeting())
    entering = spaces.Entering(network, ["2"])
    inputs = [torch.randn(3, 4), torch.randn(3, 4)]
    wanted = [network[0](x) for x in inputs]
    barrier, found = threading.Barrier(2), {}
    for module in entering.network:
        if isinstance(module, Meeting):
            module.barrier = barrier
    threads = [threading.Thread(target=lambda i=i: found.update({i: entering(inputs[i])["2"]})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        torch.testing.assert_close(found[number], wanted[number])


# Nearest neighbours


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_neighbours_against_the_exact_index_over_several_blocks(monkeypatch, k, shift):
    monkeypatch.setattr(spaces, "BLOCK", 7)
    points = torch.randn(60, 5) + shift
    points = torch.cat([points, points[:10]])  # duplicates, in another block
    x = torch.cat([points[:3], torch.randn(5, 5) + shift, 1e3 * torch.randn(4, 5)])
    module = spaces.Nearest(points, k)
    assert len(module.blocks) == 10
    torch.testing.assert_close(module(x).float(), TorchIndex(points).query(x, k)[0][:, -1])
    if k == 1:
        assert not module(points).any()


def test_neighbours_that_the_product_cannot_tell_apart():
    cluster = 0.1 * torch.randn(6, 5, dtype=torch.float64)
    points = torch.cat([cluster + 1e8, cluster[:1] - 1e8])  # squares of 1e16 leave no digit for distances of 0.1
    assert not spaces.Nearest(points, 1)(points).any()


# Programs


PROGRAMS = {  # each way to outputs, kind of task and kind of space once: a trace takes seconds
    "ensemble of CNNs, classes": (members, Categorical(), cnn, {}),
    "last layer, labels": (last_layer, MultiLabel(0.9), mlp, {}),
    "ensemble of chains, reverting": (members, Gaussian(0.3), mlp, {"distance": None, "adjust": Revert()}),
    "last layer, regression": (
        last_layer, NoiseHead(), mlp, {"distance": [Space(Identity(), name="inputs"), Space(RandomFourier(20))]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_predict_what_the_calibrated_posterior_does(case, tmp_path, monkeypatch):
    trace_once(monkeypatch)
    posterior_of, likelihood, make, options = case
    calibrated = calibrated_of(posterior_of, likelihood, make, **options)
    x = queries(calibrated)
    program = deploy.export(calibrated)
    exported = program.module()
    path = tmp_path / "model.onnx"
    deploy.to_onnx(calibrated, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for n in (1, 2, 17):
        assert_same(exported(x[:n]), calibrated, x[:n])
        assert_same(dict(zip(names, session.run(None, {"x": x[:n].numpy()}), strict=True)), calibrated, x[:n])
    assert [path] == list(tmp_path.iterdir())
    assert [(i.name, i.shape) for i in session.get_inputs()] == [("x", ["batch", 4])]
    assert all(output.shape[0] == "batch" for output in session.get_outputs())
    assert onnx.load(path).opset_import[0].version == programs.OPSET
    if posterior_of is last_layer:  # once: a file takes a second
        torch.export.save(program, tmp_path / "model.pt2")
        stored = torch.export.load(tmp_path / "model.pt2").module()(x)
        assert type(stored) is dict  # no type of dapcal
        assert_same(stored, calibrated, x)


def test_a_failed_export_leaves_an_earlier_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_text("earlier")
    calibrated = calibrated_of(members, Gaussian(0.3))
    monkeypatch.setattr(programs, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"at most 2 GB .* use dapcal\.deploy\.export"):
        deploy.to_onnx(calibrated, path)
    assert path.read_text() == "earlier"


@pytest.mark.parametrize("absent", ["onnx", "onnxscript"])
def test_a_missing_extra_is_named(monkeypatch, absent, tmp_path):
    monkeypatch.setattr(programs, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(ImportError, match=rf"needs {absent}; install it with: pip install 'dapcal\[onnx\]'"):
        deploy.to_onnx(None, tmp_path / "model.onnx")


def test_an_old_torch_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(ImportError, match=r"torch >= 2\.6, got 2\.5\.1.*dapcal\.deploy\.export"):
        deploy.to_onnx(None, tmp_path / "model.onnx")


# Refusals


def linearised(networks, likelihood, train):
    return laplace.fit(networks[0], likelihood, train)


def masks(networks, likelihood, train):
    return dropout.wrap(networks[0], likelihood, draws=5)


class Own(Gaussian):
    pass


@pytest.mark.parametrize(
    ("posterior_of", "options", "match"),
    [
        (linearised, {}, r"laplace\.last_layer, or laplace\.fit\(\.\.\., linearised=False\)"),
        (masks, {}, r"got DropoutPosterior; fit one of them .* calibrated\(x\)"),
        (members, {"adjust": Inflate(drawn=True)}, r"Expected adjust=Inflate\(\), .* got Inflate\(drawn=True"),
        (with_prior, {"adjust": Reweight(normalise=True)}, r"got Reweight.*; calibrate with one of them"),
        (members, {"distance": Space(Identity(), hausdorff)}, r"got Hausdorff; calibrate with dapcal\.distances"),
        (members, {"distance": Space(lambda x: x[:, :2], name="own")}, r"projector of space `own`, got function"),
    ],
)
def test_what_does_not_deploy_is_refused(posterior_of, options, match):
    calibrated = calibrated_of(posterior_of, Gaussian(0.3), **options)
    with pytest.raises(TypeError, match=match):
        deploy.module(calibrated)


def test_other_parts_that_are_refused():
    calibrated = calibrated_of(members, Gaussian(0.3))
    with pytest.raises(TypeError, match=r"NoiseHead, Poisson, VaryingNoise\), got Own; predict with"):
        deploy.module(replace(calibrated, posterior=replace(calibrated.posterior, likelihood=Own(0.3))))
    first = calibrated.distance.spaces[0]
    other = replace(first, projector=replace(first.projector, network=mlp(2)))
    with pytest.raises(
        ValueError, match=r"posterior's own network, got another; calibrate with dapcal\.distances\.projectors"
    ):
        deploy.module(replace(calibrated, distance=replace(calibrated.distance, spaces=(other,))))
    with pytest.raises(TypeError, match=r"Expected what dapcal\.calibrate returns, got NetworkPosterior"):
        deploy.module(calibrated.posterior)
    unlike = replace(calibrated_of(last_layer, Gaussian(0.3)).posterior, gaussian=None)
    with pytest.raises(TypeError, match=r"got NoneType; fit it with laplace\.last_layer"):
        deploy.module(replace(calibrated, posterior=unlike))


@pytest.mark.parametrize("x", [torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4)])
def test_inputs_of_another_shape_or_dtype_are_refused(x):
    module = deploy.module(calibrated_of(members, Gaussian(0.3)))
    with pytest.raises(ValueError, match=r"Expected inputs \(N, 4\) of torch\.float32 as in training, got"):
        module(x)
