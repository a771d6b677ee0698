"""What must not matter: batch split, order, memory, gradient mode. What must be kept: dtype, device, global state."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from cases import ADJUSTMENTS
from dapcal import networks
from dapcal.adjust import Inflate, Reweight, Transport
from dapcal.calibrate import Calibrated
from dapcal.distances import Space, hausdorff, mmd, nearest
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import Features, Identity, RandomFourier, Vae, project
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import gaussian, network, samples
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.predictions import StackedPredictions
from dapcal.predictive import Prediction

pytestmark = pytest.mark.filterwarnings("ignore:The importance weights have collapsed")

every_adjustment = pytest.mark.parametrize("adjust", ADJUSTMENTS)
FIELDS = (
    "mean",
    "variance",
    "epistemic",
    "aleatoric",
    "entropy",
    "distance",
    "pre_distance",
    "ood_score",
    "ood_p_value",
)
TOLERANCE = 1e-9  # everything below runs in float64; sums in another order, and log Z interpolated or not
SPACES = (Space(Identity(), name="inputs"), Space(Features(), name="features"))


def model_of(outputs: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def inputs(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_posterior(dtype: torch.dtype = torch.float64, device: str = "cpu", kind: str = "classes") -> NetworkPosterior:
    model = model_of(3 if kind == "classes" else 2, dtype).to(device)
    scale = {n: torch.full_like(p, 0.15) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, Categorical() if kind == "classes" else Gaussian(0.5), scale, draws=30)


def pair(posterior: NetworkPosterior, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and what the network itself says of them."""
    x = inputs(n, seed, posterior.center.dtype).to(posterior.center.device)
    with torch.no_grad():
        f = posterior.network(x)
    return x, f.argmax(-1) if isinstance(posterior.likelihood, Categorical) else f


def calibrate(posterior: NetworkPosterior, **options) -> Calibrated:
    ood = 4 * pair(posterior, 10, 5)[0]
    data = {"train": pair(posterior, 60, 1), "held_out": pair(posterior, 60, 2)}
    chosen = {"ood": ood, "distance": SPACES, "candidates": 8, "adjust": Inflate(limit=None), "guard": None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*edge of the search", dapcal.DapcalWarning)  # the network is never wrong
        return dapcal.calibrate(posterior, **data | chosen | options)


@functools.cache
def calibrated(kind: str = "classes") -> Calibrated:
    return replace(calibrate(make_posterior(kind=kind)), phi=-1.0)


X = torch.cat([inputs(30, 7), 3 * inputs(30, 8)])


def parts(prediction: Prediction) -> dict[str, Tensor]:
    return {name: getattr(prediction, name) for name in FIELDS} | prediction.diagnostics._asdict()


def assert_close(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)


def joined(predictions: list[Prediction]) -> dict[str, Tensor]:
    every = [parts(p) for p in predictions]
    joint = {name: torch.cat([p[name] for p in every]) for name in every[0] if name != "contracted"}
    return joint | {"contracted": every[0]["contracted"]}


# How inputs are batched and ordered.


@every_adjustment
def test_predictions_do_not_depend_on_the_batch_split(adjust):
    own = replace(calibrated(), adjust=ADJUSTMENTS[adjust])
    whole = own(X)
    assert (whole.distance > 0).any()
    for sizes in ([1, 1, 7, 7, 44], [59, 1]):
        assert_close(joined([own(batch) for batch in X.split(sizes)]), parts(whole))


@pytest.mark.parametrize("adjust", ["inflate", "drawn", "reweight", "smooth", "transport"])
def test_the_same_in_regression(adjust):
    own = replace(calibrated("targets"), adjust=ADJUSTMENTS[adjust])
    assert_close(joined([own(batch) for batch in X.split(7)]), parts(own(X)))


@every_adjustment
def test_predictions_follow_the_order_of_the_inputs(adjust):
    own = replace(calibrated(), adjust=ADJUSTMENTS[adjust])
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    there, back = parts(own(X[order])), order.argsort()
    assert_close({n: v if n == "contracted" else v[back] for n, v in there.items()}, parts(own(X)))


@pytest.mark.parametrize("adjust", ["inflate", "drawn"])
def test_an_input_without_spread_is_predicted_alone_as_in_a_batch(adjust):
    """Without biases all draws agree at the origin."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()
    scale = {n: torch.full_like(p, 0.15) for n, p in model.named_parameters()}
    posterior = gaussian.diagonal(model, Categorical(), scale, draws=10)
    own = replace(calibrate(posterior), adjust=ADJUSTMENTS[adjust])
    origin = torch.zeros(1, 2, dtype=torch.float64)
    together = own(torch.cat([origin, X]))
    assert torch.allclose(together.probs[:1], torch.full((1, 3), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(own(origin).probs, together.probs[:1])


@pytest.mark.parametrize("adjust", [a for a in ADJUSTMENTS if a != "inflate"])  # the closed form has none
def test_a_joint_prediction_does_not_depend_on_the_order(adjust):
    own = replace(calibrated(), adjust=ADJUSTMENTS[adjust])
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(X)) % 3
    one, two = own.joint(X).log_prob_joint(y), own.joint(X[order]).log_prob_joint(y[order])
    torch.testing.assert_close(one, two, rtol=TOLERANCE, atol=TOLERANCE)


# How the work is cut up.


@every_adjustment
@pytest.mark.parametrize("batch_size", [1, 13])
def test_predictions_do_not_depend_on_the_size_of_forward_passes(adjust, batch_size, monkeypatch):
    own = replace(calibrated(), adjust=ADJUSTMENTS[adjust])
    whole = parts(own(X))
    monkeypatch.setattr(network, "evaluate", functools.partial(networks.evaluate, batch_size=batch_size))
    monkeypatch.setattr(networks.passes, "BATCH", batch_size)
    monkeypatch.setattr(dapcal.distances.spaces, "project", functools.partial(project, batch_size=batch_size))
    assert_close(parts(own(X)), whole)


@pytest.mark.parametrize("adjust", ["inflate", "reweight", "transport"])
def test_predictions_do_not_depend_on_the_memory_of_forward_passes(adjust, monkeypatch):
    own = replace(calibrated(), adjust=ADJUSTMENTS[adjust])
    whole = parts(own(X))
    monkeypatch.setattr(networks.evaluation, "MEMORY", 1)  # one draw at a time
    assert_close(parts(own(X)), whole)


@pytest.mark.parametrize("metric", ["nearest", "third", "hausdorff", "mmd"])
def test_calibration_does_not_depend_on_the_memory_of_the_search(metric):
    def space(size: int) -> Space:
        index = functools.partial(TorchIndex, memory=size)
        metrics = {
            "nearest": functools.partial(nearest, index=index),
            "third": functools.partial(nearest, k=3, index=index),
            "hausdorff": functools.partial(hausdorff, memory=size),
            "mmd": functools.partial(mmd, memory=size),
        }
        return Space(Identity(), metrics[metric], radius=0.5)

    posterior, x = make_posterior(), X[::4]
    few = {"train": pair(posterior, 24, 1), "held_out": pair(posterior, 24, 2)}
    two = calibrate(posterior, distance=space(2**28), **few)
    for memory in (1, 2**11):  # one row at a time, and several: all pairs take 4.6 kB
        one = calibrate(posterior, distance=space(memory), **few)
        assert one.phi == pytest.approx(two.phi, rel=1e-6)
        assert_close(parts(replace(one, phi=two.phi)(x)), parts(two(x)))
        torch.testing.assert_close(one.distance.joint(x), two.distance.joint(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 13])
def test_calibration_does_not_depend_on_the_size_of_forward_passes(batch_size, monkeypatch):
    whole = calibrate(make_posterior())
    monkeypatch.setattr(network, "evaluate", functools.partial(networks.evaluate, batch_size=batch_size))
    monkeypatch.setattr(networks.passes, "BATCH", batch_size)
    monkeypatch.setattr(dapcal.distances.spaces, "project", functools.partial(project, batch_size=batch_size))
    pieces = calibrate(make_posterior())
    assert pieces.phi == pytest.approx(whole.phi, rel=1e-6)
    torch.testing.assert_close(pieces.curve.nll, whole.curve.nll, rtol=TOLERANCE, atol=TOLERANCE)


def test_calibration_does_not_depend_on_the_order_of_the_training_data():
    posterior = make_posterior()
    x, y = pair(posterior, 60, 1)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    one, two = calibrate(posterior), calibrate(posterior, train=(x[order], y[order]))
    assert one.phi == pytest.approx(two.phi, rel=1e-9)
    assert_close(parts(one(X)), parts(two(X)))


# Gradient modes.


@every_adjustment
def test_predictions_in_inference_mode_are_the_same(adjust):
    own = replace(calibrated(), adjust=ADJUSTMENTS[adjust])
    outside = parts(own(X))
    with torch.inference_mode():
        inside = parts(own(X.clone()))
        own(X[:2]).sample(2) if adjust not in ("reweight", "smooth") else None
    assert_close(inside, outside, 0.0)


RECIPES = {
    "features": Space(Features()),
    "random Fourier": Space(RandomFourier(dimension=16)),
    "VAE": Space(Vae(dimension=2, hidden=8, epochs=2)),
    "MMD": Space(Identity(), mmd),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_calibration_runs_in_inference_mode(recipe, tmp_path):
    posterior = make_posterior()
    outside = calibrate(posterior, distance=RECIPES[recipe])
    with torch.inference_mode():
        inside = calibrate(make_posterior(), distance=RECIPES[recipe])
        inside.save(tmp_path / "model.dap")
        loaded = dapcal.load(tmp_path / "model.dap", model_of())
        within = parts(loaded(X))
    assert inside.phi == outside.phi
    for prediction in (within, parts(inside(X)), parts(loaded(X))):  # and outside of it again
        assert_close(prediction, parts(outside(X)), 0.0)


@every_adjustment
def test_predictions_carry_no_gradient(adjust):
    own = replace(calibrated(), adjust=ADJUSTMENTS[adjust])
    prediction = own(X.clone().requires_grad_())
    assert not any(getattr(prediction, name).requires_grad for name in FIELDS)


# dtype and device.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("adjust", "kind"),
    [(a, k) for k in ("classes", "targets") for a in ADJUSTMENTS if (a, k) != ("complete", "targets")],
)
def test_predictions_have_the_dtype_of_the_model(adjust, kind, dtype):
    own = replace(calibrated_in(dtype, kind), adjust=ADJUSTMENTS[adjust])
    x = X.to(dtype)
    y = torch.zeros(len(x), dtype=torch.long) if kind == "classes" else torch.zeros(len(x), 2, dtype=dtype)
    prediction = own(x)
    found = {name: getattr(prediction, name).dtype for name in FIELDS if not name.startswith("ood")}
    found |= {"log_prob": prediction.log_prob(y).dtype, "mixture": prediction.log_prob_mixture(y).dtype}
    found |= {name: value.dtype for name, value in prediction.diagnostics._asdict().items() if name != "contracted"}
    if kind == "classes":
        found |= {"mutual_information": prediction.mutual_information.dtype}
    else:
        found |= {"lower": prediction.interval().lower.dtype}
    if adjust != "inflate":
        found |= {"expect": prediction.expect(lambda f: f).dtype}
    assert {name: value for name, value in found.items() if value != dtype} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", ["ood_score", "log_prob_joint"])
def test_scores_and_joint_densities_have_the_dtype_of_the_model(part, dtype):
    prediction = replace(calibrated_in(dtype, "classes"), adjust=Reweight()).joint(X.to(dtype))
    value = getattr(prediction, part)
    value = value(torch.zeros(len(X), dtype=torch.long)) if callable(value) else value
    assert value.dtype == dtype


@functools.cache
def calibrated_in(dtype: torch.dtype, kind: str) -> Calibrated:
    return replace(calibrate(make_posterior(dtype, kind=kind)), phi=-1.0)


@pytest.mark.parametrize("kind", ["classes", "targets"])
def test_float32_and_float64_agree(kind):
    low, high = (calibrated_in(dtype, kind) for dtype in (torch.float32, torch.float64))
    # the draws' noise is drawn in the model's dtype: compare with the same draws
    same = replace(high.posterior, draws=low.posterior.draws.double())
    one, two = low(X.float()), replace(high, posterior=same)(X)
    torch.testing.assert_close(one.distance, two.distance.float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one.mean, two.mean.float(), rtol=1e-3, atol=1e-3)


def check_device(device: str, tmp_path) -> None:
    """Calibrate, predict with every adjustment, save and load, with the model and all data on one device."""
    expected = torch.device(device)
    for kind in ("classes", "targets"):
        posterior = make_posterior(torch.float32, device, kind)
        plain, x = calibrate(posterior), X.float().to(device)
        for adjust in (a for a in ADJUSTMENTS if not (a == "complete" and kind == "targets")):
            own = replace(plain, adjust=ADJUSTMENTS[adjust], phi=-1.0)
            prediction = own(x)
            y = torch.zeros(len(x), dtype=torch.long) if kind == "classes" else torch.zeros(len(x), 2)
            found = [getattr(prediction, name) for name in FIELDS]
            found += [prediction.log_prob(y), prediction.log_prob(y.to(device)), prediction.diagnostics.ess]
            if adjust not in ("reweight", "smooth"):
                found.append(prediction.sample(3))
            if adjust != "inflate":
                found.append(own.joint(x).log_prob_joint(y))
            assert {value.device.type for value in found} == {expected.type}
            own.save(tmp_path / "model.dap")
            loaded = dapcal.load(tmp_path / "model.dap", posterior.model)(x)
            for name in FIELDS:
                assert torch.equal(getattr(loaded, name), getattr(prediction, name)), (adjust, name)


def test_everything_stays_on_the_processor(tmp_path):
    check_device("cpu", tmp_path)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_everything_stays_on_the_gpu(tmp_path):
    check_device("cuda", tmp_path)


@needs_gpu
@pytest.mark.parametrize("adjust", [Inflate(), Reweight(), Reweight(complete=True), Transport()], ids=repr)
@pytest.mark.parametrize("distance", [None, *RECIPES.values()], ids=["default", *RECIPES])
@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
def test_the_search_runs_on_the_gpu(adjust, distance):
    result = calibrate(make_posterior(torch.float32, "cuda"), adjust=adjust, distance=distance, temperature=True)
    assert result(X.float().cuda()).probs.is_cuda


@needs_gpu
@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
def test_a_full_covariance_and_brought_draws_run_on_the_gpu():
    model = model_of(3, torch.float32).cuda()
    covariance = 0.02 * torch.eye(21, device="cuda")
    full = gaussian.full(model, Categorical(), covariance, ["2.weight", "2.bias"], draws=10)
    ensemble = samples.from_state_dicts(
        model, Categorical(), [{n: t + 0.1 * k for n, t in model.state_dict().items()} for k in range(3)]
    )
    stacked = StackedPredictions(ensemble.outputs, Categorical())
    cases = [(full, Transport()), (full, Reweight()), (ensemble, Inflate()), (stacked, Inflate(drawn=True))]
    x, far = pair(full, 60, 1)[0], 5 * inputs(10, 5, torch.float32).cuda()
    y = model(x).argmax(-1)
    for posterior, adjust in cases:
        result = dapcal.calibrate(
            posterior, train=(x[:30], y[:30]), held_out=(x[30:], y[30:]), ood=far, distance=Space(Identity())
        )
        assert replace(result, adjust=adjust)(far).probs.is_cuda


@needs_gpu
def test_the_gpu_agrees_with_the_processor(tmp_path):
    own = calibrated()
    own.save(tmp_path / "model.dap")
    there = dapcal.load(tmp_path / "model.dap", model_of().cuda())
    for adjust in ADJUSTMENTS.values():
        one, two = replace(own, adjust=adjust)(X), replace(there, adjust=adjust)(X.cuda())
        assert_close({n: getattr(two, n).cpu() for n in FIELDS}, {n: getattr(one, n) for n in FIELDS}, 1e-6)


@needs_gpu
@pytest.mark.parametrize("distance", [None, SPACES], ids=["default", "given"])
@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
def test_a_model_on_the_gpu_takes_data_from_the_processor(distance):
    posterior = make_posterior(torch.float32, "cuda")
    x, y = (t.cpu() for t in pair(posterior, 120, 1))
    result = dapcal.calibrate(
        posterior, train=(x[:60], y[:60]), held_out=(x[60:], y[60:]), ood=4 * x[:10], distance=distance
    )
    for adjust in ADJUSTMENTS.values():
        prediction = replace(result, adjust=adjust)(X.float())
        assert prediction.probs.isfinite().all()


# Global state.


def state() -> tuple:
    return (
        tuple(torch.get_rng_state().tolist()),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
    )


def use(posterior: NetworkPosterior, tmp_path, wrap=lambda d: d) -> None:
    x, y = pair(posterior, 60, 1)
    result = calibrate(posterior, train=wrap((x, y)), distance=(*SPACES, *RECIPES.values()), temperature=True)
    prediction = result(X)
    prediction.log_prob(torch.zeros(len(X), dtype=torch.long))
    prediction.sample(3, torch.Generator().manual_seed(0))
    replace(result, adjust=Transport()).joint(X)
    result.save(tmp_path / "model.dap")
    dapcal.load(tmp_path / "model.dap", model_of())(X)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: d,
        lambda d: TensorDataset(*d),
        lambda d: DataLoader(TensorDataset(*d), 16, generator=torch.Generator()),
    ],
    ids=["tensors", "Dataset", "DataLoader"],
)
def test_global_state_is_left_alone(wrap, tmp_path):
    posterior = make_posterior()
    with torch.random.fork_rng():
        torch.manual_seed(17)
        before = state()
        use(posterior, tmp_path, wrap)
        assert state() == before


def test_sampling_without_a_generator_leaves_the_global_one_alone():
    with torch.random.fork_rng():
        before = state()
        calibrated()(X).sample(3)
        assert state() == before


def test_results_do_not_depend_on_the_global_generator():
    results = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            results.append(calibrate(make_posterior(), distance=(*SPACES, *RECIPES.values())))
    assert results[0].phi == results[1].phi
    assert_close(parts(results[0](X)), parts(results[1](X)), 0.0)


def test_the_posterior_and_its_data_are_left_as_they_were():
    posterior = make_posterior()
    x, y = pair(posterior, 60, 1)
    kept = x.clone(), y.clone(), posterior.draws.clone()
    result = calibrate(posterior, train=(x, y))
    result(x)
    x += 100  # what the user does with their tensor later does not matter either
    assert torch.equal(kept[2], posterior.draws)
    assert (result(kept[0]).pre_distance == 0).all()
    assert torch.equal(kept[1], y)
