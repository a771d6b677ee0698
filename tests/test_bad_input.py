"""Bad input: every error and warning says what was expected or what to do."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from dapcal.adjust import Inflate, PriorMonteCarlo, Reweight, SelfNormalised, Transport
from dapcal.calibrate import Calibrated
from dapcal.calibration.losses import EmpiricalBayes, LogMarginal, LogPredictive
from dapcal.calibration.scales import ScaledSigmoid
from dapcal.distances import Space, mmd, nearest
from dapcal.distances.projectors import Features, Identity
from dapcal.gaussians import FullGaussian
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import gaussian, map, samples
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.predictions import StackedPredictions
from dapcal.types import Posterior

FAR = torch.tensor([[9.0, 9.0], [-8.0, 3.0]])
INPUTS = Space(Identity(), name="inputs")
NAN = math.nan


def network(outputs: int = 3, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))


def data(n: int, seed: int = 0, outputs: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    f = network(outputs)(x).detach()
    return x, (f.argmax(-1) if outputs == 3 else f)


TRAIN, HELD_OUT = data(40), data(40, 1)


def around(model: nn.Module, likelihood=None, scale: float = 0.2, **options) -> NetworkPosterior:
    scales = {n: torch.full_like(p, scale) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood or Categorical(), scales, **{"draws": 8} | options)


def members(n: int = 4, **options) -> NetworkPosterior:
    """Networks without moments, and without a prior unless one is given."""
    return samples.from_state_dicts(
        network(), Categorical(), [network(seed=seed).state_dict() for seed in range(n)], **options
    )


def calibrate(base: Posterior | None = None, **options) -> Calibrated:
    given = {"train": TRAIN, "held_out": HELD_OUT, "ood": FAR, "distance": INPUTS, "candidates": 8}
    return dapcal.calibrate(base or around(network()), **given | options)


def regress(**options) -> Calibrated:
    given = {"train": data(40, 0, 1), "held_out": data(40, 1, 1)}
    return calibrate(around(network(1), Gaussian(0.5)), **given | options)


@functools.cache
def ready() -> Calibrated:
    return calibrate()


def changed(pair: tuple[Tensor, Tensor], x: Callable = lambda x: x, y: Callable = lambda y: y):
    return x(pair[0].clone()), y(pair[1].clone())


def with_value(value: float, row: int = 3) -> Callable[[Tensor], Tensor]:
    def put(tensor: Tensor) -> Tensor:
        tensor = tensor if tensor.is_floating_point() else tensor.double()
        tensor[row] = value
        return tensor

    return put


class Wrong(nn.Module):
    """A network whose outputs are changed on their way out."""

    def __init__(self, change: Callable) -> None:
        super().__init__()
        self.inner, self.change = network(), change

    def forward(self, x: Tensor) -> object:
        return self.change(self.inner(x))


def model_returns(change: Callable) -> Callable[[], Calibrated]:
    return lambda: calibrate(around(Wrong(change)))


# what, call, exception, words
TABLE = [
    # inputs that are not finite
    ("NaN in train", lambda: calibrate(train=changed(TRAIN, with_value(NAN))), ValueError,
     r"finite inputs in `train`, got NaN or inf in 1 of 40 rows \(the first is row 3\); drop or impute"),
    ("inf in held_out", lambda: calibrate(held_out=changed(HELD_OUT, with_value(math.inf))), ValueError,
     r"finite inputs in `held_out`.*drop or impute"),
    ("NaN in ood", lambda: calibrate(ood=with_value(NAN, 0)(FAR.clone())), ValueError,
     r"finite inputs in `ood`.*drop or impute"),
    ("NaN in ood with targets", lambda: calibrate(ood=(with_value(NAN, 0)(FAR.clone()), torch.tensor([0, 1]))),
     ValueError, r"finite inputs in `ood`.*drop or impute"),
    ("NaN at prediction", lambda: ready()(torch.tensor([[0.0, NAN]])), ValueError, r"finite inputs in `x`.*drop"),
    ("inf in a joint prediction", lambda: ready().joint(torch.tensor([[0.0, math.inf]])), ValueError, r"finite inputs"),
    ("NaN in a loader", lambda: calibrate(train=DataLoader(TensorDataset(*changed(TRAIN, with_value(NAN))), 8)),
     ValueError, r"finite inputs in `train`.*drop or impute"),
    # targets
    ("NaN labels in train", lambda: calibrate(train=changed(TRAIN, y=with_value(NAN))), ValueError, r"NaN"),
    ("NaN targets in train", lambda: regress(train=changed(data(40, 0, 1), y=with_value(NAN))), ValueError,
     r"finite targets.*drop those rows"),
    ("inf targets in held_out", lambda: regress(held_out=changed(data(40, 1, 1), y=with_value(math.inf))), ValueError,
     r"finite targets.*drop those rows"),
    ("fractional labels", lambda: calibrate(train=changed(TRAIN, y=with_value(0.5))), ValueError,
     r"whole numbers as class labels.*for regression use Gaussian"),
    ("label too large", lambda: calibrate(held_out=changed(HELD_OUT, y=with_value(7))), ValueError,
     r"class labels between 0 and 2 \(the model's outputs\), got \d to 7"),
    ("negative label", lambda: calibrate(train=changed(TRAIN, y=with_value(-1))), ValueError,
     r"class labels between 0 and 2.*got -1"),
    ("label of ood too large", lambda: calibrate(ood=(FAR, torch.tensor([0, 9])), loss=LogPredictive()),
     ValueError, r"between 0 and 2"),
    ("class never trained on", lambda: calibrate(train=changed(TRAIN, y=torch.zeros_like)), ValueError,
     r"appear in `held_out` but never in `train`; train on them, or drop those rows"),
    ("one-hot labels", lambda: calibrate(train=changed(TRAIN, y=lambda y: nn.functional.one_hot(y, 3))), ValueError,
     r"class labels of shape \(40,\), got one-hot rows \(40, 3\); use y.argmax\(1\)"),
    ("whole numbers in regression", lambda: regress(train=changed(data(40, 0, 1), y=lambda y: y.long())), ValueError,
     r"floating-point targets.*use y\.float\(\)"),
    ("two columns of targets", lambda: regress(train=changed(data(40, 0, 1), y=lambda y: y.expand(-1, 2))), ValueError,
     r"targets of shape \(40, 1\), got \(40, 2\)"),
    ("fewer targets than inputs", lambda: calibrate(train=(TRAIN[0], TRAIN[1][:5])), ValueError,
     r"as many targets as inputs in `train`, got 40 inputs and 5 targets"),
    ("Categorical with one output", lambda: calibrate(around(network(1))), ValueError, r"use dapcal.likelihoods.Bern"),
    ("Bernoulli with three outputs", lambda: calibrate(around(network(), Bernoulli())), ValueError, r"use Categorical"),
    ("NoiseHead with three outputs", lambda: calibrate(around(network(), NoiseHead())), ValueError, r"even number"),
    ("labels at prediction", lambda: ready()(FAR).log_prob(torch.tensor([0, 5])), ValueError, r"between 0 and 2"),
    # empty sets and shapes
    ("empty train", lambda: calibrate(train=changed(TRAIN, lambda x: x[:0], lambda y: y[:0])), ValueError,
     r"at least one input in `train`, got none"),
    ("empty held_out", lambda: calibrate(held_out=changed(HELD_OUT, lambda x: x[:0], lambda y: y[:0])), ValueError,
     r"at least one input in `held_out`, got none"),
    ("empty data set", lambda: calibrate(train=TensorDataset(TRAIN[0][:0], TRAIN[1][:0])), ValueError,
     r"at least one input in `train`, got none"),
    ("empty ood", lambda: calibrate(ood=FAR[:0]), ValueError, r"at least one input in `ood`, got none"),
    ("empty x", lambda: ready()(FAR[:0]), ValueError, r"at least one input in `x`, got none"),
    ("too few held-out inputs", lambda: calibrate(held_out=(HELD_OUT[0][:3], HELD_OUT[1][:3])), ValueError,
     r"at least 4 held-out inputs, got 3; hold out more"),
    ("1-D train", lambda: calibrate(train=changed(TRAIN, lambda x: x[:, 0])), ValueError,
     r"batch of inputs \(N, \.\.\.\), got shape \(40,\); a single column is x\[:, None\], a single input x\[None\]"),
    ("1-D x", lambda: ready()(FAR[0]), ValueError, r"a single input x\[None\]"),
    ("held_out with more features", lambda: calibrate(held_out=changed(HELD_OUT, lambda x: x.repeat(1, 2))), ValueError,
     r"`held_out` with inputs of shape \(2,\) as in training, got \(4,\)"),
    ("held_out of another dtype", lambda: calibrate(held_out=changed(HELD_OUT, Tensor.double)), ValueError,
     r"`held_out` of dtype torch\.float32 as in training, got torch\.float64; convert it with \.to\(\)"),
    ("ood with other features", lambda: calibrate(ood=FAR.repeat(1, 2)), ValueError, r"`ood`.*shape \(2,\)"),
    ("ood of another dtype", lambda: calibrate(ood=FAR.double()), ValueError, r"`ood` of dtype.*convert it"),
    ("x with other features", lambda: ready()(torch.zeros(3, 5)), ValueError, r"`x` with inputs of shape \(2,\)"),
    ("x of another dtype", lambda: ready()(FAR.double()), ValueError, r"`x` of dtype torch\.float32.*convert it"),
    ("x as a list", lambda: ready()([[0.0, 0.0]]), TypeError, r"`x` as a tensor, got list; use torch\.as_tensor"),
    # kinds of data
    ("train as a tensor", lambda: calibrate(train=TRAIN[0]), TypeError, r"`train` as \(inputs, targets\), a Dataset"),
    ("train as an array", lambda: calibrate(train=TRAIN[0].numpy()), TypeError, r"`train` as \(inputs, targets\)"),
    ("train as three tensors", lambda: calibrate(train=(*TRAIN, TRAIN[1])), TypeError,
     r"`train` to yield \(inputs, targets\).*several inputs as"),
    ("train as a pair of lists", lambda: calibrate(train=([[0.0]], [1])), TypeError, r"pair of tensors"),
    ("loader of inputs alone", lambda: calibrate(train=DataLoader(TensorDataset(TRAIN[0]), 8)), TypeError,
     r"`train` to yield \(inputs, targets\)"),
    ("a projector for a space", lambda: calibrate(distance=Identity()), TypeError, r"Space"),
    ("no space", lambda: calibrate(distance=()), ValueError, r"at least one space"),
    # projectors and distances
    ("projector returns NaN", lambda: calibrate(distance=Space(lambda x: x / 0 * 0)), ValueError,
     r"projector returned NaN or inf for 40 of 40 inputs; check it"),
    ("projector returns a vector", lambda: calibrate(distance=Space(lambda x: x[:, 0])), ValueError,
     r"projector to return \(40, P\) for 40 inputs, got \(40,\); flatten it"),
    ("projector returns one row", lambda: calibrate(distance=Space(lambda x: x[:1])), ValueError, r"\(40, P\)"),
    ("projector returns whole numbers", lambda: calibrate(distance=Space(lambda x: x.long())), ValueError,
     r"floating-point numbers, got torch\.int64"),
    ("k too large", lambda: calibrate(distance=Space(Identity(), partial(nearest, k=41))), ValueError,
     r"`k` between 1 and 40 \(training inputs\), got 41"),
    ("k = 0", lambda: calibrate(distance=Space(Identity(), partial(nearest, k=0))), ValueError, r"`k` between 1"),
    ("unknown layer", lambda: calibrate(distance=Space(Features("head"))), ValueError,
     r"no layer `head`; its layers are \['0', '1', '2'\]"),
    ("features without a network",
     lambda: calibrate(StackedPredictions(members().outputs, Categorical()), distance=Space(Features())), ValueError,
     r"Identity\(\)"),
    ("radius above the unit", lambda: calibrate(distance=Space(Identity(), radius=0.97)), ValueError,
     r"`radius` between 0 and 0\.95 \(or None\), got 0\.97"),
    ("identical training inputs",
     lambda: calibrate(train=changed(TRAIN, torch.zeros_like), distance=Space(Identity(), mmd)), ValueError,
     r"All training points are identical; a length scale cannot be found, give one"),
    ("held-out inputs that are training inputs", lambda: calibrate(held_out=TRAIN), ValueError,
     r"All held-out inputs have distance 0.*hold out inputs that are not in the training set, or use radius=None"),
    ("the same by default", lambda: dapcal.calibrate(around(network()), train=TRAIN, held_out=TRAIN), ValueError,
     r"All held-out inputs have distance 0.*hold out inputs that are not in the training set"),
    ("nothing away from the training inputs",
     lambda: calibrate(held_out=TRAIN, ood=TRAIN[0][:5], distance=Space(Identity(), radius=None)), ValueError,
     r"nothing to calibrate φ on; give inputs away from the training data with `ood`"),
    # posteriors and priors
    ("sigma0 = 0", lambda: around(network(), prior_scale=0.0), ValueError, r"`prior_scale` \(sigma0\) > 0.*got 0"),
    ("negative sigma0", lambda: members(prior_scale=-1.0), ValueError, r"`prior_scale` \(sigma0\) > 0.*got -1"),
    ("sigma0 NaN", lambda: members().with_prior(NAN), ValueError, r"`prior_scale` \(sigma0\) > 0"),
    ("sigma0 of some parameters", lambda: around(network(), prior_scale={"0.*": 1.0}), ValueError,
     r"cover every parameter.*`2\.weight`; add it, or a last pattern '\*'"),
    ("aware of nothing", lambda: around(network(), aware="mean.*"), ValueError, r"`aware` to match.*the names are"),
    ("negative standard deviation", lambda: around(network(), scale=-0.1), ValueError, r"`scale\['0\.weight'\]` >= 0"),
    ("asymmetric covariance", lambda: FullGaussian(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]])), ValueError,
     r"symmetrise it"),
    ("transport without moments", lambda: calibrate(members(prior_scale=1.0), adjust=Transport()), ValueError,
     r"Transport needs a Gaussian posterior.*use Inflate\(\), which works on any posterior"),
    ("transport of predictions", lambda: calibrate(StackedPredictions(members().outputs, Categorical()),
     adjust=Transport()), ValueError, r"Transport needs a Gaussian posterior.*use Inflate\(\)"),
    ("reweight without a prior", lambda: calibrate(members(), adjust=Reweight(SelfNormalised())), ValueError,
     r"prior scale sigma0; set it with posterior\.with_prior\(prior_scale\), or use Inflate\(\)"),
    ("reweight of predictions", lambda: calibrate(StackedPredictions(members().outputs, Categorical()),
     adjust=Reweight()), ValueError, r"Reweight needs parameter draws.*use Inflate\(\)"),
    ("closed form without moments", lambda: calibrate(members(prior_scale=1.0), adjust=Reweight()), ValueError,
     r"no moments; use Reweight\(normaliser=SelfNormalised\(\)\) or Inflate\(\)"),
    ("Monte Carlo without parameters", lambda: calibrate(members(), adjust=Reweight(PriorMonteCarlo(*TRAIN))),
     ValueError, r"prior scale"),
    ("completion in regression", lambda: regress(adjust=Reweight(complete=True)), ValueError, r"use Inflate\(\)"),
    ("normalise and complete", lambda: Reweight(normalise=True, complete=True), ValueError, r"not both"),
    ("zero spread", lambda: calibrate(around(network(), scale=0.0)), ValueError,
     r"same outputs.*no spread to inflate.*Check that the posterior's draws differ"),
    ("step = 0", lambda: calibrate(adjust=Transport(step=0.0)), ValueError, r"`step` > 0 or None"),
    ("one draw", lambda: calibrate(around(network(), draws=1)), ValueError, r"single network \(MAP\).*Fit a posterior"),
    # models
    ("model returns three dimensions", model_returns(lambda f: f[..., None, None]), ValueError,
     r"model to return \(1, C\) for 1 inputs.*add a final layer that flattens"),
    ("model returns one row", model_returns(lambda f: f[:1]), ValueError, r"model to return \(\d+, C\) for \d+ inputs"),
    ("model returns a pair", model_returns(lambda f: (f, f)), TypeError, r"model to return a tensor \(N, C\), got tup"),
    ("model returns NaN", model_returns(lambda f: f / 0 * 0), ValueError, r"model returned NaN or inf; check its wei"),
    ("predictions without draws", lambda: calibrate(StackedPredictions(network(), Categorical())), ValueError,
     r"stacked predictions \(S, 1, C\).*draws come first"),
    # losses, guard, scale
    ("LogPredictive without labels", lambda: calibrate(loss=LogPredictive()), ValueError,
     r"LogPredictive needs targets.*give ood=\(inputs, targets\), or use the loss Target\(\)"),
    ("LogMarginal without labels", lambda: calibrate(loss=LogMarginal()), ValueError,
     r"LogMarginal needs targets.*give ood=\(inputs, targets\), or use the loss Target\(\)"),
    ("LogMarginal without parameters", lambda: calibrate(StackedPredictions(members().outputs, Categorical()),
     ood=(FAR, torch.tensor([0, 1])), loss=LogMarginal()), ValueError, r"prior scale"),
    ("LogMarginal without a prior", lambda: calibrate(members(), ood=(FAR, torch.tensor([0, 1])), loss=LogMarginal()),
     ValueError, r"set it with posterior\.with_prior"),
    ("EmpiricalBayes without moments", lambda: calibrate(members(), loss=EmpiricalBayes()), ValueError,
     r"needs a Gaussian posterior"),
    ("a class as adjustment", lambda: calibrate(adjust=Inflate), TypeError,
     r"`adjust` as an object.*write Inflate\(\)"),
    ("a word as loss", lambda: calibrate(loss="target"), TypeError, r"Expected `loss` as an object"),
    ("something else as posterior", lambda: calibrate("network"), TypeError,
     r"Expected a posterior, got str; fit one"),
    ("pattern that matches nothing, before training", lambda: map.fit(network(), Categorical(), TRAIN, aware="x.*"),
     ValueError, r"match none"),
    ("a guard that nothing meets", lambda: calibrate(guard=-1.0), ValueError,
     r"No φ keeps the held-out NLL within -1\.0 nats.*raise `guard`, or set guard=None"),
    ("a scale that reaches nothing", lambda: calibrate(scale=ScaledSigmoid(1e-12)), ValueError,
     r"reaches no useful factors.*use a larger upper end or dapcal\.calibration\.scales\.Exp\(\)"),
    ("too few candidates", lambda: calibrate(candidates=1), ValueError, r"`candidates`"),
    ("temperature for a posterior of one's own", lambda: calibrate(Own(), temperature=True), TypeError,
     r"calibrate its likelihood before"),
]  # fmt: skip


class Own:
    """A posterior that is not a dataclass."""

    squared_norms = gaussian = prior = network = None
    likelihood = Categorical()

    def outputs(self, x: Tensor) -> Tensor:
        return members().outputs(x)

    def moments(self, x: Tensor, moving: bool = False) -> None:  # noqa: ARG002
        return None


@pytest.mark.filterwarnings("ignore:.*held-out inputs are training inputs too")
@pytest.mark.parametrize(("call", "error", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_bad_input_is_refused_with_words_that_help(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.filterwarnings("ignore:The calibration loss still falls")
def test_a_posterior_of_ones_own_is_enough_without_temperature():
    assert calibrate(Own())(FAR).probs.shape == (2, 3)


@pytest.mark.parametrize(
    "adjust", [Inflate(), Inflate(drawn=True), Reweight(SelfNormalised()), Reweight(), Transport()], ids=repr
)
def test_a_point_posterior_is_refused_by_every_adjustment(adjust):
    point = map.point(network(), Categorical())
    with pytest.raises(ValueError, match=r"single network \(MAP\).*Fit a posterior to it, e\.g\. dapcal\.posteriors"):
        calibrate(point, adjust=adjust)


@pytest.mark.parametrize("adjust", [Reweight(), Transport()], ids=["reweight", "transport"])
def test_zero_spread_does_not_pass_in_silence(adjust):
    with pytest.raises(
        (ValueError, dapcal.DapcalWarning), match=r"no spread|No distance improves the calibration loss"
    ):
        calibrate(around(network(), scale=0.0), adjust=adjust)


# Warnings: something was decided, and what to do about it.


def caught_in(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.category is dapcal.DapcalWarning for w in caught)
    return [str(w.message) for w in caught]


def test_duplicate_rows_move_the_radius_with_a_warning():
    held_out = tuple(torch.cat([old[:34], new[:6]]) for old, new in zip(TRAIN, HELD_OUT, strict=True))
    messages = caught_in(lambda: calibrate(held_out=held_out, distance=Space(Identity(), radius=0.5)))
    (message,) = [m for m in messages if "duplicate rows?" in m]
    for words in ("50 % of the held-out inputs have distance 0", "radius starts at the smallest positive distance"):
        assert words in message


def test_a_minimum_at_the_upper_edge_warns():
    messages = caught_in(lambda: calibrate(guard=None))
    assert len(messages) == 1
    assert "upper edge of the search" in messages[0]
    assert "Set a guard (e.g. guard=0.01), or another loss" in messages[0]


def test_an_adjustment_that_only_sharpens_warns_at_the_lower_edge():
    """Moving the mean makes far predictions more confident."""
    confident = around(network().apply(lambda m: m.weight.data.mul_(2) if isinstance(m, nn.Linear) else None))
    messages = caught_in(lambda: calibrate(confident, adjust=Transport(shift=True)))
    assert len(messages) == 1
    assert "No distance improves the calibration loss" in messages[0]
    assert "Check the OOD inputs (`ood`), or loosen the guard" in messages[0]


def test_an_uninformative_distance_warns_and_names_the_remedy(monkeypatch):
    monkeypatch.setattr(dapcal.distances.verdicts, "THRESHOLD", 1.1)
    messages = caught_in(lambda: calibrate(distance=None))
    assert len(messages) == 1
    assert "No distance is informative on held-out inputs" in messages[0]
    assert "left as they are, and the OOD score is the model's own doubt alone" in messages[0]
    assert "distance=Space(projector=...)" in messages[0]


def test_good_input_warns_of_nothing():
    assert caught_in(calibrate) == []
    assert caught_in(lambda: ready()(FAR)) == []
    assert (
        caught_in(lambda: regress(adjust=Inflate(limit=None))) == []
    )  # a posterior wider than the targets has a limit else
