"""Tables of the UCI repository with the gap splits: a test set in the middle of one feature, one split per feature.

The lowest and the highest third by that feature are for training, the middle third is the test set (Foong et al., 2019,
arXiv:1906.11537). Ties make the published rows the only comparable ones (Antorán et al., 2020, arXiv:2006.08437).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapcal.experiments.datasets.files import verified

TABLES = ("boston", "concrete", "energy", "naval", "wine")


class Table(NamedTuple):
    """Features, a target, and the test rows of every gap split."""

    x: Tensor  # float64 (N, D)
    y: Tensor  # float64 (N,)
    columns: tuple[str, ...]  # names of the features
    target: str
    splits: tuple[Tensor, ...]  # rows of the test set whose gap is in column k, for k = 0, ..., D − 1


def uci(name: str) -> Table:
    """One of `TABLES`. Two features of naval, 8 and 11, are constant: the rows of those splits are arbitrary."""
    if name not in TABLES:
        raise ValueError(f"Expected `name` as one of {', '.join(TABLES)}, got {name!r}")
    path = verified(f"uci/{name}.csv")
    with path.open(encoding="utf-8") as file:
        *columns, target = file.readline().strip().split(",")
        values = torch.from_numpy(np.loadtxt(file, delimiter=",", ndmin=2))
    with np.load(verified("uci/gap_test_indices.npz")) as rows:
        splits = tuple(torch.from_numpy(rows[f"{name}_{k}"].astype(np.int64)) for k in range(len(columns)))
    return Table(values[:, :-1].contiguous(), values[:, -1].contiguous(), tuple(columns), target, splits)
