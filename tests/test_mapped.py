"""Rows in files: the tensor that they end as, what is made of it, and what is left behind."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from dapcal import mapped
from dapcal.mapped import Rows, finite_rows, in_blocks, is_mapped, joined, largest_like, rows_like, taken


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    monkeypatch.setattr(mapped, "IN_MEMORY", 100)
    monkeypatch.setattr(mapped, "BLOCK", 7)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool], ids=str
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("largest", [0, 50, 10**9])
def test_batches_end_as_what_they_are_side_by_side(generator, dtype, dim, largest):
    sizes = (4, 1, 6, 3)
    batches = [torch.randn(*((3, n) if dim else (n, 3)), 2, generator=generator).mul(5).to(dtype) for n in sizes]
    rows = Rows(dim, largest)
    for batch in batches:
        rows.append(batch)
    assert (rows.count, len(rows)) == (14, 4)
    assert torch.equal(rows.joined, torch.cat(batches, dim))
    assert all(map(torch.equal, rows.batches, batches))
    assert is_mapped(rows.joined) == (largest < 10**9)


def test_batches_of_several_lengths_come_back_one_by_one(generator):
    batches = [torch.randn(5, length, generator=generator) for length in (9, 4, 9)]
    rows = Rows(largest=0)
    for batch in batches:
        rows.append(batch)
    assert all(map(torch.equal, rows.batches, batches))
    with pytest.raises(ValueError, match=r"one shape, got \(9,\) and others"):
        _ = rows.joined


def test_no_file_has_a_name(tmp_path):
    rows = Rows(largest=0)
    rows.append(torch.ones(50, 2))
    assert not list(tmp_path.iterdir())
    assert is_mapped(rows.joined)
    assert not list(tmp_path.iterdir())


def test_later_batches_change_nothing_that_was_given():
    given = torch.ones(50, 2)
    found = joined([given, given + 1])
    given.zero_()
    assert found.sum() == 300


def test_batches_that_cannot_be_rows_are_refused():
    rows = Rows(largest=0)
    rows.append(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"one dtype, got torch\.float32 and torch\.int64"):
        rows.append(torch.ones(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"batches of rows \(n, ...\), got shape \(\)"):
        rows.append(torch.tensor(1.0))


def test_a_full_disk_is_named_with_a_remedy(monkeypatch, tmp_path):
    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped, "scratch", Full)
    with pytest.raises(OSError, match=rf"room for more than 0\.0 GB of rows in {tmp_path}.* set TMPDIR"):
        joined([torch.ones(50, 2)])


def test_a_disk_without_room_for_what_is_expected_is_told_before_it_is_full(tmp_path):
    rows = Rows(largest=0, expected=10**15)
    with pytest.raises(OSError, match=rf"room for 8000000\.0 GB of rows in {tmp_path}"):
        rows.append(torch.ones(50, 2))


def test_other_trouble_with_a_file_is_told_as_it_is(monkeypatch):
    class Broken:
        def write(self, _):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(mapped, "scratch", Broken)
    with pytest.raises(OSError, match="Input/output error"):
        joined([torch.ones(50, 2)])


def test_what_is_made_of_a_mapped_tensor_is_mapped(generator):
    x = torch.randn(60, 4, generator=generator)
    own = joined(x.split(11))
    index = torch.randperm(60, generator=generator)[:40]
    assert is_mapped(own)
    assert torch.equal(in_blocks(lambda block: 2 * block, own), 2 * x)
    assert torch.equal(taken(own, index), x[index])
    assert is_mapped(in_blocks(lambda block: 2 * block, own))
    assert is_mapped(taken(own, index))
    assert is_mapped(own[3:9])
    assert not is_mapped(in_blocks(lambda block: 2 * block, x))
    assert not is_mapped(taken(x, index))
    assert largest_like(x) == rows_like(x).largest == float("inf")
    assert largest_like(x, own) == rows_like(own).largest == 100


def test_blocks_along_another_dimension(generator):
    x = torch.randn(3, 60, 2, generator=generator)
    rows = Rows(1, 0)
    rows.append(x)
    assert torch.equal(in_blocks(lambda block: block.sum(0), rows.joined, dim=1), x.sum(0))


def test_finite_rows_are_those_without_nan_or_inf():
    x = torch.zeros(20, 2, 3)
    x[4, 1, 2], x[19, 0, 0] = torch.nan, torch.inf
    assert (~finite_rows(x)).nonzero().flatten().tolist() == [4, 19]
    assert finite_rows(torch.ones(5, 2, dtype=torch.long)).all()


def test_temporary_files_lie_where_the_system_says(monkeypatch, tmp_path):
    missing = tmp_path / "missing"
    monkeypatch.setattr("tempfile.tempdir", str(missing))
    with pytest.raises(FileNotFoundError, match=str(Path(missing).name)):
        joined([torch.ones(50, 2)])


@pytest.mark.parametrize("block", [3, 512])
def test_rows_are_finite_where_their_numbers_are_however_large_their_sums(monkeypatch, block):
    monkeypatch.setattr(mapped, "BLOCK", block)
    x = torch.randn(7, 4, 2)
    x[1], x[3, 2, 1], x[5, 0, 0], x[6, 1] = 3e38, torch.nan, torch.inf, torch.tensor([torch.inf, -torch.inf])
    assert mapped.finite_rows(x).tolist() == [True, True, True, False, True, False, False]
    assert mapped.finite_rows(x[:3]).all()
    assert mapped.finite_rows(torch.ones(4, 2, dtype=torch.long)).all()
    assert not len(mapped.finite_rows(x[:0]))


def test_what_was_freed_is_given_back_while_rows_go_to_a_file(monkeypatch):
    times: list[int] = []
    monkeypatch.setattr(mapped, "_GIVEN_BACK", 3000)
    monkeypatch.setattr(mapped, "give_back", lambda: times.append(rows.count))
    rows = Rows(largest=1000)
    for _ in range(10):
        rows.append(torch.zeros(250, 1))  # 1,000 bytes
    assert times == [1000, 2000]  # after 4,000 bytes each
    assert torch.equal(rows.joined, torch.zeros(2500, 1))
    monkeypatch.undo()
    mapped.give_back()
