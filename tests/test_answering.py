"""Batches answered by several threads: the same results in the same order, errors and ends where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dapcal.models.answering import answered, in_order
from dapcal.models.model import Batch, Source
from dapcal.networks import evaluate


def test_results_come_in_order_whoever_is_done_first() -> None:
    turns = [threading.Event() for _ in range(2)]

    def slow(item: int) -> int:
        if item == 0:
            assert turns[1].wait(10)  # the first is done after the second
        turns[min(item, 1)].set()
        return item * item

    assert list(in_order(slow, range(20), 2)) == [item * item for item in range(20)]


def test_no_more_is_read_than_there_is_room_for() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            read.append(item)
            yield item

    results = in_order(lambda item: item, items(), 3)
    for expected in range(10):
        assert next(results) == expected
    assert len(read) <= 10 + 3 + 2 + 1  # those at work, those that are spare, and one at the door
    results.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("answer", "read"))]


@pytest.mark.parametrize("where", ["reading", "answering"])
def test_an_error_is_raised_after_the_results_before_it(where: str) -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        if where == "reading":
            raise ValueError("row 5 is wrong")
        yield 5

    def answer(item: int) -> int:
        if item == 5:
            raise ValueError("row 5 is wrong")
        return item

    results = in_order(answer, items(), 2)
    assert [next(results) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="row 5"):
        next(results)


class Doubling:
    """A model that says how many threads torch has."""

    def __init__(self, side_by_side: bool) -> None:
        self.side_by_side = side_by_side

    def columns(self, x: torch.Tensor, *, level: float, alpha: float) -> dict[str, torch.Tensor]:
        return {"x": 2 * x, "threads": torch.tensor(torch.get_num_threads()), "level": torch.tensor([level, alpha])}


@pytest.mark.parametrize(("side_by_side", "total", "threads"), [(False, 10**6, 4), (True, 10**6, 1), (True, 10, 4)])
def test_threads_are_shared_out_and_given_back(side_by_side: bool, total: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        source = Source(iter([Batch({}, torch.full((1,), i)) for i in range(9)]), "rows", total, True, list)
        found = list(answered(Doubling(side_by_side), source, level=0.8, alpha=0.1))  # type: ignore[arg-type]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert [int(columns["x"]) for _, columns in found] == [2 * i for i in range(9)]
    assert {int(columns["threads"]) for _, columns in found} == {threads}


def test_draws_run_in_several_threads_as_in_one() -> None:
    """Parameters of a draw stand in the module while it runs: no other thread may run with them."""
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)).eval()
    draws = {name: torch.randn(6, *p.shape) for name, p in model.named_parameters()}
    x = torch.randn(40, 8, 1, 8)
    expected = [evaluate(model, draws, {}, part) for part in x]
    found = list(in_order(lambda part: evaluate(model, draws, {}, part), x, 4))
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
