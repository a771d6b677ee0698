"""Pre-distances against scipy and brute force, the radius, and combinations of spaces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist, directed_hausdorff
from torch import Tensor, nn

import dapcal
from dapcal.distances import Distance, FittedSpace, Radius, Space, fit_distance, fit_radius, hausdorff, mmd, nearest
from dapcal.distances.projectors import Identity
from dapcal.likelihoods import Categorical
from dapcal.posteriors.samples import from_state_dicts
from dapcal.types import DapcalWarning

METRICS = {"nearest": nearest, "5th": partial(nearest, k=5), "hausdorff": hausdorff, "mmd": mmd}


@pytest.fixture
def points(generator):
    return torch.randn(60, 3, generator=generator)


@pytest.fixture
def others(generator):
    return 1.5 * torch.randn(17, 3, generator=generator) + 0.5


def brute_mmd(new: np.ndarray, train: np.ndarray, length: float) -> float:
    """Biased MMD between [new, train] and train, from its three kernel matrices."""
    both = np.concatenate([new, train])

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        return np.exp(-(cdist(a, b) ** 2) / (2 * length**2)).mean()

    return np.sqrt(mean(both, both) - 2 * mean(both, train) + mean(train, train))


@pytest.mark.parametrize("k", [1, 2, 5, 60])
def test_nearest_is_the_kth_smallest_distance(points, others, k):
    expected = np.sort(cdist(others, points), 1)[:, k - 1]
    np.testing.assert_allclose(nearest(points, k=k)(others), expected, rtol=1e-5)
    np.testing.assert_allclose(nearest(points, k=k).joint(others), expected.max(), rtol=1e-5)
    np.testing.assert_allclose(nearest(points, k=k, over="sum").joint(others), expected.sum(), rtol=1e-5)


def test_nearest_takes_another_index(points, others):
    class Brute:
        def __init__(self, train: Tensor) -> None:
            self.train = train

        def query(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
            return torch.cdist(x, self.train).topk(k, 1, largest=False)

    torch.testing.assert_close(nearest(points, k=3, index=Brute)(others), nearest(points, k=3)(others))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"over": "mean"}, "'max' or 'sum', got 'mean'"), ({"k": 0}, "between 1 and 60"), ({"k": 61}, "got 61")],
)
def test_nearest_refuses(points, options, message):
    with pytest.raises(ValueError, match=message):
        nearest(points, **options)


@pytest.mark.parametrize("rows", [1, 17])
def test_hausdorff_is_scipys(points, others, rows):
    some = others[:rows]
    expected = max(directed_hausdorff(some, points)[0], directed_hausdorff(points, some)[0])
    np.testing.assert_allclose(hausdorff(points).joint(some), expected, rtol=1e-5)
    alone = [directed_hausdorff(x[None], points)[0] for x in others]  # [x*, training set] against the training set
    np.testing.assert_allclose(hausdorff(points)(others), alone, rtol=1e-5)


@pytest.mark.parametrize("length", [0.5, 2.0])
@pytest.mark.parametrize("memory", [1, 2**28])
def test_mmd_is_the_biased_one_between_both_and_training(points, others, length, memory):
    points, others = points.double(), others.double()
    metric = mmd(points, length_scale=length, memory=memory)
    expected = [brute_mmd(x[None].numpy(), points.numpy(), length) for x in others]
    np.testing.assert_allclose(metric(others), expected, rtol=1e-6)
    np.testing.assert_allclose(metric.joint(others), brute_mmd(others.numpy(), points.numpy(), length), rtol=1e-6)
    np.testing.assert_allclose(metric.joint(others[:1]), metric(others[:1])[0], rtol=1e-9)


def test_mmd_length_is_the_median_distance_by_default(points):
    assert mmd(points).length_scale == pytest.approx(torch.pdist(points).median().item(), rel=0.06)
    assert mmd(points).length_scale == mmd(points).length_scale


def test_mmd_grows_towards_its_bound(points):
    far = torch.tensor([[0.0], [2.0], [5.0], [1e3]]) * torch.ones(3)
    d = mmd(points)(far)
    assert (d.diff() > 0).all()
    assert d[-1].item() == pytest.approx(np.sqrt(1 + mmd(points).mean_kernel) / 61, rel=1e-5)


@pytest.mark.parametrize("metric", [nearest, partial(nearest, over="sum"), hausdorff, mmd])
def test_the_training_set_as_a_whole_is_at_zero(points, metric, generator):
    order = torch.randperm(60, generator=generator)
    assert metric(points).joint(points).item() == pytest.approx(0, abs=1e-7)
    assert metric(points).joint(points[order]).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("metric", [nearest, hausdorff])
def test_every_training_input_is_at_zero(points, metric, offset):
    points = points + offset
    assert torch.equal(metric(points)(points), torch.zeros(60))


@pytest.mark.parametrize("name", METRICS)
def test_never_negative_and_batch_invariant(points, others, name):
    metric = METRICS[name](points)
    d = metric(others)
    assert d.shape == (17,)
    assert d.dtype == others.dtype
    assert (d >= 0).all()
    torch.testing.assert_close(torch.cat([metric(part) for part in others.split(4)]), d)
    torch.testing.assert_close(metric(others.flip(0)), d.flip(0))
    torch.testing.assert_close(METRICS[name](points.flip(0))(others), d, rtol=0.1, atol=1e-6)  # median over pairs
    assert metric.joint(others).shape == ()
    torch.testing.assert_close(metric.joint(others.flip(0)), metric.joint(others))


def test_radius_formula():
    raw = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert Radius(1.0, 2.0)(raw).tolist() == [0.0, 0.0, 0.5, 2.0]


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.9])
def test_radius_is_fitted_to_quantiles(generator, quantile):
    raw = torch.rand(200, generator=generator) + 0.1
    radius = fit_radius(raw, quantile, "inputs")
    start, upper = np.quantile(raw.double().numpy(), [quantile, 0.95])
    assert radius.start == pytest.approx(start)
    assert radius.unit == pytest.approx(upper - start)
    assert radius(torch.tensor(upper)).item() == pytest.approx(1.0)
    assert (radius(raw) > 0).float().mean().item() == pytest.approx(1 - quantile, abs=0.01)


@pytest.mark.parametrize(("spread", "unit"), [(1e-9, 0.02), (0.019, 0.02), (0.021, 0.021)])
def test_the_unit_is_at_least_a_hundredth_of_the_start(spread, unit):
    raw = torch.full((100,), 2.0, dtype=torch.float64)
    raw[92:] += spread  # between the 90 % and the 95 % quantile
    radius = fit_radius(raw, 0.9, "inputs")
    assert radius.start == 2.0
    assert radius.unit == pytest.approx(unit)
    assert radius(torch.tensor([2.0, 4.0])).tolist() == pytest.approx([0.0, 2.0 / unit])


def test_a_radius_that_starts_just_below_the_95_percent_quantile_has_the_smallest_unit(generator):
    raw = torch.rand(200, generator=generator) + 0.1
    radius = fit_radius(raw, 0.949, "inputs")
    assert radius.start == pytest.approx(np.quantile(raw.double().numpy(), 0.949))
    assert radius.unit == pytest.approx(0.01 * radius.start)


def test_radius_with_duplicates_starts_at_the_smallest_positive_distance():
    raw = torch.cat([torch.zeros(92), torch.tensor([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])])
    with pytest.warns(DapcalWarning, match=r"90 % of the held-out inputs have distance 0 in the inputs space.*0\.2"):
        radius = fit_radius(raw, 0.9, "inputs")
    assert radius.start == pytest.approx(0.2)
    assert radius.unit == pytest.approx(np.quantile(raw.double().numpy(), 0.95) - 0.2)


def test_radius_with_hardly_anything_but_duplicates():
    raw = torch.cat([torch.zeros(99), torch.tensor([0.5])])
    with pytest.warns(DapcalWarning, match="smallest positive distance"):
        assert fit_radius(raw, 0.9, "inputs") == Radius(0.5, 0.5)


def test_radius_of_equal_distances_has_a_unit():
    assert fit_radius(torch.full((20,), 0.5), 0.9, "inputs") == Radius(0.5, 0.5)


def test_radius_refuses_zeros_alone():
    with pytest.raises(ValueError, match=r"All held-out inputs have distance 0 .* in the pixel space.*radius=None"):
        fit_radius(torch.zeros(20), 0.9, "pixel")


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e20), (torch.float32, 1e37), (torch.float64, 1e300)])
def test_inputs_too_large_for_squares_are_refused(dtype, size):
    """They had no distance that tells anything, or φ was looked for around NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator, dtype=dtype) * size
    nets = [nn.Linear(2, 3, dtype=dtype) for _ in range(3)]
    draws = from_state_dicts(nets[0], Categorical(), [net.state_dict() for net in nets])
    for distance in (None, Space(Identity(), name="inputs")):
        with pytest.raises(ValueError, match=rf"in the inputs space are beyond what {dtype} holds; scale the inputs"):
            dapcal.calibrate(
                draws, train=(x[:40], torch.arange(40) % 3), held_out=(x[40:], torch.arange(40) % 3), distance=distance
            )


@pytest.mark.parametrize("quantile", [-0.1, 0.95, 1.0, 90, float("nan")])
def test_radius_quantile_out_of_range(quantile):
    with pytest.raises(ValueError, match=r"`radius` between 0 and 0.95 \(or None\)"):
        fit_radius(torch.rand(20), quantile, "inputs")


@dataclass(frozen=True)
class FromMean:
    """A metric of a user's own: distance beyond the farthest training point from their mean."""

    center: Tensor
    reach: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        return ((points - self.center).norm(dim=1) - self.reach).clamp_min(0)

    def joint(self, points: Tensor) -> Tensor:
        return self(points).mean()


def from_mean(points: Tensor) -> FromMean:
    return FromMean(points.mean(0), (points - points.mean(0)).norm(dim=1).max())


def test_a_metric_and_a_projector_of_ones_own(points, others, posterior):
    distance = fit_distance(
        Space(lambda x: x[:, :2] * 3, from_mean, radius=None, name="own"), points, others, posterior
    )
    z = 3 * points[:, :2]
    center = z.mean(0)
    expected = ((3 * others[:, :2] - center).norm(dim=1) - (z - center).norm(dim=1).max()).clamp_min(0)
    torch.testing.assert_close(distance(others), expected)
    torch.testing.assert_close(distance.joint(others), expected.mean())
    assert torch.equal(distance(points), torch.zeros(60))
    assert distance.spaces[0].name == "own"


def test_default_space_measures_between_features(posterior):
    x = torch.randn(40, 2)
    space = Space().fit(x[:20], x[20:], posterior)
    z = torch.tanh(posterior.network[0](x)).detach().numpy()
    np.testing.assert_allclose(space.raw(x[20:]), cdist(z[20:], z[:20]).min(1), rtol=1e-4)
    assert space.name == "features"
    assert space.radius.start == pytest.approx(np.quantile(space.raw(x[20:]).double().numpy(), 0.9))


@pytest.mark.parametrize("radius", [None, 0.5])
@pytest.mark.parametrize("over", ["max", "sum"])
def test_sets_count_by_each_points_excess(points, others, posterior, over, radius):
    space = Space(Identity(), partial(nearest, over=over), radius=radius).fit(points, others, posterior)
    raw = torch.tensor(cdist(others, points).min(1))
    excess = raw if radius is None else space.radius(raw)
    expected = excess.max() if over == "max" else excess.sum()
    torch.testing.assert_close(space.joint(others).double(), expected, rtol=1e-5, atol=1e-6)
    assert space.joint(points).item() == 0


def test_a_set_of_hausdorff_passes_the_radius_once(points, others, posterior):
    space = FittedSpace("inputs", Identity(), hausdorff(points), Radius(0.3, 2.0))
    torch.testing.assert_close(space.joint(others), (hausdorff(points).joint(others) - 0.3) / 2)


def test_the_larger_of_two_spaces_counts(points, others, posterior):
    spaces = (
        Space(lambda x: x[:, :1], radius=0.5, name="one"),
        Space(lambda x: x[:, 1:], partial(nearest, k=2), radius=None, name="two"),
    )
    distance = fit_distance(spaces, points, others, posterior)
    alone = [fit_distance(space, points, others, posterior) for space in spaces]
    both = torch.stack([one(others) for one in alone])
    assert torch.equal(distance(others), both.max(0).values)
    assert both.argmax(0).unique().numel() == 2
    assert distance.raw(others).shape == (2, 17)
    assert torch.equal(distance.combine(distance.raw(others)), distance(others))
    assert torch.equal(distance.joint(others), torch.stack([one.joint(others) for one in alone]).max())


def test_no_space(points, posterior):
    with pytest.raises(ValueError, match="at least one space"):
        fit_distance((), points, points, posterior)


def test_distance_of_spaces_is_made_of_their_excesses(points):
    spaces = tuple(FittedSpace(n, Identity(), nearest(points), r) for n, r in (("a", None), ("b", Radius(1.0, 0.1))))
    raw = torch.tensor([[0.5, 1.0, 2.0], [0.5, 1.2, 2.0]])
    torch.testing.assert_close(Distance(spaces).combine(raw), torch.tensor([0.5, 2.0, 10.0]))
