"""Shards answer as one index does, to the last bit."""

from __future__ import annotations

import pytest
import torch

from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.shards import ShardedIndex, merged


def sharded(train: torch.Tensor, sizes: tuple[int, ...]) -> ShardedIndex:
    return ShardedIndex(tuple(map(TorchIndex, train.split(sizes))), sizes)


@pytest.mark.parametrize("sizes", [(60,), (1, 59), (20, 20, 20), (3, 50, 7)])
@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("decimals", [0, 5])  # rounded to whole numbers many are equally near
def test_as_one_index(generator, sizes, k, decimals):
    train = torch.randn(60, 3, generator=generator).round(decimals=decimals)
    queries = torch.randn(40, 3, generator=generator).round(decimals=decimals)
    expected, found = TorchIndex(train).query(queries, k), sharded(train, sizes).query(queries, k)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_answers_are_merged_one_at_a_time(generator):
    train, queries = torch.randn(30, 3, generator=generator), torch.randn(5, 3, generator=generator)
    answers = (TorchIndex(part).query(queries, 2) for part in train.split(10))
    found = merged(answers, [10, 10, 10], 2)
    assert all(map(torch.equal, found, TorchIndex(train).query(queries, 2)))


def test_shards_of_shards(generator):
    train, queries = torch.randn(30, 3, generator=generator), torch.randn(5, 3, generator=generator)
    inner = sharded(train[:20], (5, 15))
    found = ShardedIndex((inner, TorchIndex(train[20:])), (20, 10)).query(queries, 4)
    assert all(map(torch.equal, found, TorchIndex(train).query(queries, 4)))


@pytest.mark.parametrize("sizes", [(), (5,), (5, 0)])
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match="at least one shard and the number of points of each"):
        ShardedIndex((TorchIndex(torch.zeros(5, 1)),) * (0 if not sizes else 2), sizes)


@pytest.mark.parametrize("k", [0, 11])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=rf"`k` between 1 and 10 \(training inputs\), got {k}"):
        sharded(torch.zeros(10, 2), (4, 6)).query(torch.zeros(1, 2), k)
