"""What a summary of a table's model says of its columns."""

from __future__ import annotations

import torch

from dapcal.models import table_summary


def test_of_a_wide_table_the_columns_that_predictions_go_with_are_shuffled(monkeypatch):
    """Before: all were, each at the cost of all columns, so that time went with the square of their number."""
    monkeypatch.setattr(table_summary, "_MOST_COLUMNS", 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=generator)
    mean = x[:, [4]] - 0.5 * x[:, [1]]
    names = ["a", "b", "c", "d", "d", "e"]  # the fourth has two inputs
    assert table_summary._shuffled(names, x, mean) == ["b", "d"]
    assert table_summary._shuffled(names[:2], x[:, :2], mean) == ["a", "b"]
