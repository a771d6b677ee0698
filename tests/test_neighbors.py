"""Nearest neighbours against scikit-learn's trees in float64, which compute every distance directly.

Everything here holds with faiss and without it.
"""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch.utils._python_dispatch import TorchDispatchMode

from dapcal.distances import direct, faiss_search, multiplying, neighbors, principal, products
from dapcal.distances.neighbors import TorchIndex
from dapcal.moving import moved


@pytest.fixture(params=["faiss", "torch alone"], autouse=True)
def engine(request, monkeypatch):
    if request.param == "torch alone":
        monkeypatch.setattr(faiss_search, "library", lambda: None)
    return request.param


def oracle(train: torch.Tensor, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    tree = NearestNeighbors(n_neighbors=k, algorithm="kd_tree").fit(train.double().numpy())
    return tree.kneighbors(queries.double().numpy())


def assert_exact(train: torch.Tensor, queries: torch.Tensor, k: int, index: TorchIndex | None = None) -> None:
    """Right distances, and indices that have them (which of several equally near points comes first is open)."""
    distances, indices = (index or TorchIndex(train)).query(queries, k)
    expected, _ = oracle(train, queries, k)
    digits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[train.dtype]
    np.testing.assert_allclose(distances.double().numpy(), expected, rtol=digits, atol=1e-30)
    direct = (queries.double()[:, None] - train.double()[indices]).norm(dim=-1)
    np.testing.assert_allclose(direct.numpy(), expected, rtol=digits, atol=1e-30)
    assert all(len(set(row)) == k for row in indices.tolist())


def two_clusters(offset: float, dtype: torch.dtype = torch.float32, dimension: int = 4):
    generator = torch.Generator().manual_seed(1)
    train = torch.randn(300, dimension, generator=generator, dtype=dtype)
    train[:150] += offset
    train[150:] -= offset
    return train, train[::7] + 0.5 * torch.randn(43, dimension, generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dimension", [1, 2, 64])
@pytest.mark.parametrize("k", [1, 5, 120])
def test_random_points(generator, dtype, dimension, k):
    train = torch.randn(120, dimension, generator=generator, dtype=dtype)
    queries = torch.randn(30, dimension, generator=generator, dtype=dtype)
    assert_exact(train, queries, k)
    assert np.array_equal(TorchIndex(train).query(queries, k)[1].numpy(), oracle(train, queries, k)[1])


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize("offset", [1e2, 1e4, 1e6])
def test_clusters_far_from_the_origin_and_from_each_other(offset, k):
    train, queries = two_clusters(offset)
    assert_exact(train, queries, k)
    assert_exact(train[:150], queries[:20], k)


@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_far_clusters_in_float64(offset):
    assert_exact(*two_clusters(offset, torch.float64), k=3)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_points_have_distance_exactly_zero(generator, dtype, offset):
    train = offset + torch.randn(200, 50, generator=generator, dtype=dtype)
    distances, indices = TorchIndex(train).query(train, 1)
    assert torch.equal(distances, torch.zeros_like(distances))
    assert torch.equal(indices[:, 0], torch.arange(200))


@pytest.mark.parametrize("k", [1, 4, 30])
def test_many_duplicates(generator, k):
    points = torch.randn(10, 3, generator=generator)
    train = points.repeat(20, 1)  # more duplicates than candidates are kept
    queries = torch.cat([points, torch.randn(10, 3, generator=generator)])
    assert_exact(train, queries, k)
    assert TorchIndex(train).query(points, min(k, 20))[0].eq(0).all()


@pytest.mark.parametrize("k", [1, 6])
def test_lattice_with_ties(generator, k):
    train = torch.cartesian_prod(*[torch.arange(6.0)] * 3)[torch.randperm(216, generator=generator)]
    assert_exact(train, train[:50] + 0.5, k)


def test_all_points_the_same():
    distances, _ = TorchIndex(torch.ones(40, 2)).query(torch.tensor([[1.0, 1.0], [4.0, 5.0]]), 3)
    assert torch.equal(distances, torch.tensor([[0.0] * 3, [5.0] * 3]))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 100.0)])
def test_half_precision(generator, dtype, scale):
    train = (scale * torch.randn(200, 100, generator=generator)).to(dtype)
    queries = (scale * torch.randn(10, 100, generator=generator)).to(dtype)
    distances, _ = TorchIndex(train).query(queries, 1)
    np.testing.assert_allclose(distances.double().numpy(), oracle(train, queries, 1)[0], rtol=1e-2)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_matrix_products_of_any_precision(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert_exact(*two_clusters(10.0, dimension=32), k=2)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("memory", [1, 5000, 20_000, 200_000])
@pytest.mark.parametrize("k", [1, 7, 60])
def test_memory_changes_nothing(generator, memory, k):
    train, queries = torch.randn(60, 3, generator=generator), torch.randn(25, 3, generator=generator)
    expected = TorchIndex(train).query(queries, k)
    found = TorchIndex(train, memory).query(queries, k)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("memory", [2**16, 2**18])
def test_small_memory_makes_many_blocks_of_rows_and_columns(generator, monkeypatch, memory):
    """Points that fit into a quarter of the memory have their lengths beside them in the product."""
    train, queries = torch.randn(4000, 3, generator=generator), torch.randn(600, 3, generator=generator)
    index = TorchIndex(train, memory)
    blocks = []
    inner = products.multiplied
    monkeypatch.setattr(products, "multiplied", lambda *given: blocks.append(inner(*given)) or blocks[-1])
    assert_exact(train, queries, 5, index)
    assert len(blocks) >= 600 * 4000 * 8 / (memory / 4)
    assert max(block.numel() * 8 for block in blocks) <= memory / 4


@pytest.mark.parametrize("onednn", [True, False])
def test_the_same_neighbours_whoever_multiplies(generator, monkeypatch, onednn):
    train, queries = torch.randn(5003, 70, generator=generator), torch.randn(700, 70, generator=generator)
    if onednn and not multiplying.has_onednn():
        pytest.skip("this torch is without oneDNN")
    monkeypatch.setattr(multiplying, "has_onednn", lambda: onednn)
    for memory in (2**28, 2**20):  # with squared lengths inside of the product, and added to it
        assert_exact(train, queries, 5, TorchIndex(train, memory))


@pytest.mark.parametrize("k", [17, 60])
def test_many_neighbours_by_groups_are_those_by_single_points(generator, monkeypatch, k):
    train, queries = torch.randn(6000, 6, generator=generator), torch.randn(300, 6, generator=generator)
    by_groups = TorchIndex(train)
    assert by_groups._products._size(k) == products.GROUP
    found = by_groups.query(queries, k)
    monkeypatch.setattr(products, "_DIRECTLY", 0)
    by_points = TorchIndex(train)
    assert by_points._products._size(k) == 1
    assert all(torch.equal(*pair) for pair in zip(found, by_points.query(queries, k), strict=True))
    assert_exact(train, queries, k, by_groups)


def test_invariant_to_the_order_and_batches_of_queries(generator):
    train, queries = torch.randn(150, 5, generator=generator), torch.randn(64, 5, generator=generator)
    index = TorchIndex(train)
    distances, indices = index.query(queries, 4)
    order = torch.randperm(64, generator=generator)
    assert torch.equal(index.query(queries[order], 4)[0], distances[order])
    assert torch.equal(torch.cat([index.query(part, 4)[1] for part in queries.split(5)]), indices)
    assert torch.equal(torch.cat([index.query(part, 4)[0] for part in queries.split(5)]), distances)


def test_equivariant_to_the_order_of_training_points(generator):
    train, queries = torch.randn(150, 5, generator=generator), torch.randn(64, 5, generator=generator)
    order = torch.randperm(150, generator=generator)
    distances, indices = TorchIndex(train).query(queries, 4)
    shuffled, places = TorchIndex(train[order]).query(queries, 4)
    assert torch.equal(shuffled, distances)
    assert torch.equal(order[places], indices)


def test_queries_take_the_dtype_of_the_points(generator):
    train = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    assert TorchIndex(train).query(torch.zeros(3, 2), 1)[0].dtype == torch.float64
    assert TorchIndex(train.float()).query(torch.zeros(3, 2, dtype=torch.float64), 1)[0].dtype == torch.float32


@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=rf"`k` between 1 and 5 \(training inputs\), got {k}"):
        TorchIndex(torch.zeros(5, 2)).query(torch.zeros(1, 2), k)


@pytest.mark.parametrize("shape", [(3, 3), (2,), (1, 2, 1)])
def test_queries_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"Expected points \(N, 2\), got"):
        TorchIndex(torch.zeros(5, 2)).query(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(5,), (0, 2), (5, 2, 1)])
def test_training_points_of_a_wrong_shape(shape):
    with pytest.raises(ValueError, match=r"Expected training points \(T, P\), got shape"):
        TorchIndex(torch.zeros(shape))


def directly(train: torch.Tensor, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All distances, computed and sorted, ties by index."""
    exact = torch.stack([(query - train).norm(dim=1) for query in queries])
    values, order = exact.sort(dim=1, stable=True)
    return values[:, :k], order[:, :k]


def some_points(kind: str, generator: torch.Generator, dimension: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training points and queries, some of them training points."""
    train = torch.randn(1003, dimension, generator=generator)
    if kind == "duplicates":
        train = train[torch.randint(40, (1003,), generator=generator)]
    elif kind == "lattice":
        train = train.round()
    elif kind == "far away":
        train = train + 1000
    elif kind == "far clusters":
        train[500:] += 1e5
    return train, torch.cat([train[::50], train[::60] + 0.1 * torch.randn(17, dimension, generator=generator)])


@pytest.mark.parametrize("kind", ["random", "duplicates", "lattice", "far away", "far clusters"])
@pytest.mark.parametrize("dimension", [3, 40, 300])
@pytest.mark.parametrize("k", [1, 2, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_are_those_of_all_distances_to_the_last_bit(generator, kind, dimension, k, dtype):
    train, queries = (part.to(dtype) for part in some_points(kind, generator, dimension))
    index, expected = TorchIndex(train), directly(train, queries, k)
    assert all(map(torch.equal, index.query(queries, k), expected))
    for i, query in enumerate(queries):
        assert all(map(torch.equal, index.query(query[None], k), [part[i : i + 1] for part in expected]))


def test_a_few_queries_go_to_faiss_if_it_is_there(generator, engine, monkeypatch):
    calls = []
    inner = faiss_search.searched
    name = "dapcal.distances.neighbors.searched"
    monkeypatch.setattr(name, lambda points, queries, *a: calls.append(len(queries)) or inner(points, queries, *a))
    narrow, wide = torch.randn(500, 4, generator=generator), torch.randn(500, 300, generator=generator)
    TorchIndex(narrow).query(narrow[:2], 1)
    TorchIndex(narrow).query(narrow[:50], 1)
    TorchIndex(wide).query(wide[:50], 1)
    TorchIndex(wide.double()).query(wide[:50], 1)
    assert calls == ([2] if engine == "faiss" else [])


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_neighbours_much_nearer_than_lengths_need_no_comparison_with_all_points(generator, monkeypatch, far):
    """As features of images lie that differ in brightness most of all; one point lies far off."""
    along = 10 + 4 * torch.rand(3000, 1, generator=generator)
    train = along * torch.rand(84, generator=generator) + 0.1 * torch.randn(3000, 84, generator=generator)
    train[7] += far
    queries = train[::10] + 0.05 * torch.randn(300, 84, generator=generator)
    compared = []
    inner = TorchIndex._direct
    monkeypatch.setattr(TorchIndex, "_direct", lambda self, q, *rest: compared.append(len(q)) or inner(self, q, *rest))
    assert_exact(train, queries, 1)
    assert sum(compared) < 30


def test_faiss_keeps_its_number_of_threads(generator, engine):
    if engine == "faiss":
        before = faiss_search.library().omp_get_max_threads()
        TorchIndex(torch.randn(500, 4, generator=generator)).query(torch.zeros(1, 4), 1)
        assert faiss_search.library().omp_get_max_threads() == before


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda index: pickle.loads(pickle.dumps(index)),
        lambda index: moved(index, torch.device("cpu")),
    ],
)
def test_copies_hold_points_alone_and_answer_alike(generator, copied):
    train, queries = 100 + torch.randn(300, 5, generator=generator), 100 + torch.randn(40, 5, generator=generator)
    index = TorchIndex(train, 2**20)
    expected = index.query(queries, 3)  # fills what is kept between searches
    again = copied(index)
    assert set(vars(again)) == {"points", "memory"}
    assert all(map(torch.equal, again.query(queries, 3), expected))


def test_several_threads_at_once(generator):
    train, queries = torch.randn(700, 6, generator=generator), torch.randn(90, 6, generator=generator)
    expected, index = TorchIndex(train).query(queries, 2), TorchIndex(train)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: index.query(queries, 2), range(8)):
            assert all(map(torch.equal, found, expected))
        singles = list(pool.map(lambda query: index.query(query[None], 2)[1], queries))
    assert torch.equal(torch.cat(singles), expected[1])


class Steps(TorchDispatchMode):
    """Counts what a device would be told to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("k", [1, 5])
def test_a_device_without_small_caches_takes_few_steps_to_the_same_answer(monkeypatch, generator, k):
    points, queries = torch.randn(30_001, 96, generator=generator), torch.randn(300, 96, generator=generator)
    points[:, 40:] *= 0.05  # few directions, by which a CPU would search
    expected, steps = TorchIndex(points).query(queries, k), {}
    for pays in (True, False):
        for module in (direct, principal, products):
            monkeypatch.setattr(module, "small_steps_pay", lambda _, pays=pays: pays)
        monkeypatch.setattr(neighbors, "suits", lambda _: False)
        index = TorchIndex(points)
        index.query(queries, k)  # what is kept of the points
        with Steps() as counted:
            found = index.query(queries, k)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        steps[pays] = counted.count
    assert steps[False] < 0.2 * steps[True]
    assert steps[False] < 200
