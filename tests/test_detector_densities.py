"""Covariances, DDU, Mahalanobis and neighbour distances against scikit-learn and brute force; degenerate features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.covariance import EmpiricalCovariance, LedoitWolf
from sklearn.neighbors import NearestNeighbors
from torch import nn

from dapcal.detectors import ddu, knn, mahalanobis
from dapcal.distances import covariance
from dapcal.distances.covariance import cholesky, class_means, shrunk_covariance, squared_distances
from detector_cases import blobs, mlp, seen, trained


@pytest.fixture(scope="module")
def case():
    """A network in float64, training data, and test inputs."""
    torch.manual_seed(0)
    x, y = blobs(150)
    network = trained(mlp(6), x, y).double()
    return network, (x.double(), y), 2 * blobs(40, seed=2)[0].double()


def about(points, labels=None, shrinkage=None):
    labels = torch.zeros(len(points), dtype=torch.long) if labels is None else labels
    classes = class_means(points, labels)
    return shrunk_covariance(points, classes.means, classes.members, shrinkage)


@pytest.mark.parametrize("block", [7, 4096])
@pytest.mark.parametrize(("n", "p"), [(200, 3), (20, 5), (5, 12), (2, 4), (3, 1)])
def test_ledoit_wolf_is_scikit_learns(monkeypatch, generator, n, p, block):
    monkeypatch.setattr(covariance, "BLOCK", block)
    points = 5 + torch.randn(n, p, generator=generator).double() @ torch.randn(p, p, generator=generator).double()
    np.testing.assert_allclose(about(points), LedoitWolf().fit(points.numpy()).covariance_, rtol=1e-9, atol=1e-12)


def test_shrinkage_between_the_sample_covariance_and_a_multiple_of_one(generator):
    points = torch.randn(30, 4, generator=generator).double() * torch.tensor([1.0, 2.0, 3.0, 4.0])
    sample = torch.as_tensor(EmpiricalCovariance().fit(points.numpy()).covariance_)
    round_one = sample.trace() / 4 * torch.eye(4)
    torch.testing.assert_close(about(points, shrinkage=0.0), sample)
    torch.testing.assert_close(about(points, shrinkage=1.0), round_one.double())
    torch.testing.assert_close(about(points, shrinkage=0.3), 0.7 * sample + 0.3 * round_one)
    with pytest.raises(ValueError, match=r"`shrinkage` between 0 and 1 \(or None for Ledoit-Wolf\), got 1\.5"):
        about(points, shrinkage=1.5)


def test_class_means_skip_classes_without_inputs(generator):
    points, labels = torch.randn(9, 2, generator=generator), torch.tensor([4, 4, 1, 1, 1, 7, 7, 7, 7])
    classes = class_means(points, labels)
    assert classes.counts.tolist() == [3, 2, 4]
    for k, label in enumerate([1, 4, 7]):
        torch.testing.assert_close(classes.means[k], points[labels == label].double().mean(0))
        assert (classes.members == k).tolist() == (labels == label).tolist()


def test_cholesky_factors_what_has_no_inverse(generator):
    thin = torch.randn(2, 6, generator=generator).double()
    singular = thin.T @ thin
    factor = cholesky(singular)
    torch.testing.assert_close(factor @ factor.T, singular, rtol=0, atol=1e-7 * singular.trace().item())
    indefinite = torch.diag(torch.tensor([1.0, -1e-4])).double()  # as rounding might leave one
    assert cholesky(indefinite).isfinite().all()
    assert torch.equal(cholesky(torch.zeros(3, 3).double()), torch.eye(3).double())
    with pytest.raises(ValueError, match="check their scale"):
        cholesky(torch.full((2, 2), torch.nan).double())


def test_squared_distances_are_scipys(generator):
    points, means = torch.randn(8, 3, generator=generator).double(), torch.randn(4, 3, generator=generator).double()
    matrix = about(torch.randn(50, 3, generator=generator).double())
    expected = cdist(points, means, "mahalanobis", VI=np.linalg.inv(matrix)) ** 2
    np.testing.assert_allclose(squared_distances(points, means, torch.linalg.cholesky(matrix)), expected, rtol=1e-8)


def test_ddu_is_scipys_mixture_of_class_gaussians(case):
    network, (x, y), test = case
    y = torch.where(torch.arange(150) < 20, 0, y)  # unequal shares
    features, points = (seen(network, some)[0].numpy() for some in (x, test))
    log_joint = []
    for k in range(3):
        own = features[y == k]
        normal = multivariate_normal(own.mean(0), np.cov(own.T, bias=True), allow_singular=True)
        log_joint.append(normal.logpdf(points) + np.log(len(own) / 150))
    detector = ddu.fit(network, (x, y), shrinkage=0.0)
    np.testing.assert_allclose(
        detector(test), -logsumexp(log_joint, 0), rtol=1e-3
    )  # saturated features feel the jitter


def test_ddu_of_unit_features_is_that_of_features_of_length_one(case):
    network, (x, y), test = case
    learnt, points = (nn.functional.normalize(seen(network, some)[0]) for some in (x, test))
    width = learnt.shape[1]
    expected = ddu.fit(nn.Sequential(nn.Linear(width, 3).double()), (learnt, y))(points)
    torch.testing.assert_close(ddu.fit(network, (x, y), unit=True)(test), expected)
    assert not torch.allclose(ddu.fit(network, (x, y))(test), expected)


def test_ddu_shrinks_each_class_by_default(case):
    network, (x, y), test = case
    features, _ = seen(network, x)
    points = seen(network, test)[0]
    densities = []
    for k in range(3):
        fitted = LedoitWolf().fit(features[y == k])
        normal = torch.distributions.MultivariateNormal(
            torch.as_tensor(fitted.location_), torch.as_tensor(fitted.covariance_)
        )
        densities.append(normal.log_prob(points) + np.log(1 / 3))
    torch.testing.assert_close(
        ddu.fit(network, (x, y))(test), -torch.logsumexp(torch.stack(densities), 0), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("shrinkage", [None, 0.0])
def test_mahalanobis_is_the_nearest_class_under_a_common_covariance(case, unit, shrinkage):
    network, (x, y), test = case
    features, points = (seen(network, some)[0].numpy() for some in (x, test))
    if unit:
        features, points = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (features, points))
    means = np.stack([features[y == k].mean(0) for k in range(3)])
    estimator = EmpiricalCovariance if shrinkage == 0 else LedoitWolf
    sigma = estimator(assume_centered=True).fit(features - means[y]).covariance_
    expected = [min((z - m) @ np.linalg.inv(sigma) @ (z - m) for m in means) for z in points]
    detector = mahalanobis.fit(network, (x, y), unit=unit, shrinkage=shrinkage)
    np.testing.assert_allclose(detector(test), expected, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 5, 150])
@pytest.mark.parametrize("unit", [False, True])
def test_knn_is_scikit_learns(case, unit, k):
    network, train, test = case
    features, points = (seen(network, some)[0].numpy() for some in (train[0], test))
    if unit:
        features, points = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (features, points))
    distances, _ = NearestNeighbors(n_neighbors=k).fit(features).kneighbors(points)
    np.testing.assert_allclose(knn.fit(network, train, k=k, unit=unit)(test), distances[:, -1], rtol=1e-6, atol=1e-9)


def test_knn_defaults_are_the_papers(case):
    detector = knn.fit(case[0], case[1])
    assert (detector.k, detector.unit) == (50, True)


DEGENERATE = {
    "one input in a class": lambda x, y: (x, torch.where(torch.arange(len(y)) == 0, 2, y % 2)),
    "one input a class": lambda x, y: (x[:3], torch.arange(3)),
    "one input": lambda x, y: (x[:1], y[:1]),
    "fewer inputs than features": lambda x, y: (x[:9], y[:9]),
    "two inputs a class": lambda x, y: (x[:6], y[:6]),
    "equal inputs": lambda x, y: (x[:1].expand(30, 2), y[:30]),
    "equal inputs in a class": lambda x, y: (torch.where((y == 1)[:, None], x[1], x), y),
    "one class": lambda x, y: (x, torch.zeros_like(y)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shrinkage", [None, 0.0])
@pytest.mark.parametrize("fit", [ddu.fit, mahalanobis.fit])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_features_do_not_fail(case, name, fit, shrinkage, dtype):
    network, (x, y), test = case
    network = nn.Sequential(network[:3], nn.ReLU(), Constant(), nn.Linear(6, 3)).to(dtype)  # constant, dead features
    train, labels = DEGENERATE[name](x.to(dtype), y)
    detector = fit(network, (train, labels), shrinkage=shrinkage)
    network.double()
    near, far = detector(train), detector(torch.cat([test.to(dtype), 1e3 * test.to(dtype)]))
    assert near.isfinite().all()
    assert far.isfinite().all()
    assert far.max() > near.max()


class Constant(nn.Module):
    """Makes the first feature a constant."""

    def forward(self, z):
        return torch.cat([torch.ones_like(z[:, :1]), z[:, 1:]], 1)


def test_a_class_of_one_input_has_the_common_covariance(case):
    network, (x, y), _ = case
    y = torch.where(torch.arange(150) == 0, 2, y % 2)
    detector = ddu.fit(network, (x, y))
    features, _ = seen(network, x)
    classes = class_means(features, y)
    tied = shrunk_covariance(features, classes.means, classes.members)
    torch.testing.assert_close(detector.factors[2], cholesky(tied))
    torch.testing.assert_close(detector.log_shares.exp()[2].item(), 1 / 150)
