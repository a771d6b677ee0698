"""The data of the experiments: found, verified, decoded once, and handed over as tensors.

>>> sorted(DATASETS)
['cifar10', 'cifar100', 'fashion_mnist', 'mnist', 'omniglot', 'svhn']
"""

from collections.abc import Callable

from dapcal.experiments.datasets.images import (
    Images,
    as_floats,
    cifar10,
    cifar100,
    fashion_mnist,
    like_mnist,
    mnist,
    omniglot,
    svhn,
)
from dapcal.experiments.datasets.tables import TABLES, Table, uci

DATASETS: dict[str, Callable[[str], Images]] = {
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "omniglot": omniglot,
}
"""Images by name; each takes a split. Tables are `uci(name)` for a name in `TABLES`."""

__all__ = [
    "DATASETS",
    "TABLES",
    "Images",
    "Table",
    "as_floats",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "like_mnist",
    "mnist",
    "omniglot",
    "svhn",
    "uci",
]
