"""Diagonal plus low rank: log Z, transport and contraction against dense covariances and numpy.linalg."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dapcal.gaussians.diagonal import DiagonalGaussian
from dapcal.gaussians.full import FullGaussian
from dapcal.gaussians.low_rank import LowRankGaussian
from dapcal.prior import make_prior

# σ0 and distance factors of the parameters "a", "b" and "c"
CASES = {
    "all": (1.0, "*"),
    "subset": (1.0, "a"),
    "two groups": ({"a": 0.9, "*": 1.4}, {"a": 1.0, "*": 2.0}),
    "two groups and a rest": ({"a": 0.9, "b": 1.4, "*": 1.0}, {"a": 1.0, "b": 0.5}),
}
DIM = 8
RANKS = (1, 3, 11)  # the last one above the number of parameters


def prior_for(case, dim=DIM):
    return make_prior({"a": dim // 2, "b": dim // 4, "c": dim - dim // 2 - dim // 4}, *CASES[case])


def moments(rank, seed=0, dim=DIM, top=0.5):
    """Mean, variances over two decades and columns, with the covariance's largest eigenvalue at `top`."""
    rng = np.random.default_rng(seed)
    mean, variance = rng.normal(size=dim), 10 ** rng.uniform(-2, 0, dim)
    factor = rng.normal(size=(dim, rank))
    scale = top / np.linalg.eigvalsh(dense(variance, factor)).max()
    return torch.tensor(mean), torch.tensor(variance * scale), torch.tensor(factor * np.sqrt(scale))


def dense(variance, factor):
    variance, factor = np.asarray(variance), np.asarray(factor)
    return np.diag(variance) + factor @ factor.T


def full(mean, variance, factor):
    return FullGaussian(mean, torch.tensor(dense(variance, factor)))


def drop(prior, d):
    return prior.precision_drop(torch.tensor([d], dtype=torch.float64))[0]


def log_z(gaussian, prior, *distances):
    return gaussian.log_expectation(prior.precision_drop(torch.tensor(distances, dtype=torch.float64)), prior).tolist()


def transported(gaussian, draws, prior, d, shift=False):
    return gaussian.transport(draws, drop(prior, d), prior, shift)


def linear_map(gaussian, prior, d, shift=False):
    """Where the mean goes, and the matrix that deviations are multiplied by."""
    basis = torch.eye(len(gaussian.mean), dtype=torch.float64)
    moved = transported(gaussian, torch.cat([gaussian.mean[None], gaussian.mean + basis]), prior, d, shift).numpy()
    return moved[0], (moved[1:] - moved[0]).T


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", RANKS)
def test_log_z_equals_that_of_the_dense_covariance(rank, case):
    parts, prior = moments(rank, seed=rank), prior_for(case)
    distances = [0.0, 1e-6, 0.3, 2.0, 50.0]
    ours = log_z(LowRankGaussian(*parts), prior, *distances)
    assert ours == pytest.approx(log_z(full(*parts), prior, *distances), rel=1e-9, abs=1e-14)
    assert ours[0] == 0


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", RANKS)
def test_transport_is_the_distance_aware_posterior(rank, case, shift):
    parts, prior = moments(rank, seed=rank), prior_for(case)
    covariance, mean = dense(*parts[1:]), parts[0].numpy()
    precision = np.linalg.inv(covariance)
    for d in (1e-3, 0.6, 5.0, 100.0):
        expected = np.linalg.inv(precision - np.diag(drop(prior, d)[prior.group].numpy()))
        center, matrix = linear_map(LowRankGaussian(*parts), prior, d, shift)
        np.testing.assert_allclose(matrix @ covariance @ matrix.T, expected, rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(center, expected @ precision @ mean if shift else mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(center, linear_map(full(*parts), prior, d, shift)[0], rtol=1e-9, atol=1e-12)


def test_parameters_that_are_not_distance_aware_have_no_c(generator):
    parts, prior = moments(3), prior_for("subset")
    gaussian, dense_gaussian, c = LowRankGaussian(*parts), full(*parts), torch.tensor([0.3, 0.6], dtype=torch.float64)
    expected = dense_gaussian.log_expectation(c[None], prior).tolist()
    assert gaussian.log_expectation(c[None], prior).tolist() == pytest.approx(expected, rel=1e-10)
    assert gaussian.log_expectation(c.flip(0)[None], prior).tolist() != pytest.approx(expected, rel=0.01)
    draws = gaussian.sample(3, generator)
    assert torch.equal(gaussian.transport(draws, torch.tensor([0.0, 0.6]).double(), prior, True), draws)


@pytest.mark.parametrize("shift", [False, True])
def test_with_one_variance_every_draw_moves_as_with_the_dense_covariance(shift, generator):
    """R commutes with Σ_d then, so that both maps are the symmetric one."""
    mean, _, factor = moments(3)
    gaussian = LowRankGaussian(mean, torch.full_like(mean, 0.2), factor)
    draws, prior = gaussian.sample(20, generator), make_prior({"w": DIM}, 1.0)
    dense_gaussian = full(mean, gaussian.variance, factor)
    for d in (1e-3, 0.6, 5.0):
        expected = transported(dense_gaussian, draws, prior, d, shift)
        torch.testing.assert_close(transported(gaussian, draws, prior, d, shift), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_without_shared_directions_it_is_a_diagonal_gaussian(case, shift, generator):
    mean, variance, factor = moments(2)
    gaussian, diagonal = LowRankGaussian(mean, variance, 0 * factor), DiagonalGaussian(mean, variance)
    draws, prior = diagonal.sample(20, generator), prior_for(case)
    assert log_z(gaussian, prior, 0.4, 9.0) == pytest.approx(log_z(diagonal, prior, 0.4, 9.0), rel=1e-12)
    expected = transported(diagonal, draws, prior, 2.0, shift)
    torch.testing.assert_close(transported(gaussian, draws, prior, 2.0, shift), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rank", RANKS)
def test_samples_have_the_moments(rank, generator):
    parts, prior, n = moments(rank), prior_for("two groups"), 200_000
    gaussian, covariance = LowRankGaussian(*parts), dense(*parts[1:])
    base = gaussian.sample(n, generator)
    target = np.linalg.inv(np.linalg.inv(covariance) - np.diag(drop(prior, 0.8)[prior.group].numpy()))
    mean = parts[0].numpy()
    for draws, m, s in (
        (base, mean, covariance),
        (transported(gaussian, base, prior, 0.8, True), target @ np.linalg.solve(covariance, mean), target),
    ):
        deviation = np.sqrt(np.diag(s))
        assert (np.abs(draws.numpy().mean(0) - m) < 5 * deviation / np.sqrt(n)).all()
        # the standard error of a sample covariance is at most √2 σ_i σ_j/√n
        error = np.abs(np.cov(draws.numpy().T) - s)
        assert (error < 5 * np.sqrt(2 / n) * np.outer(deviation, deviation)).all()


def test_samples_follow_the_generator_alone():
    gaussian = LowRankGaussian(*moments(3))
    before = torch.random.get_rng_state()
    one, two, three = (gaussian.sample(5, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top", [0.5, 4.0])
def test_distance_zero_is_the_exact_identity(dtype, shift, top, generator):
    """Also where the posterior is wider than the prior."""
    gaussian, prior = LowRankGaussian(*(t.to(dtype) for t in moments(3, top=top))), prior_for("all")
    draws = gaussian.sample(200, generator)
    moved = transported(gaussian, draws, prior, 0.0, shift)
    assert moved.dtype == dtype
    assert torch.equal(moved, draws)
    assert moved.data_ptr() != draws.data_ptr()
    assert log_z(gaussian, prior, 0.0) == [0.0]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("top", [0.5, 4.0])
def test_draws_move_continuously(top, shift, generator):
    """Towards d = 0 a move is proportional to d; on a finer grid of distances steps get as much smaller."""
    gaussian, prior = LowRankGaussian(*moments(3, top=top)), prior_for("two groups")
    draws = gaussian.sample(10, generator)
    speeds = [(transported(gaussian, draws, prior, d, shift) - draws) / d for d in (1e-5, 1e-6, 1e-7)]
    assert speeds[0].abs().max() > 0.01
    for speed in speeds[1:]:
        torch.testing.assert_close(speed, speeds[0], rtol=1e-3, atol=1e-4)
    coarse, fine = (
        max(float((a - b).norm()) for a, b in pairwise(transported(gaussian, draws, prior, d, shift) for d in grid))
        for grid in (np.linspace(0, 3, 31), np.linspace(0, 3, 301))
    )
    assert 0.05 < fine / coarse < 0.15


@pytest.mark.parametrize("case", CASES)
def test_log_z_starts_with_half_the_expected_squared_norm(case):
    mean, variance, factor = moments(3)
    prior = prior_for(case)
    c = prior.precision_drop(torch.tensor([1e-9], dtype=torch.float64))
    expected = 0.5 * (c[0][prior.group] * (mean**2 + variance + factor.square().sum(1))).sum()
    value = LowRankGaussian(mean, variance, factor).log_expectation(c, prior)
    torch.testing.assert_close(value, expected[None], rtol=1e-7, atol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("top", [0.5, 1.5, 30.0])
def test_directions_wider_than_the_prior_are_counted(rank, case, top):
    parts, prior = moments(rank, top=top), prior_for(case)
    sigma0, aware = prior.sigma0[prior.group].numpy(), (prior.factor[prior.group] > 0).numpy()
    scaled = (dense(*parts[1:]) / np.outer(sigma0, sigma0))[np.ix_(aware, aware)]
    assert LowRankGaussian(*parts).contracted(prior) == (np.linalg.eigvalsh(scaled) > 1).sum()


def test_as_wide_as_the_prior_is_not_wider():
    mean, variance = torch.zeros(4), 0.7**2 * torch.tensor([1.0, 1.0, 0.5, 1.5], dtype=torch.float64)
    factor = torch.tensor([[0.0], [0.0], [0.1], [0.0]])
    assert LowRankGaussian(mean, variance, factor).contracted(make_prior({"w": 4}, 0.7)) == 1
    assert LowRankGaussian(mean, variance, factor).contracted(make_prior({"a": 3, "b": 1}, 0.7, "a")) == 0


@pytest.mark.parametrize("level", [1 - 2.0**-26, 1.0, 1 + 2.0**-26])
@pytest.mark.parametrize(("column", "count"), [([0.0, 0.3], 0), ([0.1, 0.3], 1)])
def test_a_variance_on_the_brink_divides_by_no_zero(column, count, level, generator):
    variance = torch.tensor([level, 0.2], dtype=torch.float64)
    factor = torch.tensor([column, [0.0, 0.2]], dtype=torch.float64).T
    gaussian = LowRankGaussian(torch.ones(2), variance, factor)
    prior = make_prior({"w": 2}, 1.0)
    assert gaussian.contracted(prior) == count
    assert np.isfinite(log_z(gaussian, prior, 1.0, 1e9)).all()
    assert transported(gaussian, gaussian.sample(3, generator), prior, 1e9).isfinite().all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", RANKS)
def test_a_wide_covariance_is_shrunk_in_the_factors_alone(rank, case):
    """T Σ Tᵀ = (Σ'⁻¹ − C)⁻¹/α, μ_d = (I − Σ'C)⁻¹ μ and log Z of N(μ, Σ'), for Σ' = αΣ just inside the prior."""
    parts, prior = moments(rank, top=4.0), prior_for(case)
    covariance, mean = dense(*parts[1:]), parts[0].numpy()
    sigma0, aware = prior.sigma0[prior.group].numpy(), (prior.factor[prior.group] > 0).numpy()
    share = 1 / np.linalg.eigvalsh((covariance / np.outer(sigma0, sigma0))[np.ix_(aware, aware)]).max()
    assert share < 1
    shrunk = LowRankGaussian(parts[0], share * parts[1], share**0.5 * parts[2])
    assert shrunk.contracted(prior) == 0
    c = np.diag(drop(prior, 3.0)[prior.group].numpy())
    expected = np.linalg.inv(np.linalg.inv(share * covariance) - c)
    gaussian = LowRankGaussian(*parts)
    assert log_z(gaussian, prior, 3.0) == pytest.approx(log_z(shrunk, prior, 3.0), rel=1e-5)
    _, matrix = linear_map(gaussian, prior, 3.0)
    np.testing.assert_allclose(matrix @ covariance @ matrix.T, expected / share, rtol=1e-4, atol=1e-5)
    center, _ = linear_map(gaussian, prior, 3.0, shift=True)
    np.testing.assert_allclose(center, np.linalg.solve(np.eye(DIM) - share * covariance @ c, mean), rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("top", [0.9999, 1.0, 1.0 + 1e-9, 50.0])
@pytest.mark.parametrize("kind", ["diagonal", "shared", "both"])
def test_finite_and_monotone_at_any_distance(kind, top, case, generator):
    mean, variance, factor = moments(3)
    variance, factor = variance * (kind != "shared"), factor * (1e-9 if kind == "diagonal" else 1)
    prior = prior_for(case)
    sigma0, aware = prior.sigma0[prior.group], prior.factor[prior.group] > 0
    scaled = (dense(variance, factor) / torch.outer(sigma0, sigma0).numpy())[np.ix_(aware, aware)]
    scale = top / np.linalg.eigvalsh(scaled).max()
    gaussian = LowRankGaussian(mean, variance * scale, factor * scale**0.5)
    distances = [10.0**power for power in range(-6, 19)]
    z = np.array(log_z(gaussian, prior, *distances))
    assert np.isfinite(z).all()
    assert (np.diff(z) >= -1e-9 * z[1:]).all()
    assert z[-1] > 10 * z[6]
    draws = gaussian.sample(10, generator)
    for shift in (False, True):
        assert all(transported(gaussian, draws, prior, d, shift).isfinite().all() for d in distances)


@pytest.mark.parametrize("shared", [1e-9, 1e-3, 0.5])
@pytest.mark.parametrize("d", [10.0, 1e3, 1e12])
def test_digits_are_left_where_only_the_prior_speaks(d, shared):
    """One parameter, Σ = σ0², split between v and F: Z is that of a variance 2^-26 under σ0²."""
    one = torch.ones(1, dtype=torch.float64)
    gaussian = LowRankGaussian(one, (1 - shared) * one, shared**0.5 * one[:, None])
    expected = log_z(DiagonalGaussian(one, (1 - 2.0**-26) * one), make_prior({"w": 1}, 1.0), d)
    assert log_z(gaussian, make_prior({"w": 1}, 1.0), d) == pytest.approx(expected, rel=1e-6)


def test_the_envelope_is_reached_where_only_the_prior_speaks():
    """With Σ = σ0² I in a shared direction and in a parameter, both are stretched by k = (σ0 + d)/σ0."""
    sigma0, d = 0.5, 4.5
    factor = sigma0 * torch.tensor([[0.6], [0.8], [0.0], [0.0]], dtype=torch.float64)
    variance = torch.tensor([0.0, 0.0, sigma0**2, 1e-6 * sigma0**2], dtype=torch.float64)
    gaussian = LowRankGaussian(torch.zeros(4, dtype=torch.float64), variance, factor)
    _, matrix = linear_map(gaussian, make_prior({"w": 4}, sigma0), d)
    np.testing.assert_allclose(matrix @ [0.6, 0.8, 0, 0], [6, 8, 0, 0], rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(np.diag(matrix)[2:], [10, 1], rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("zeros", [[0], [1, 4, 7], list(range(DIM))])
def test_transport_of_a_singular_covariance(zeros, case):
    """(Σ⁻¹ − C)⁻¹ = (I − ΣC)⁻¹ Σ, which needs no inverse of Σ."""
    mean, variance, factor = moments(2)
    variance[zeros] = 0
    gaussian, prior, covariance = LowRankGaussian(mean, variance, factor), prior_for(case), dense(variance, factor)
    for d in (1e-3, 0.8, 20.0):
        left = np.eye(DIM) - covariance @ np.diag(drop(prior, d)[prior.group].numpy())
        center, matrix = linear_map(gaussian, prior, d, shift=True)
        np.testing.assert_allclose(center, np.linalg.solve(left, mean.numpy()), rtol=1e-8, atol=1e-11)
        _, matrix = linear_map(gaussian, prior, d)
        np.testing.assert_allclose(matrix @ covariance @ matrix.T, np.linalg.solve(left, covariance), atol=1e-8)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_without_variance_stay(dtype, shift, generator):
    mean, variance, factor = (t.to(dtype) for t in moments(3))
    variance[[1, 5]], factor[[1, 5]] = 0, 0
    gaussian = LowRankGaussian(mean, variance, factor)
    draws = gaussian.sample(30, generator)
    moved = transported(gaussian, draws, prior_for("all"), 2.0, shift)
    assert moved.isfinite().all()
    assert torch.equal(moved[:, [1, 5]], mean[[1, 5]].expand(30, 2))
    assert (moved[:, [0, 2]] != draws[:, [0, 2]]).all()


@pytest.mark.parametrize("tiny", [1e-30, 0.0])
def test_rounding_of_large_parameters_is_not_taken_for_noise(tiny, generator):
    """In float32 the last digit of a large parameter can be hundreds of its standard deviations."""
    mean, variance, factor = (t.float() for t in moments(2))
    mean[0], variance[0], factor[0] = 3.3, tiny, 1e-9
    gaussian, prior = LowRankGaussian(mean, variance, factor), prior_for("all")
    draws = gaussian.sample(50, generator)
    nudged = draws.clone()
    nudged[:, 0] = torch.nextafter(draws[:, 0], torch.tensor(torch.inf))
    change = transported(gaussian, nudged, prior, 1.0) - transported(gaussian, draws, prior, 1.0)
    spread = torch.tensor(dense(variance, factor)).diagonal().sqrt()
    assert (change / spread)[:, 1:].abs().max() < 0.01


def test_the_results_follow_the_draws_dtype(generator):
    parts, prior = moments(3), prior_for("subset")
    double, single = LowRankGaussian(*parts), LowRankGaussian(*(t.float() for t in parts))
    draws = single.sample(20, generator)
    assert draws.dtype == torch.float32
    assert double.sample(2, generator).dtype == torch.float64
    for shift in (False, True):
        moved = transported(single, draws, prior, 1.5, shift)
        assert moved.dtype == torch.float32
        exact = transported(double, draws.double(), prior, 1.5, shift)
        torch.testing.assert_close(moved, exact.float(), rtol=1e-5, atol=1e-5)
    value = single.log_expectation(drop(prior, 1.5)[None], prior)
    assert value.dtype == torch.float64
    assert value.tolist() == pytest.approx(log_z(double, prior, 1.5), rel=1e-6)


def test_draws_move_one_by_one(generator):
    gaussian, prior = LowRankGaussian(*moments(3)), prior_for("two groups")
    draws = gaussian.sample(7, generator)
    together = transported(gaussian, draws, prior, 1.2, True)
    alone = torch.cat([transported(gaussian, draw[None], prior, 1.2, True) for draw in draws.flip(0)])
    torch.testing.assert_close(alone.flip(0), together, rtol=1e-12, atol=1e-13)


def test_priors_are_told_apart():
    """What is remembered for one prior is not used for another."""
    parts = moments(3, top=4.0)
    gaussian, priors = LowRankGaussian(*parts), [make_prior({"w": DIM}, s) for s in (1.0, 3.0, 1.0)]
    values = [log_z(gaussian, prior, 0.7) for prior in priors]
    assert values == [log_z(LowRankGaussian(*parts), prior, 0.7) for prior in priors]
    assert values[0] == values[2]


@pytest.mark.parametrize(
    ("variance", "factor", "message"),
    [
        (torch.ones(3), torch.ones(4, 2), r"`variance` of shape \(4,\).*got \(3,\)"),
        (torch.ones(4, 1), torch.ones(4, 2), r"`variance` of shape \(4,\).*got \(4, 1\)"),
        (torch.ones(4), torch.ones(2, 4), r"`factor` of shape \(4, K\).*got \(2, 4\); transpose"),
        (torch.ones(4), torch.ones(4), r"`factor` of shape \(4, K\).*got \(4,\)"),
        (torch.ones(4), torch.ones(4, 0), "at least one column"),
        (-torch.ones(4), torch.ones(4, 2), "variances >= 0"),
        (torch.full((4,), torch.nan), torch.ones(4, 2), "finite variances"),
        (torch.ones(4), torch.full((4, 2), torch.inf), "finite `factor`"),
    ],
)
def test_bad_moments_are_refused(variance, factor, message):
    with pytest.raises(ValueError, match=message):
        LowRankGaussian(torch.zeros(4), variance, factor)


def test_bad_means_are_refused():
    with pytest.raises(ValueError, match="mean"):
        LowRankGaussian(torch.full((2,), torch.nan), torch.ones(2), torch.ones(2, 1))


class Largest(TorchDispatchMode):
    """Number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return result


@pytest.mark.parametrize("top", [0.5, 2.0])
def test_many_parameters_need_no_square_matrix(top, generator):
    """P × P numbers would be 20 GB."""
    p, rank, n = 50_000, 20, 5
    factor = torch.randn(p, rank, generator=generator)
    factor = factor * (0.9 * top / torch.linalg.eigvalsh(factor.T @ factor)[-1]).sqrt()
    variance = 0.1 * top * torch.rand(p, generator=generator)
    gaussian = LowRankGaussian(torch.randn(p, generator=generator) / 100, variance, factor)
    prior = make_prior({"a": p // 2, "b": p - p // 2}, {"a": 1.0, "b": 1.1})
    with Largest() as largest:
        draws = gaussian.sample(n, generator)
        moved = transported(gaussian, draws, prior, 1.0, True)
        z = log_z(gaussian, prior, 0.1, 1.0)
        count = gaussian.contracted(prior)
    assert p * rank <= largest.entries <= p * rank + rank**2
    assert moved.isfinite().all()
    assert (moved - gaussian.mean).norm() > 1.01 * (draws - gaussian.mean).norm()
    assert 0 < z[0] < z[1]
    assert (count > 0) == (top > 1)
