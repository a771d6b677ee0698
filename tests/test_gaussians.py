"""Moments of Gaussian posteriors: log Z and transport against quadrature, Monte Carlo and numpy.linalg."""

import itertools

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import logsumexp

from dapcal.gaussians import DiagonalGaussian, FullGaussian
from dapcal.prior import make_prior

# σ0 and factor of the groups that parameters "a" and "b" belong to
CASES = {
    "all": (1.0, "*"),
    "subset": (1.0, "a"),
    "two groups": ({"a": 0.9, "b": 1.4}, {"a": 1.0, "b": 2.0}),
}
SETTINGS = [(dim, "all") for dim in (1, 2, 3)] + [(dim, c) for dim in (2, 3) for c in ("subset", "two groups")]


def prior_for(dim, case):
    sizes = {"a": 1, "b": dim - 1} if dim > 1 else {"a": 1}
    return make_prior(sizes, *CASES[case])


def drop(dim, case, d):
    """The diagonal of C, from its definition."""
    scale, aware = CASES[case]
    names = ["a"] + ["b"] * (dim - 1)
    sigma0 = np.array([scale[n] if isinstance(scale, dict) else scale for n in names])
    factor = np.array([aware[n] if isinstance(aware, dict) else float(aware in ("*", n)) for n in names])
    return 1 / sigma0**2 - 1 / (sigma0 + factor * d) ** 2


def moments(dim, full, seed=0):
    """A mean, and a covariance with eigenvalues well inside the priors above."""
    rng = np.random.default_rng(seed)
    mean = rng.uniform(-0.8, 0.8, dim)
    values = rng.uniform(0.1, 0.5, dim)
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0] if full else np.eye(dim)
    return mean, basis @ np.diag(values) @ basis.T


def build(mean, covariance, full):
    mean, covariance = torch.tensor(mean), torch.tensor(covariance)
    return FullGaussian(mean, covariance) if full else DiagonalGaussian(mean, covariance.diagonal().clone())


def log_z(gaussian, prior, *distances):
    c = prior.precision_drop(torch.tensor(distances, dtype=torch.float64))
    return gaussian.log_expectation(c, prior).tolist()


def transported(gaussian, draws, prior, d, shift):
    c = prior.precision_drop(torch.tensor([d], dtype=torch.float64))[0]
    return gaussian.transport(draws, c, prior, shift)


def linear_map(gaussian, prior, d, shift):
    """Where the mean goes, and the matrix that deviations are multiplied by."""
    basis = torch.eye(len(gaussian.mean), dtype=torch.float64)
    moved = transported(gaussian, torch.cat([gaussian.mean[None], gaussian.mean + basis]), prior, d, shift).numpy()
    return moved[0], (moved[1:] - moved[0]).T


def log_z_on_a_grid(mean, covariance, c, half=8.0, points=81):
    axis = np.linspace(-half, half, points)
    theta = np.stack(np.meshgrid(*[axis] * len(mean), indexing="ij"), -1).reshape(-1, len(mean))
    values = stats.multivariate_normal(mean, covariance).logpdf(theta) + 0.5 * theta**2 @ c
    return logsumexp(values) + len(mean) * np.log(axis[1] - axis[0])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("dim", "case"), SETTINGS)
def test_log_z_equals_quadrature(dim, case, full):
    mean, covariance = moments(dim, full)
    expected = log_z_on_a_grid(mean, covariance, drop(dim, case, 0.7))
    assert log_z(build(mean, covariance, full), prior_for(dim, case), 0.7) == pytest.approx([expected], rel=1e-9)


@pytest.mark.parametrize("d", [1e-4, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("sigma", [0.01, 0.5, 0.95])
def test_log_z_of_one_parameter_equals_adaptive_quadrature(sigma, d):
    mu, c = 0.6, 1 - 1 / (1 + d) ** 2

    def excess(theta):
        log_density = stats.norm.logpdf(theta, mu, sigma)
        return np.exp(log_density + 0.5 * c * theta**2) - np.exp(log_density)

    variance = sigma**2 / (1 - c * sigma**2)
    center, half = mu * variance / sigma**2, 12 * np.sqrt(variance)
    value, _ = integrate.quad(excess, center - half, center + half, epsabs=0, epsrel=1e-12, limit=200)
    gaussian, prior = build(np.array([mu]), np.array([[sigma**2]]), False), make_prior({"w": 1}, 1.0)
    assert log_z(gaussian, prior, d) == pytest.approx([np.log1p(value)], rel=1e-8)


@pytest.mark.parametrize("full", [False, True])
def test_log_z_in_50_dimensions_equals_monte_carlo(full):
    rng = np.random.default_rng(3)
    dim, d, n = 50, 1.0, 200_000
    mean, values = 0.3 * rng.normal(size=dim), rng.uniform(0.05, 0.3, dim) ** 2
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0] if full else np.eye(dim)
    c = 1 - 1 / (1 + d) ** 2
    assert 2 * c * values.max() < 1  # the weights' variance is finite
    theta = mean + (rng.normal(size=(n, dim)) * np.sqrt(values)) @ basis.T
    values_of_w = 0.5 * c * (theta**2).sum(1)
    estimate = logsumexp(values_of_w) - np.log(n)
    w = np.exp(values_of_w - estimate)
    error = w.std() / np.sqrt(n)
    assert error < 0.01
    gaussian = build(mean, basis @ np.diag(values) @ basis.T, full)
    assert log_z(gaussian, make_prior({"w": dim}, 1.0), d) == pytest.approx([estimate], abs=4 * error)


@pytest.mark.parametrize("d", [0.01, 0.5, 20.0])
def test_log_z_is_the_papers_marginal_ratio(d):
    """Appendix "The marginal ratio in the Gaussian scenario": E[p(θ|x*,x)/p(θ|x)] = (σ0/(σ0+d))ⁿ Z."""
    rng = np.random.default_rng(1)
    n, sigma0 = 6, 0.8
    mu, sigma = rng.normal(size=n), rng.uniform(0.1, 0.75, n)
    gamma2 = 1 / (1 / sigma0**2 - 1 / (sigma0 + d) ** 2)
    beta2 = 1 / (1 / sigma**2 - 1 / gamma2)
    factors = np.sqrt(beta2) / sigma * np.exp(-0.5 * mu**2 / sigma**2 * (1 - beta2 / sigma**2))
    ratio = (sigma0 / (sigma0 + d)) ** n * np.prod(factors)
    gaussian = build(mu, np.diag(sigma**2), False)
    ours = log_z(gaussian, make_prior({"w": n}, sigma0), d)[0] + n * np.log(sigma0 / (sigma0 + d))
    assert ours == pytest.approx(np.log(ratio), rel=1e-9)


def test_log_z_takes_many_rows():
    mean, covariance = moments(3, True)
    distances = [0.0, 0.3, 2.0, 0.3]
    for case, full in itertools.product(CASES, (False, True)):
        gaussian, prior = build(mean, covariance, full), prior_for(3, case)
        rows = log_z(gaussian, prior, *distances)
        assert rows == pytest.approx([log_z(gaussian, prior, d)[0] for d in distances], rel=1e-14)
        assert rows[0] == 0


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("dim", "case"), [*SETTINGS, (8, "all"), (8, "subset"), (8, "two groups")])
def test_transport_is_the_distance_aware_posterior(dim, case, full, shift):
    mean, covariance = moments(dim, full, seed=dim)
    gaussian, prior = build(mean, covariance, full), prior_for(dim, case)
    for d in (1e-3, 0.6, 5.0):
        precision = np.linalg.inv(covariance)
        expected = np.linalg.inv(precision - np.diag(drop(dim, case, d)))
        center, matrix = linear_map(gaussian, prior, d, shift)
        np.testing.assert_allclose(matrix @ covariance @ matrix.T, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(center, expected @ precision @ mean if shift else mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_transport_of_a_singular_covariance(case):
    """(Σ⁻¹ − C)⁻¹ = (I − ΣC)⁻¹ Σ, which needs no inverse of Σ."""
    rng = np.random.default_rng(5)
    root = rng.normal(size=(4, 2)) * 0.3
    covariance, mean = root @ root.T, rng.normal(size=4)
    gaussian, prior = build(mean, covariance, True), prior_for(4, case)
    c = drop(4, case, 0.8)
    left = np.eye(4) - covariance @ np.diag(c)
    center, matrix = linear_map(gaussian, prior, 0.8, True)
    np.testing.assert_allclose(matrix @ covariance @ matrix.T, np.linalg.solve(left, covariance), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(center, np.linalg.solve(left, mean), rtol=1e-8)


@pytest.mark.parametrize("full", [False, True])
def test_transported_samples_have_the_moments(full):
    mean, covariance = moments(3, full)
    gaussian, prior, n = build(mean, covariance, full), prior_for(3, "two groups"), 200_000
    base = gaussian.sample(n, torch.Generator().manual_seed(0))
    moved = transported(gaussian, base, prior, 0.8, True)
    target = np.linalg.inv(np.linalg.inv(covariance) - np.diag(drop(3, "two groups", 0.8)))
    for draws, m, s in (
        (base, mean, covariance),
        (moved, target @ np.linalg.solve(covariance, mean), target),
    ):
        deviation = np.sqrt(np.diag(s))
        assert (np.abs(draws.numpy().mean(0) - m) < 5 * deviation / np.sqrt(n)).all()
        # the standard error of a sample covariance is at most √2 σ_i σ_j/√n
        error = np.abs(np.cov(draws.numpy().T) - s)
        assert (error < 5 * np.sqrt(2 / n) * np.outer(deviation, deviation)).all()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distance_zero_is_the_exact_identity(full, shift, dtype):
    """Also where the posterior is wider than the prior."""
    covariance = torch.diag(torch.tensor([0.3, 2.0, 1.7], dtype=dtype))
    mean = torch.tensor([0.1, -2.3, 0.7], dtype=dtype)
    gaussian = FullGaussian(mean, covariance) if full else DiagonalGaussian(mean, covariance.diagonal().clone())
    draws = gaussian.sample(2000, torch.Generator().manual_seed(0))
    prior = make_prior({"a": 3}, 1.0)
    moved = transported(gaussian, draws, prior, 0.0, shift)
    assert moved.dtype == dtype
    assert torch.equal(moved, draws)
    assert log_z(gaussian, prior, 0.0) == [0.0]


@pytest.mark.parametrize("full", [False, True])
def test_directions_wider_than_the_prior_are_counted(full):
    rng = np.random.default_rng(0)
    values = np.array([0.2, 1.1, 3.0, 0.9, 1.5])
    basis = np.linalg.qr(rng.normal(size=(5, 5)))[0] if full else np.eye(5)
    gaussian = build(np.zeros(5), basis @ np.diag(values) @ basis.T, full)
    assert gaussian.contracted(make_prior({"w": 5}, 1.0)) == 3
    assert gaussian.contracted(make_prior({"w": 5}, 2.0)) == 0
    if not full:
        assert gaussian.contracted(make_prior({"a": 2, "b": 3}, 1.0, "b")) == 2
        assert gaussian.contracted(make_prior({"a": 2, "b": 3}, {"a": 1.0, "b": 1.3}, "*")) == 2


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("d", [1e-6, 0.5, 30.0, 1e3])
def test_wide_directions_are_stretched_as_the_prior_is(d, full):
    """Where σ >= σ0 the factor 1 − cσ² is that of the prior itself, 1/k²."""
    sigma0, k = 0.7, 1 + d / 0.7
    rng = np.random.default_rng(2)
    basis = np.linalg.qr(rng.normal(size=(3, 3)))[0] if full else np.eye(3)
    wide = sigma0**2 * np.array([1.02, 1.5, 4.0])
    mean = rng.normal(size=3)
    gaussian, prior = build(mean, basis @ np.diag(wide) @ basis.T, full), make_prior({"w": 3}, sigma0)
    quadratic = 0.5 * (1 - 1 / k**2) / sigma0**2 * (mean**2).sum() * k**2
    assert log_z(gaussian, prior, d) == pytest.approx([quadratic + 3 * np.log(k)], rel=1e-6)
    for shift in (False, True):
        center, matrix = linear_map(gaussian, prior, d, shift)
        np.testing.assert_allclose(center, mean * (k**2 if shift else 1), rtol=1e-6)
        if not shift:  # else the mean, k² away, swallows the digits of a deviation
            np.testing.assert_allclose(matrix, k * np.eye(3), rtol=1e-6, atol=1e-6 * k)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("sigma0", [0.1, 0.7, 1.0, 3.0])
def test_wide_directions_stay_finite_at_any_distance(sigma0, full):
    gaussian = build(np.array([0.3, -1.0]), sigma0**2 * np.diag([0.5, 1.3]), full)
    prior = make_prior({"w": 2}, sigma0)
    distances = [sigma0 * 10.0**power for power in range(19)]
    z = log_z(gaussian, prior, *distances)
    assert np.isfinite(z).all()
    assert (np.diff(z) >= 0).all()
    draws = gaussian.sample(10, torch.Generator().manual_seed(0))
    assert all(transported(gaussian, draws, prior, d, True).isfinite().all() for d in distances)


@pytest.mark.parametrize("what", ["log_expectation", "transport"])
def test_several_groups_that_mix_beyond_the_prior_are_refused(what):
    """Each parameter alone is inside its prior, their sum is not."""
    covariance = torch.tensor([[0.9, 0.88], [0.88, 0.9]], dtype=torch.float64)
    gaussian = FullGaussian(torch.zeros(2, dtype=torch.float64), covariance)
    prior = make_prior({"first": 1, "second": 1}, 1.0, {"first": 1.0, "second": 2.0})
    call = {
        "log_expectation": lambda d: log_z(gaussian, prior, d),
        "transport": lambda d: transported(gaussian, torch.ones(1, 2, dtype=torch.float64), prior, d, False),
    }[what]
    assert torch.as_tensor(call(0.05)).isfinite().all()
    with pytest.raises(ValueError, match="'first', 'second'"):
        call(10.0)


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        (torch.eye(3), "shape"),
        (torch.ones(2), "shape"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "positive semi-definite"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "positive semi-definite"),
        (-torch.eye(2), "positive semi-definite"),
        (torch.tensor([[1.0, torch.nan], [torch.nan, 1.0]]), "finite"),
        (torch.tensor([[torch.inf, 0.0], [0.0, 1.0]]), "finite"),
    ],
)
def test_bad_covariances_are_refused(covariance, message):
    with pytest.raises(ValueError, match=message):
        FullGaussian(torch.zeros(2), covariance)


@pytest.mark.parametrize(
    "variance", [torch.ones(3), torch.ones(2, 1), torch.tensor([1.0, -1e-3]), torch.tensor([1.0, torch.nan])]
)
def test_bad_variances_are_refused(variance):
    with pytest.raises(ValueError, match="Expected"):
        DiagonalGaussian(torch.zeros(2), variance)


@pytest.mark.parametrize("full", [False, True])
def test_bad_means_are_refused(full):
    with pytest.raises(ValueError, match="mean"):
        build(np.array([0.0, np.nan]), np.eye(2), full)


def random_contraction(rng):
    """A covariance with Σ ⪯ σ0² I: data add a random precision of any rank to the prior's."""
    dim, sigma0 = int(rng.integers(1, 9)), 10 ** rng.uniform(-1, 1)
    root = rng.normal(size=(dim, int(rng.integers(1, dim + 3)))) * 10 ** rng.uniform(-2, 2)
    return sigma0, np.linalg.inv(np.eye(dim) / sigma0**2 + root @ root.T / sigma0**2)


def test_envelope_of_the_distance_aware_covariance():
    """V ⪯ J Σ_d Jᵀ ⪯ k² V, for Σ ⪯ σ0² I and any Jacobian."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        sigma0, covariance = random_contraction(rng)
        dim, d = len(covariance), sigma0 * 10 ** rng.uniform(-3, 2)
        covariance = (covariance + covariance.T) / 2
        gaussian, prior = build(np.zeros(dim), covariance, True), make_prior({"w": dim}, sigma0)
        _, matrix = linear_map(gaussian, prior, d, False)
        jacobian = rng.normal(size=(int(rng.integers(1, 5)), dim))
        base = jacobian @ covariance @ jacobian.T
        moved = jacobian @ matrix @ covariance @ matrix.T @ jacobian.T
        k2 = prior.widening(torch.tensor([d], dtype=torch.float64)).item() ** 2
        slack = 1e-9 * np.linalg.eigvalsh(k2 * base).max()
        assert np.linalg.eigvalsh(moved - base).min() > -slack
        assert np.linalg.eigvalsh(k2 * base - moved).min() > -slack


def test_envelope_is_reached_where_only_the_prior_speaks():
    gaussian = build(np.zeros(2), np.diag([0.25, 1e-12]), True)
    prior = make_prior({"w": 2}, 0.5)
    _, matrix = linear_map(gaussian, prior, 1.5, False)
    np.testing.assert_allclose(np.diag(matrix), [4, 1], rtol=1e-9)


def test_forms_of_a_full_covariance_equal_its_dense_variances():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(13, 13, generator=generator, dtype=torch.float64)
    gaussian = FullGaussian(torch.zeros(13, dtype=torch.float64), root @ root.T)
    index = torch.randperm(13, generator=generator)[:12].reshape(3, 4)  # a layer of three outputs, one more parameter
    weights = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    features = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    jacobian = torch.zeros(5, 3, 13, dtype=torch.float64)
    for c in range(3):
        jacobian[:, c, index[c]] = features
    covariance = jacobian @ gaussian.covariance @ jacobian.mT  # (5, 3, 3)
    found = torch.einsum("nd,kdf,nf->nk", features, gaussian.forms(index, weights), features)
    assert torch.allclose(found, torch.einsum("kce,nce->nk", weights, covariance))
