"""Data at the door: what is taken, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dapcal.data import Labelled, batch_count, check_inputs, gather, in_memory, shuffled, size, split

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Pairs(Dataset):
    """Pairs of a tensor and a Python number, as image sets give."""

    def __init__(self, n: int = 6, item: object = None) -> None:
        self.n, self.item = n, item

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> object:
        return (X[row], int(Y[row])) if self.item is None else self.item


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        Labelled(X, Y),
        TensorDataset(X, Y),
        Pairs(),
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(Pairs(), batch_size=1),
    ],
)
def test_every_kind_of_data_gives_the_same_tensors(data):
    found = gather(data, "train")
    assert isinstance(found, Labelled)
    assert torch.equal(found.x, X)
    assert torch.equal(found.y, Y)


def test_a_large_dataset_is_gathered_whole():
    x = torch.randn(2500, 3)
    found = gather(TensorDataset(x, x[:, 0]), "train")
    assert torch.equal(found.x, x)
    assert torch.equal(found.y, x[:, 0])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (X, TypeError, "a Dataset or a DataLoader, got Tensor"),
        ({"x": X}, TypeError, "`held_out`.*got dict"),
        (None, TypeError, "got NoneType"),
        ((X,), TypeError, r"pair of tensors .* got tuple of \['Tensor'\]"),
        ((X, Y, Y), TypeError, "pair of tensors"),
        ((X.numpy(), Y.numpy()), TypeError, r"got tuple of \['ndarray', 'ndarray'\]; use torch.as_tensor on each"),
        (
            list(zip(X, Y, strict=True)),
            TypeError,
            r"got list of \['tuple'.*'tuple', \.\.\.\] \(6\); .*, so wrap it in a Data",
        ),
        (list(zip(X, Y, strict=True))[:2], TypeError, "wrap it in a DataLoader"),
        (DataLoader([(X[0], 0, 0, 0, 0)], collate_fn=lambda rows: rows[0]), TypeError, r"'int', \.\.\.\] \(5\)"),
        (DataLoader([(X[0].numpy(), 0)] * 3, collate_fn=list), TypeError, r"to yield \(inputs, targets\)"),
        (DataLoader([X[:2].numpy()], collate_fn=lambda rows: (rows[0], rows[0])), TypeError, "use torch.as_tensor"),
        ((X, Y[:4]), ValueError, "6 inputs and 4 targets"),
        (TensorDataset(X), TypeError, r"to yield \(inputs, targets\), got list of \['Tensor'\]"),
        (Pairs(item={"x": 1.0, "y": 0}), TypeError, r"to yield \(inputs, targets\), got dict"),
        (Pairs(item=(X[0], 0, 0)), TypeError, r"to yield \(inputs, targets\)"),
        (DataLoader(Pairs(0)), ValueError, "at least one input in `held_out`, got none"),
        ((X[:0], Y[:0]), ValueError, "at least one input in `held_out`, got none"),
        ((X[:, 0], Y), ValueError, r"got shape \(6,\); a single column is x\[:, None\]"),
        ((X / torch.tensor([1.0, 0.0]), Y), ValueError, "NaN or inf in 6 of 6 rows"),
        ((X, torch.tensor(1.0)), ValueError, "as many targets as inputs"),
    ],
)
def test_bad_data_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        gather(data, "held_out")


def test_the_first_bad_row_is_named():
    x = X.clone()
    x[2, 1], x[4, 0] = torch.nan, -torch.inf
    with pytest.raises(ValueError, match=r"2 of 6 rows \(the first is row 2\)"):
        check_inputs(x, "x")


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[1.0, 2.0]], TypeError, "`x` as a tensor, got list; use torch.as_tensor"),
        (torch.zeros(3, 3), ValueError, r"inputs of shape \(2,\) as in training, got \(3,\)"),
        (torch.zeros(3, 2, 1), ValueError, r"as in training, got \(2, 1\)"),
        (torch.zeros(3, 2, dtype=torch.float64), ValueError, "float32 as in training, got torch.float64"),
        (torch.zeros(3, 2, dtype=torch.long), ValueError, "got torch.int64"),
        (torch.zeros(2), ValueError, r"a single input x\[None\]"),
    ],
)
def test_inputs_unlike_the_training_inputs_are_refused(x, error, message):
    with pytest.raises(error, match=message):
        check_inputs(x, "x", like=X)


@pytest.mark.parametrize("x", [X, torch.arange(6).reshape(3, 2), torch.zeros(1, 3, 4, 4)])
def test_good_inputs_come_back_as_they_are(x):
    assert check_inputs(x, "x", like=x[:1]) is x


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_halves_are_disjoint_and_complete(n, generator):
    first, second = split(n, generator)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(n))
    assert len(first) - len(second) in (0, 1)


def test_halves_are_random_and_seeded():
    halves = [split(100, torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(halves[0], halves[1])
    assert not torch.equal(halves[0].sort().values, halves[2].sort().values)
    assert not torch.equal(halves[0].sort().values, torch.arange(50))


@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 2]), (5, [6]), (6, [6]), (100, [6]), (1, [1] * 6)])
def test_minibatches_visit_every_row_once_in_the_given_order(batch_size, sizes):
    data = in_memory((X, Y), "train")
    order = torch.tensor([5, 0, 3, 1, 2, 4])
    batches = list(shuffled(data, order, batch_size))
    assert [len(x) for x, _ in batches] == sizes
    assert batch_count(data, batch_size) == len(sizes)
    rows = torch.cat([y for _, y in batches])
    assert rows.tolist() == order.tolist()
    assert torch.equal(torch.cat([x for x, _ in batches]), X[rows])
    rest = [y for _, y in shuffled(data, order, batch_size, done=1)]
    assert torch.equal(torch.cat([batches[0][1], *rest]), rows)


def test_a_loader_keeps_its_batches():
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    assert in_memory(loader, "train") is loader
    assert size(loader) == size(in_memory((X, Y), "train")) == 6
    assert batch_count(loader, 2) == 2


def test_subset():
    part = Labelled(X, Y).subset(torch.tensor([3, 1]))
    assert torch.equal(part.x, X[[3, 1]])
    assert part.y.tolist() == [3, 1]
