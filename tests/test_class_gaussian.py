"""The distance to the nearest class against scipy and scikit-learn, and as a space among others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.covariance import EmpiricalCovariance, LedoitWolf
from torch import nn

import dapcal
from dapcal.calibration.gap import GapCrossValidation
from dapcal.data import Labelled
from dapcal.deploy import export
from dapcal.detectors import mahalanobis
from dapcal.distances import ClassGaussian, Space, class_gaussian, informative
from dapcal.distances.projectors import Features, Identity
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian
from dapcal.posteriors import ensemble, gaussian


@pytest.fixture
def classes(generator):
    y = torch.arange(90) % 3
    spread = torch.randn(4, 4, generator=generator)
    return torch.randn(90, 4, generator=generator) @ spread + 3 * y[:, None], y


def spread_out(model: nn.Module, likelihood=None):
    scales = {n: torch.full_like(p, 0.1) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood or Categorical(), scales, draws=5)


@pytest.mark.parametrize("shrinkage", [None, 0.0])
@pytest.mark.parametrize(("block", "narrowest"), [(7, 1), (4096, 32)])
def test_it_is_scipys_mahalanobis_distance_with_scikit_learns_covariance(
    classes, generator, monkeypatch, shrinkage, block, narrowest
):
    monkeypatch.setattr(class_gaussian, "_ROWS", block)
    monkeypatch.setattr(class_gaussian, "_NARROWEST", narrowest)
    points, y = (t.double() if t.is_floating_point() else t for t in classes)
    others = 4 * torch.randn(25, 4, generator=generator).double()
    means = np.stack([points[y == k].numpy().mean(0) for k in range(3)])
    estimator = LedoitWolf if shrinkage is None else EmpiricalCovariance
    within = estimator(assume_centered=True).fit(points.numpy() - means[y]).covariance_
    expected = cdist(others, means, "mahalanobis", VI=np.linalg.inv(within)).min(1)
    metric = ClassGaussian(shrinkage).fit_metric(points, y)
    np.testing.assert_allclose(metric(others), expected, rtol=1e-7)
    np.testing.assert_allclose(metric.joint(others), expected.max(), rtol=1e-7)


def test_it_is_the_root_of_the_detectors_score(classes):
    x, y = classes
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    space = Space(Features(unit=True), ClassGaussian(), radius=None).fit(x, x, spread_out(model), y)
    detector = mahalanobis.fit(space.projector.network, (x, y), unit=True)
    np.testing.assert_allclose(space.raw(2 * x) ** 2, detector(2 * x), rtol=1e-4)


def test_batches_order_and_dtype_do_not_matter(classes, generator):
    points, y = classes
    metric, others = ClassGaussian().fit_metric(points, y), torch.randn(20, 4, generator=generator)
    found = metric(others)
    assert found.dtype == torch.float32
    assert torch.equal(torch.cat([metric(part) for part in others.split(3)]), found)
    order = torch.randperm(90, generator=generator)
    torch.testing.assert_close(ClassGaussian().fit_metric(points[order], y[order])(others), found)
    torch.testing.assert_close(ClassGaussian().fit_metric(points, 5 + 2 * y)(others), found)  # names of classes


def test_points_that_do_not_vary_have_a_distance():
    """Equal points within classes, and fewer points than dimensions."""
    points, y = torch.eye(5)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1])
    metric = ClassGaussian().fit_metric(points, y)
    assert not metric(points).any()
    assert metric(torch.ones(1, 5)).isfinite().all()


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, r"needs the classes of the training inputs; pass them, space\.fit\("),
        (
            torch.zeros(90),
            r"is for classification: expected class labels \(90,\) as whole numbers, got \(90,\) of torch",
        ),
        (torch.zeros(90, 1), r"got \(90, 1\) of torch\.float32; use dapcal\.distances\.nearest"),
        (torch.zeros(8).long(), r"got \(8,\) of torch\.int64"),
    ],
)
def test_other_targets_are_refused(classes, y, message):
    with pytest.raises(ValueError, match=message):
        Space(Identity(), ClassGaussian()).fit(classes[0], classes[0], spread_out(nn.Linear(4, 3)), y)


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
def test_calibrate_hands_on_the_classes(blobs):
    train, held_out = blobs
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    space = Space(Identity(), ClassGaussian(), name="classes")

    def refit(x, y):
        return spread_out(model)

    for loss in (None, GapCrossValidation(refit, regions=1)):
        calibrated = dapcal.calibrate(spread_out(model), train=train, held_out=held_out, distance=space, loss=loss)
        expected = space.fit(train[0], held_out[0], spread_out(model), train[1])
        assert torch.equal(calibrated.distance.raw(held_out[0])[0], expected.raw(held_out[0]))
    numbers = (train[0], train[0][:, :1]), (held_out[0], held_out[0][:, :1])
    one = spread_out(nn.Linear(2, 1), Gaussian())
    with pytest.raises(ValueError, match="ClassGaussian is for classification"):
        dapcal.calibrate(one, train=numbers[0], held_out=numbers[1], distance=space)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()])
@pytest.mark.parametrize("told", [True, False])
def test_it_is_a_candidate_for_classes_alone(blobs, likelihood, told):
    (x, y), (other, other_y) = blobs
    outputs = {Categorical: 3, Bernoulli: 1, Gaussian: 1}[type(likelihood)]
    targets, others = {
        Categorical: (y, other_y),
        Bernoulli: (y.clamp_max(1), other_y.clamp_max(1)),
        Gaussian: (x[:, :1], other[:, :1]),
    }[type(likelihood)]
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))
    judged = informative(spread_out(model, likelihood), x, Labelled(other, others), targets=targets if told else None)
    tried = [note for note in judged.notes if note.startswith("distance between features and class means: AUROC")]
    assert len(tried) == (told and not isinstance(likelihood, Gaussian))
    assert ("features and class means" in [space.name for space in judged.further]) == any("; in: " in n for n in tried)


def test_wide_features_have_no_covariance_by_default(blobs, monkeypatch):
    monkeypatch.setattr(dapcal.distances.choosing, "LARGEST_COVARIANCE", 7)
    (x, y), held_out = blobs
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    judged = informative(spread_out(model), x, Labelled(*held_out), targets=y)
    assert not [note for note in judged.notes if "class means" in note]


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
def test_it_deploys(blobs):
    train, held_out = blobs
    torch.manual_seed(0)
    members = ensemble.of([nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(3)], Categorical())
    space = Space(Features(unit=True), ClassGaussian())
    calibrated = dapcal.calibrate(members, train=train, held_out=held_out, distance=[space, Space(Identity())])
    x = torch.cat([1.01 * held_out[0], 9 * held_out[0]])
    expected, program = calibrated(x), export(calibrated).module()
    for found in (calibrated.module()(x)._asdict(), program(x)):
        for name in ("mean", "distance", "ood_score"):
            torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 5, 170, 320])
def test_products_that_leave_out_what_is_zero_whiten_as_the_whole_does(generator, size):
    whitening = torch.randn(size, size, generator=generator, dtype=torch.float64).tril()
    whitening[0] = 0.0
    points, centers = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for rows in (600, 3))
    metric = class_gaussian.NearestClass(whitening, centers)
    assert len(metric._steps) == min(5, -(-size // 32))
    assert sum(columns for _, columns in metric._steps) <= 0.61 * size * len(metric._steps) or size < 170
    expected = torch.cdist(points @ whitening.T, centers).amin(1)
    torch.testing.assert_close(metric(points), expected, rtol=1e-9, atol=1e-9)
    full = class_gaussian.NearestClass(torch.ones(size, size, dtype=torch.float64), centers)
    torch.testing.assert_close(
        full(points), torch.cdist(points.sum(1, keepdim=True).expand(-1, size), centers).amin(1), rtol=1e-9, atol=1e-7
    )
