"""Wide points as few numbers: a bound on distances, proven by every pair of points, and the same answers as without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dapcal.distances import principal as module
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.principal import LEAST_QUERIES, WORTH_BUILDING, Principal, principal
from dapcal.distances.products import GROUP, Products

MEMORY = 2**28


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    """So that it pays among few points, which are compared with brute force in no time."""
    monkeypatch.setattr(module, "_DIRECTLY", 16)


def features(count: int, seed: int, width: int = 160, dtype: torch.dtype = torch.float32, off: float = 0.0):
    """Points that vary in six directions, and a little in all."""
    fixed, generator = torch.Generator().manual_seed(9), torch.Generator().manual_seed(seed)
    ways = torch.randn(6, width, generator=fixed, dtype=torch.float64)
    inside = torch.randn(count, 6, generator=generator, dtype=torch.float64) @ ways
    rest = 0.05 * torch.randn(count, width, generator=generator, dtype=torch.float64)
    return (inside + rest + off).to(dtype)


def without(points: torch.Tensor) -> TorchIndex:
    index = TorchIndex(points)
    index.__dict__["_principal"] = None
    return index


def directly(train: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    return torch.stack([(train - query).norm(dim=1) for query in queries])


def test_few_numbers_keep_lengths_and_bound_distances():
    train, queries = features(2100, 0, dtype=torch.float64), features(50, 1, dtype=torch.float64)
    found = principal(train, MEMORY)
    few = found.products.points
    torch.testing.assert_close(found.directions.T @ found.directions, torch.eye(few.shape[1] - 1, dtype=few.dtype))
    lengths = torch.cat([few[:, :-1], few[:, -1:] + found.rest], 1).norm(dim=1)
    torch.testing.assert_close(lengths, (train - found.center).norm(dim=1))
    asked = found._few(queries)
    bound, distances = torch.cdist(asked, few), torch.cdist(queries, train)
    assert (bound <= distances * (1 + 1e-9)).all()
    assert (bound.amin(1) > 0.5 * distances.amin(1)).all()  # and it says something


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("off", [0.0, 300.0])
def test_no_point_that_is_as_near_is_beyond_reach(dtype, off):
    train, queries = features(2101, 0, dtype=dtype, off=off), features(300, 1, dtype=dtype, off=off)
    queries[:50] = train[:50]
    found = principal(train, MEMORY)
    tiles = list(found.products.tiles(found._few(queries)))
    assert [row for tile in tiles for row in range(300)[tile.rows]] == list(range(300))
    minima, squares = torch.cat([tile.minima for tile in tiles], 1), torch.cat([tile.squares for tile in tiles])
    distances = directly(train, queries)
    for rank in (0, 3, 20):
        limit = distances.sort(1).values[:, rank]
        reach = found._reach(squares, limit**2)
        is_near = minima <= found.products.within_reach(squares, reach) - squares
        row, place = (distances <= limit[:, None]).nonzero().unbind(1)
        assert is_near[place // GROUP, row].all()
        every = torch.arange(300).repeat_interleave(len(found.grouped)), torch.arange(len(found.grouped)).repeat(300)
        kept = set(zip(*(part.tolist() for part in found._as_near(found._few(queries), *every, reach)), strict=True))
        assert set(zip(row.tolist(), place.tolist(), strict=True)) <= kept


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["features", "twice", "far off", "one outlier", "other queries"])
def test_answers_are_those_of_all_distances_to_the_last_bit(kind, dtype, k):
    off = 1e3 if kind == "far off" else 0.0
    train, queries = features(2101, 0, dtype=dtype, off=off), features(256, 1, dtype=dtype, off=off)
    if kind == "twice":
        train[1000:2000], queries[:100] = train[:1000].clone(), train[:100]
    if kind == "one outlier":
        train[7] *= 1e6
    if kind == "other queries":
        queries = 3 * torch.randn(256, train.shape[1], dtype=dtype, generator=torch.Generator().manual_seed(2))
    index = TorchIndex(train)
    index.__dict__["_asked"] = [WORTH_BUILDING]
    assert isinstance(index._principal, Principal) or kind == "one outlier"
    values, places = directly(train, queries).sort(dim=1, stable=True)
    distances, indices = index.query(queries, k)
    assert torch.equal(distances, values[:, :k])
    assert torch.equal(indices, places[:, :k])


def test_most_queries_need_no_other_product(monkeypatch):
    train, queries = features(2100, 0), features(WORTH_BUILDING, 1)
    index = TorchIndex(train)
    index.query(queries)
    asked = []
    candidates = type(index._products).candidates
    monkeypatch.setattr(
        type(index._products), "candidates", lambda *given: asked.append(len(given[1])) or candidates(*given)
    )
    index.query(queries)
    assert sum(asked) <= WORTH_BUILDING // 20
    without(train).query(queries)
    assert sum(asked) >= WORTH_BUILDING


def test_a_few_queries_use_it_when_it_is_worth_having_been_made():
    train, queries = features(2100, 0), features(WORTH_BUILDING, 1)
    index, values = TorchIndex(train), directly(train, queries).amin(1)
    index.__dict__["_array"] = None  # as where faiss is not installed
    for start in range(0, WORTH_BUILDING, LEAST_QUERIES):
        assert "_principal" not in index.__dict__
        asked = slice(start, start + LEAST_QUERIES)
        assert torch.equal(index.query(queries[asked])[0][:, 0], values[asked])
    assert isinstance(index.__dict__["_principal"], Principal)


def test_in_little_memory_answers_are_the_same():
    train, queries = features(2100, 0), features(300, 1)
    found = principal(train, MEMORY)
    little = replace(found, products=Products(found.products.points, 2**16))
    assert len(list(little.products.tiles(little._few(queries)))) > 10
    limit = TorchIndex(train)._limit
    for one, other in zip(
        found.nearest(train, queries, 3, limit, MEMORY), little.nearest(train, queries, 3, limit, 2**16), strict=True
    ):
        assert torch.equal(one, other)


def test_queries_that_are_no_numbers_change_no_others(monkeypatch):
    monkeypatch.setattr("dapcal.distances.neighbors.WORTH_BUILDING", 1)
    train, queries = features(2100, 0), features(300, 1)
    clean = TorchIndex(train).query(queries, 3)
    queries[5], queries[17, 3], queries[30] = torch.nan, torch.inf, 3e38
    found = TorchIndex(train).query(queries, 3)
    rest = torch.tensor([row for row in range(300) if row not in (5, 17, 30)])
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[rest], other[rest])
    plain = without(train).query(queries, 3)
    assert torch.equal(found[0].nan_to_num(-1), plain[0].nan_to_num(-1))


@pytest.mark.parametrize(
    "points",
    [
        torch.randn(2100, 160, generator=torch.Generator().manual_seed(0)),  # in all directions alike
        features(1000, 0),  # few
        features(2100, 0, width=40),  # not wide
        features(2100, 0).index_fill(0, torch.tensor([0]), torch.inf),
    ],
    ids=["round", "few", "narrow", "endless"],
)
def test_not_where_it_saves_nothing(points):
    assert principal(points, MEMORY) is None


def test_not_where_looking_at_candidates_costs_more(monkeypatch):
    points = features(2100, 0)
    assert principal(points, MEMORY) is not None
    monkeypatch.setattr(module, "_DIRECTLY", 1024)
    assert principal(points, MEMORY) is None


def test_not_where_its_copy_takes_too_much_memory():
    points = features(2100, 0)
    assert principal(points, MEMORY) is not None
    assert principal(points, 2**18) is None


def test_the_same_every_time():
    points = features(2100, 0)
    state = torch.get_rng_state()
    one, other = principal(points, MEMORY), principal(points, MEMORY)
    assert torch.equal(one.directions, other.directions)
    assert torch.equal(torch.get_rng_state(), state)
