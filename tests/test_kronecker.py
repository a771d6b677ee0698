"""Kronecker-factored Gaussians against their dense covariance; how J Σ_d Jᵀ is made up of directions, for all three."""

import numpy as np
import pytest
import torch

from cases import doubles
from dapcal.gaussians import Block, DiagonalGaussian, FullGaussian, KroneckerGaussian
from dapcal.prior import make_prior

SIZES = {"first": 6, "second": 6, "rest": 4}  # blocks of (2, 3) and (3, 2), and four parameters outside of them
P = 16
# σ0 and factor of the groups
CASES = {
    "all": (1.1, "*"),
    "one block": (1.1, "first"),
    "a block and what is outside": (1.1, "[sr]e*"),
    "outside alone": (1.1, "rest"),
    "several groups": ({"first": 1.1, "*": 1.4}, {"first": 1.0, "second": 2.0, "rest": 0.5}),
}
ONE_GROUP = [case for case in CASES if case != "several groups"]
DISTANCES = [1e-4, 0.3, 2.0, 50.0]


def prior_for(case):
    return make_prior(SIZES, *CASES[case])


def drop(case, d):
    """The diagonal of C, from its definition."""
    prior = prior_for(case)
    sigma0, factor = prior.sigma0[prior.group].numpy(), prior.factor[prior.group].numpy()
    return 1 / sigma0**2 - 1 / (sigma0 + factor * d) ** 2


def orthonormal(rng, n):
    return torch.tensor(np.linalg.qr(rng.normal(size=(n, n)))[0])


def kronecker(seed=0, low=0.05, high=0.9):
    """Two blocks whose parameters lie in no order, and four parameters of their own."""
    rng = np.random.default_rng(seed)
    mean, variance = torch.tensor(rng.normal(size=P)), torch.tensor(rng.uniform(low, high, P))
    blocks = tuple(
        Block(torch.tensor(rng.permutation(6) + start).reshape(shape), *(orthonormal(rng, n) for n in shape))
        for start, shape in ((0, (2, 3)), (6, (3, 2)))
    )
    return KroneckerGaussian(mean, variance, blocks)


def dense(gaussian):
    """Σ by an explicit Kronecker product of the bases."""
    rotation = np.eye(P)
    for block in gaussian.blocks:
        flat = block.index.flatten().numpy()
        rotation[np.ix_(flat, flat)] = np.kron(block.left.numpy(), block.right.numpy())
    return rotation @ np.diag(gaussian.variance.numpy()) @ rotation.T


def full_of(gaussian):
    return FullGaussian(gaussian.mean, torch.tensor(dense(gaussian)))


def correlated(seed=0):
    """A covariance that no block explains, well inside the priors above."""
    rng = np.random.default_rng(seed)
    basis = orthonormal(rng, P).numpy()
    return FullGaussian(torch.tensor(rng.normal(size=P)), torch.tensor(basis * rng.uniform(0.01, 0.8, P) @ basis.T))


def linear_map(gaussian, prior, d, shift):
    """Where the mean goes, and the matrix that deviations are multiplied by."""
    points = torch.cat([gaussian.mean[None], gaussian.mean + torch.eye(P, dtype=torch.float64)])
    moved = gaussian.transport(points, prior.precision_drop(doubles([d]))[0], prior, shift).numpy()
    return moved[0], (moved[1:] - moved[0]).T


def log_z(gaussian, prior, distances=DISTANCES):
    return gaussian.log_expectation(prior.precision_drop(doubles(distances)), prior)


def test_there_and_back():
    gaussian = kronecker()
    vectors = torch.randn(5, 3, P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(gaussian.rotated(gaussian.rotated(vectors), back=True), vectors)
    torch.testing.assert_close(gaussian.rotated(vectors).norm(dim=-1), vectors.norm(dim=-1))
    assert torch.equal(gaussian.rotated(vectors)[..., 12:], vectors[..., 12:])


def test_samples_have_the_moments():
    gaussian, n = kronecker(), 100_000
    draws = gaussian.sample(n, torch.Generator().manual_seed(0)).numpy()
    covariance = dense(gaussian)
    deviation = np.sqrt(np.diag(covariance))
    assert (np.abs(draws.mean(0) - gaussian.mean.numpy()) < 5 * deviation / np.sqrt(n)).all()
    # the standard error of a sample covariance is at most √2 σ_i σ_j/√n
    assert (np.abs(np.cov(draws.T) - covariance) < 5 * np.sqrt(2 / n) * np.outer(deviation, deviation)).all()


@pytest.mark.parametrize("case", CASES)
def test_log_z_is_that_of_the_dense_covariance(case):
    gaussian, prior = kronecker(), prior_for(case)
    torch.testing.assert_close(log_z(gaussian, prior), log_z(full_of(gaussian), prior), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_transport_is_that_of_the_dense_covariance(case, shift):
    gaussian, prior = kronecker(), prior_for(case)
    covariance = dense(gaussian)
    precision = np.linalg.inv(covariance)
    for d in DISTANCES[:3]:
        center, matrix = linear_map(gaussian, prior, d, shift)
        expected = np.linalg.inv(precision - np.diag(drop(case, d)))
        np.testing.assert_allclose(matrix @ covariance @ matrix.T, expected, rtol=1e-9, atol=1e-11)
        mean = gaussian.mean.numpy()
        np.testing.assert_allclose(center, expected @ precision @ mean if shift else mean, rtol=1e-9, atol=1e-11)
        other_center, other = linear_map(full_of(gaussian), prior, d, shift)
        np.testing.assert_allclose(matrix, other, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(center, other_center, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ONE_GROUP)
def test_directions_wider_than_the_prior_count_as_the_prior(case):
    gaussian, prior = kronecker(high=4.0), prior_for(case)
    full = full_of(gaussian)
    aware = prior.factor[prior.group] > 0
    assert gaussian.contracted(prior) == full.contracted(prior) == int((gaussian.variance > 1.1**2)[aware].sum()) > 0
    torch.testing.assert_close(log_z(gaussian, prior), log_z(full, prior), rtol=1e-8, atol=1e-9)
    for shift in (False, True):
        for one, two in zip(linear_map(gaussian, prior, 1.7, shift), linear_map(full, prior, 1.7, shift), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-8)


def test_distance_zero_changes_nothing():
    gaussian, prior = kronecker(high=4.0), prior_for("all")
    draws = gaussian.sample(50, torch.Generator().manual_seed(0))
    moved = gaussian.transport(draws, prior.precision_drop(doubles([0.0]))[0], prior, False)
    torch.testing.assert_close(moved, draws, rtol=1e-14, atol=1e-14)
    assert log_z(gaussian, prior, [0.0]).tolist() == [0.0]


def test_without_blocks_it_is_diagonal():
    mean, variance = kronecker().mean, kronecker().variance
    one, two = KroneckerGaussian(mean, variance, ()), DiagonalGaussian(mean, variance)
    assert torch.equal(one.sample(3, torch.Generator().manual_seed(0)), two.sample(3, torch.Generator().manual_seed(0)))
    assert torch.equal(log_z(one, prior_for("several groups")), log_z(two, prior_for("several groups")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_keep_the_dtype(dtype):
    exact = kronecker()
    gaussian = KroneckerGaussian(exact.mean.to(dtype), exact.variance.to(dtype), exact.blocks)
    draws, prior = gaussian.sample(4, torch.Generator().manual_seed(0)), prior_for("all")
    moved = gaussian.transport(draws, prior.precision_drop(doubles([1.0]))[0], prior, True)
    assert draws.dtype == moved.dtype == dtype
    expected = exact.transport(draws.double(), prior.precision_drop(doubles([1.0]))[0], prior, True)
    torch.testing.assert_close(moved.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-5)


# What is refused.


@pytest.mark.parametrize("what", ["contracted", "log_expectation", "transport", "directions"])
def test_groups_that_cut_a_block_are_refused(what):
    gaussian = kronecker()
    cut = make_prior({"left": 3, "right": P - 3}, 1.0, {"left": 1.0, "right": 2.0})
    c = cut.precision_drop(doubles([1.0]))
    call = {
        "contracted": lambda: gaussian.contracted(cut),
        "log_expectation": lambda: gaussian.log_expectation(c, cut),
        "transport": lambda: gaussian.transport(gaussian.mean[None], c[0], cut, False),
        "directions": lambda: gaussian.directions(cut, 0),
    }[what]
    with pytest.raises(ValueError, match=r"'left', 'right'.*fit the posterior with that prior, or give the layer one"):
        call()


def test_overlapping_blocks_are_refused():
    block = kronecker().blocks[0]
    with pytest.raises(ValueError, match="in two of them"):
        KroneckerGaussian(torch.zeros(P), torch.ones(P), (block, block))


@pytest.mark.parametrize(("left", "right"), [(3, 3), (2, 2)])
def test_bases_of_other_shapes_are_refused(left, right):
    block = Block(torch.arange(6).reshape(2, 3), torch.eye(left), torch.eye(right))
    with pytest.raises(ValueError, match=r"bases of shapes \(2, 2\) and \(3, 3\) for block 0"):
        KroneckerGaussian(torch.zeros(P), torch.ones(P), (block,))


@pytest.mark.parametrize("mean", [torch.zeros(2, 3), torch.tensor([0.0, torch.nan])])
def test_bad_means_are_refused(mean):
    with pytest.raises(ValueError, match="mean"):
        KroneckerGaussian(mean, torch.ones(2), ())


@pytest.mark.parametrize("variance", [torch.ones(3), torch.tensor([1.0, -1.0]), torch.tensor([1.0, torch.inf])])
def test_bad_variances_are_refused(variance):
    with pytest.raises(ValueError, match="variance"):
        KroneckerGaussian(torch.zeros(2), variance, ())


# The variance of J θ, by directions.

GAUSSIANS = {
    "diagonal": lambda: DiagonalGaussian(kronecker().mean, kronecker().variance),
    "kronecker": kronecker,
    "full": correlated,
}


def covariance_of(gaussian):
    if isinstance(gaussian, FullGaussian):
        return gaussian.covariance.numpy()
    return np.diag(gaussian.variance.numpy()) if isinstance(gaussian, DiagonalGaussian) else dense(gaussian)


def jacobian(seed=1):
    return torch.randn(4, 3, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def through_directions(gaussian, prior, d):
    """diag(J Σ Jᵀ) and what every direction of every group adds to it at distance d, (4, 3)."""
    total = gaussian.variance_of(jacobian())
    c = prior.precision_drop(doubles([d]))[0]
    for group in torch.nonzero(prior.factor > 0).flatten().tolist():
        directions = gaussian.directions(prior, group)
        cut = c[group] * directions.variance.clamp_max(prior.sigma0[group] ** 2)
        total = total + directions.energy(jacobian()) @ (cut / (1 - cut))
    return total


@pytest.mark.parametrize("kind", GAUSSIANS)
def test_variance_of_is_brute_force(kind):
    gaussian = GAUSSIANS[kind]()
    expected = np.einsum("nlp,pq,nlq->nl", jacobian().numpy(), covariance_of(gaussian), jacobian().numpy())
    np.testing.assert_allclose(gaussian.variance_of(jacobian()), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind in GAUSSIANS for case in (ONE_GROUP if kind == "full" else CASES)]
)
def test_directions_give_the_distance_aware_variance(kind, case):
    """diag(J (Σ⁻¹ − C)⁻¹ Jᵀ), also where only some parameters are distance-aware."""
    gaussian, prior = GAUSSIANS[kind](), prior_for(case)
    precision = np.linalg.inv(covariance_of(gaussian))
    for d in DISTANCES:
        moved = np.linalg.inv(precision - np.diag(drop(case, d)))
        expected = np.einsum("nlp,pq,nlq->nl", jacobian().numpy(), moved, jacobian().numpy())
        np.testing.assert_allclose(through_directions(gaussian, prior, d), expected, rtol=1e-8)


@pytest.mark.parametrize("case", ONE_GROUP)
def test_directions_of_a_singular_covariance(case):
    """(Σ⁻¹ − C)⁻¹ = (I − ΣC)⁻¹ Σ, which needs no inverse of Σ."""
    root = np.random.default_rng(5).normal(size=(P, 5)) * 0.2
    gaussian = FullGaussian(torch.zeros(P, dtype=torch.float64), torch.tensor(root @ root.T))
    moved = np.linalg.solve(np.eye(P) - root @ root.T @ np.diag(drop(case, 0.8)), root @ root.T)
    expected = np.einsum("nlp,pq,nlq->nl", jacobian().numpy(), moved, jacobian().numpy())
    np.testing.assert_allclose(through_directions(gaussian, prior_for(case), 0.8), expected, rtol=1e-7)


@pytest.mark.parametrize("kind", GAUSSIANS)
@pytest.mark.parametrize("case", ONE_GROUP)
def test_energies_add_up(kind, case):
    """Over all directions to J Σ Jᵀ where every parameter is distance-aware, and never to more."""
    gaussian, prior = GAUSSIANS[kind](), prior_for(case)
    energy = gaussian.directions(prior, int(prior.factor.argmax())).energy(jacobian())
    assert (energy >= 0).all()
    total, whole = energy.sum(-1), gaussian.variance_of(jacobian())
    assert (total < whole * (1 + 1e-12)).all()
    if case == "all":
        torch.testing.assert_close(total, whole)


def test_patterns_with_one_scale_and_one_factor_are_one_group():
    one, two = prior_for("a block and what is outside"), make_prior(SIZES, 1.1, ["second", "rest"])
    torch.testing.assert_close(through_directions(correlated(), two, 0.7), through_directions(correlated(), one, 0.7))
    cut = make_prior({"weight": 4, "bias": 2, "rest": 10}, 1.1, ["weight", "bias", "rest"])
    assert torch.equal(log_z(kronecker(), cut), log_z(kronecker(), prior_for("all")))


def test_several_groups_of_a_full_covariance_have_no_directions():
    with pytest.raises(ValueError, match=r"one distance-aware group, got 3; use Transport\(drawn=True\)"):
        correlated().directions(prior_for("several groups"), 0)
