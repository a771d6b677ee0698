"""Which spaces count: informative ones, and the report about them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from dapcal.data import Labelled
from dapcal.distances.choosing import informative
from dapcal.distances.projectors import Features, Identity
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import gaussian, predictions, samples
from dapcal.ranks import auroc
from dapcal.types import DapcalWarning


class HeadFirst(nn.Module):
    """Defines its layers in another order than it runs them in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(8, 3), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Magnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def spread_out(model: nn.Module, likelihood=None, scale: float = 0.1):
    scales = {n: torch.full_like(p, scale) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood or Categorical(), scales, draws=5)


def names(judged) -> list[str]:
    return [space.name for space in judged.spaces]


def noted(judged, space: str) -> dict[str, float]:
    """Numbers that the report gives for a space: own errors first, then each kind of outlier."""
    note = next(n for n in judged.notes if n.startswith(f"distance between {space}:"))
    kinds = re.findall(r"(blurred|constant|noise|mixed|shuffled) ([\d.]+)", note)
    return {"own": float(re.search(r"\d\.\d\d", note)[0])} | {kind: float(value) for kind, value in kinds}


def reason_of(judged, space: str) -> str:
    """Why a space is in or out."""
    return next(n for n in judged.notes if n.startswith(f"distance between {space}:")).split("; ")[-1]


@pytest.mark.parametrize("levels", [None, 1, 3, 20])
def test_auroc_is_scikit_learns(levels):
    rng = np.random.default_rng(0)
    positive, negative = rng.normal(0.5, 1, 70), rng.normal(0, 1, 90)
    if levels is not None:
        positive, negative = (np.floor(levels * v / 4) for v in (positive, negative))
    expected = roc_auc_score([1] * 70 + [0] * 90, np.concatenate([positive, negative]))
    assert auroc(torch.tensor(positive), torch.tensor(negative)) == pytest.approx(expected, abs=1e-12)
    assert auroc(torch.tensor(negative), torch.tensor(positive)) == pytest.approx(1 - expected, abs=1e-12)


def test_two_dimensional_clusters_use_inputs_and_features(posterior, blobs):
    (train, _), held_out = blobs
    judged = informative(posterior, train, Labelled(*held_out))
    assert "inputs" in names(judged)
    assert [type(space.projector) for space in judged.spaces] == [
        {"inputs": Identity, "features": Features}[n] for n in names(judged)
    ]
    assert judged.notes[-1] == f"distances used: {', '.join(names(judged))}"
    assert [s.name for s in judged.distance.spaces] == names(judged)
    assert set(noted(judged, "inputs")) == {"own", "noise", "shuffled"}
    assert noted(judged, "inputs")["noise"] > 0.6


@pytest.mark.parametrize("radius", [None, 0.5, 0.9])
def test_the_radius_is_that_of_the_space_alone(posterior, blobs, radius):
    (train, _), held_out = blobs
    judged = informative(posterior, train, Labelled(*held_out), radius)
    for space, fitted in zip(judged.spaces, judged.distance.spaces, strict=True):
        assert space.radius == radius
        alone = space.fit(train, held_out[0], posterior)
        torch.testing.assert_close(fitted.excess(fitted.raw(held_out[0])), alone.excess(alone.raw(held_out[0])))


def test_own_errors_are_scored_by_auroc(blobs):
    """A space in which wrong answers are far: scored as scikit-learn scores it."""
    (train, _), (x, y) = blobs
    x = x * (1 + 2 * torch.rand(120, 1, generator=torch.Generator().manual_seed(3)))  # some far out
    distance = torch.cdist(x, train).min(1).values
    wrong = distance > distance.quantile(0.7)
    wrong[::10] = ~wrong[::10]
    logits = 5.0 * torch.nn.functional.one_hot(torch.where(wrong, (y + 1) % 3, y), 3)
    draws = torch.stack([logits, 1.1 * logits])
    posterior = predictions.StackedPredictions(lambda _: draws, Categorical())
    judged = informative(posterior, train, Labelled(x, y))
    assert noted(judged, "inputs")["own"] == pytest.approx(roc_auc_score(wrong, distance), abs=0.006)


@pytest.mark.filterwarnings("ignore:.*held-out inputs are training inputs too")
@pytest.mark.parametrize("ties", [None, "rising", "falling"])
def test_own_errors_of_regression_are_scored_by_rank_correlation(generator, ties):
    train = torch.randn(100, 2, generator=generator)
    x = 2 * torch.randn(100, 2, generator=generator)
    if ties:  # mostly rows of the training set, whose errors follow their order
        x[:80] = train[:80]
    distance = torch.cdist(x, train, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    error = distance + 3 * torch.rand(100, generator=generator)
    if ties:
        error = error.sort(descending=ties == "falling").values
    draws = torch.zeros(2, 100, 1)
    draws[1] += 1e-3
    posterior = predictions.StackedPredictions(lambda _: draws, Gaussian())
    judged = informative(posterior, train, Labelled(x, (error + 5e-4)[:, None]), radius=None)
    expected = (1 + spearmanr(distance, error).statistic) / 2
    assert noted(judged, "inputs")["own"] == pytest.approx(expected, abs=0.006)


def test_a_space_in_which_outliers_come_out_nearer_is_not_used(generator):
    """Images of signs: blurred ones are nearer to everything in pixels, whatever noise does, but not in magnitudes."""

    def draw(n: int) -> Tensor:
        signs = torch.randint(0, 2, (n, 1, 8, 8), generator=generator) * 2.0 - 1
        return signs * (1 + 0.05 * torch.randn(n, 1, 8, 8, generator=generator))

    model = nn.Sequential(nn.Conv2d(1, 1, 1), Magnitude(), nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[0].bias.zero_()
    train, held_out = draw(200), Labelled(draw(200), torch.randint(0, 2, (200,), generator=generator))
    train[0] *= 10  # noise spans the range of the training inputs
    judged = informative(spread_out(model, scale=0.01), train, held_out)
    assert names(judged) == ["features"]
    assert noted(judged, "inputs")["noise"] > 0.9
    assert noted(judged, "inputs")["blurred"] < 0.45
    assert min(noted(judged, "features")[kind] for kind in ("noise", "blurred", "constant", "mixed")) > 0.6
    assert judged.notes[-1] == "distances used: features"


@pytest.mark.parametrize(("numbers", "expected"), [(4096, {"features", "inputs"}), (4097, {"features"})])
def test_large_inputs_are_not_compared_raw(generator, numbers, expected):
    model = nn.Sequential(nn.Linear(numbers, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(40, numbers, generator=generator), torch.arange(40) % 2
    judged = informative(spread_out(model), x, Labelled(torch.randn(40, numbers, generator=generator), y))
    tried = [
        n.split(":")[0].removeprefix("distance between ") for n in judged.notes if n.startswith("distance between")
    ]
    assert set(tried) == {*expected, "normalised features"}


def test_without_a_network_inputs_are_used(generator):
    x, y = torch.randn(50, 2, generator=generator), torch.arange(50) % 2
    posterior = predictions.StackedPredictions(lambda x: torch.stack([x, 2 * x]), Categorical())
    judged = informative(posterior, x, Labelled(torch.randn(50, 2, generator=generator), y))
    assert names(judged) == ["inputs"]
    assert judged.further == ()


@pytest.mark.parametrize("model", [nn.Linear(2, 3), nn.Sequential(nn.Flatten(), nn.Linear(2, 3))])
def test_the_inputs_of_a_first_layer_are_not_features(model, blobs):
    (train, _), held_out = blobs
    judged = informative(spread_out(model), train, Labelled(*held_out))
    assert len(judged.notes) == 2
    assert names(judged) == ["inputs"]


def test_features_do_not_depend_on_the_order_of_definition(blobs):
    (train, _), held_out = blobs
    model = HeadFirst()
    ordered = nn.Sequential(model.body, nn.Tanh(), model.head)
    one, two = (informative(spread_out(m, scale=0.0), train, Labelled(*held_out)) for m in (ordered, model))
    assert "distance between features" in one.notes[0]
    assert one.notes == two.notes


def test_normalised_features_are_further_evidence(posterior, blobs):
    (train, _), held_out = blobs
    judged = informative(posterior, train, Labelled(*held_out))
    assert "features" in names(judged)
    (further,) = judged.further
    assert further.name == "normalised features"
    assert further.projector(train).norm(dim=1).allclose(torch.ones(len(train)))


def test_normalised_features_are_judged_too(generator):
    """Features and inputs tell outliers; where all features point one way, normalised ones tell nothing."""
    x = torch.randn(400, 2, generator=generator)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Softplus(), nn.Linear(1, 2))
    judged = informative(spread_out(model), x[:200], Labelled(x[200:], torch.arange(200) % 2))
    assert "distance between normalised features: 0 at all held-out inputs, not used" in judged.notes
    assert judged.further == ()


class Folded(nn.Module):
    """Signs as they are, in many directions; all else close to nothing, in a direction of its own."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        gate = torch.exp(-100 * ((flat.abs() - 1) ** 2).mean(1, keepdim=True))
        return torch.cat([gate * flat, 0.1 * (1 - gate)], 1)


def test_normalised_features_take_the_place_of_features_and_inputs(generator):
    """The middle is nearer to everything than signs are to each other; its direction is not."""

    def draw(n: int) -> Tensor:
        return torch.randint(0, 2, (n, 1, 8, 8), generator=generator) * 2.0 - 1

    model = nn.Sequential(nn.Conv2d(1, 1, 1), Folded(), nn.Linear(65, 2))
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[0].bias.zero_()
    held_out = Labelled(draw(200), torch.randint(0, 2, (200,), generator=generator))
    judged = informative(spread_out(model, scale=0.001), draw(200), held_out)
    reasons = {space: reason_of(judged, space) for space in ("features", "inputs", "normalised features")}
    assert [reason.split(":")[0] for reason in reasons.values()] == ["out", "out", "in"]
    assert names(judged) == ["normalised features"]
    assert judged.distance.spaces[0].radius is not None
    assert judged.further == ()


def test_a_space_without_any_distance_is_left_out(blobs):
    """Dead features are all the same point; the inputs still serve."""
    (train, _), held_out = blobs
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    judged = informative(spread_out(model, scale=1e-3), train, Labelled(*held_out))
    assert names(judged) == ["inputs"]


def test_nothing_informative_warns_and_leaves_predictions_alone(generator):
    """Signs again, but only pixels to look at."""

    def draw(n: int) -> Tensor:
        return torch.randint(0, 2, (n, 1, 8, 8), generator=generator) * 2.0 - 1

    posterior = predictions.StackedPredictions(
        lambda x: torch.stack([x[:, 0, 0, :2], 1.1 * x[:, 0, 0, :2]]), Categorical()
    )
    held_out = Labelled(draw(100), torch.randint(0, 2, (100,), generator=generator))
    with pytest.warns(DapcalWarning, match=r"No distance is informative.*doubt alone.*Space\(projector="):
        judged = informative(posterior, draw(100), held_out)
    assert names(judged) == []
    assert judged.further == ()
    assert judged.notes[-1] == "distances used: none, no space is informative"
    assert "out: blurred, constant, noise and mixed outliers are nearer than held-out inputs" in judged.notes[0]
    assert judged.distance.raw(held_out.x).shape == (0, 100)
    assert torch.equal(judged.distance(held_out.x), torch.zeros(100))
    assert judged.distance.joint(held_out.x) == 0


def test_one_dimensional_regression_has_outliers_too(generator):
    x = torch.randn(80, 1, generator=generator)
    stacked = {"weight": torch.randn(6, 1, 1, generator=generator), "bias": torch.randn(6, 1, generator=generator)}
    posterior = samples.from_stacked(nn.Linear(1, 1), Gaussian(), stacked)
    judged = informative(posterior, x[:40], Labelled(x[40:], x[40:] ** 2))
    assert set(noted(judged, "inputs")) == {"own", "noise"}


def test_whole_number_inputs_are_measured_in_features(generator):
    model = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randint(0, 10, (120, 1), generator=generator).repeat(1, 4)  # shuffled columns no longer agree
    judged = informative(spread_out(model), x[:60], Labelled(x[60:], torch.arange(60) % 2), radius=None)
    assert [n for n in judged.notes if "inputs:" in n] == []
    assert set(noted(judged, "features")) == {"own", "shuffled"}


def test_judging_is_reproducible(posterior, blobs):
    (train, _), held_out = blobs
    before = torch.random.get_rng_state()
    one, two = (informative(posterior, train, Labelled(*held_out)) for _ in range(2))
    assert one.notes == two.notes
    assert torch.equal(torch.random.get_rng_state(), before)
