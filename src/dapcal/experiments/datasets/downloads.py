"""Downloads through torchvision, which knows where images live; what comes is verified like any other file.

Of MNIST and Fashion-MNIST it fetches the very files. The others come in another wrapping, so what counts is that every
pixel and label is the same; SVHN may fail that, since our test set was cropped anew. The tables come from no package.
"""

from __future__ import annotations

import importlib
import io
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from dapcal.files import complete_or_absent

_FETCHED: dict[str, tuple[str, dict[str, Any]]] = {  # files that torchvision leaves as they were, by how they begin
    "mnist/train": ("MNIST", {"train": True}),
    "mnist/t10k": ("MNIST", {"train": False}),
    "fashion_mnist/train": ("FashionMNIST", {"train": True}),
    "fashion_mnist/t10k": ("FashionMNIST", {"train": False}),
    "omniglot/images_evaluation.zip": ("Omniglot", {"background": False}),
}
_WRAPPED: dict[str, tuple[str, dict[str, Any], str]] = {  # data sets to write as parquet, with their label's column
    "cifar10/train.parquet": ("CIFAR10", {"train": True}, "label"),
    "cifar10/test.parquet": ("CIFAR10", {"train": False}, "label"),
    "cifar100/test.parquet": ("CIFAR100", {"train": False}, "fine_label"),
    "svhn/test.parquet": ("SVHN", {"split": "test"}, "label"),
}


def download(file: str, to: Path) -> None:
    """Fetch a data file and put it at `to`, complete or not at all."""
    beginning = file.split("-")[0]
    if file not in _WRAPPED and beginning not in _FETCHED:
        raise FileNotFoundError("no package downloads this file")
    datasets = _torchvision(file)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, complete_or_absent(to) as part:
        if file in _WRAPPED:
            kind, options, label = _WRAPPED[file]
            _write_parquet(getattr(datasets, kind)(folder, download=True, **options), label, part)
        else:
            kind, options = _FETCHED[beginning]
            getattr(datasets, kind)(folder, download=True, **options)
            shutil.copyfile(next(Path(folder).rglob(to.name), Path(folder) / to.name), part)


def _write_parquet(pairs: Iterable[tuple[Any, int]], label: str, path: Path) -> None:
    """Images and labels as PNG in the layout of the other parquet files."""
    import pyarrow
    from pyarrow import parquet

    images, labels = [], []
    for picture, y in pairs:
        raw = io.BytesIO()
        picture.save(raw, format="png")
        images.append({"bytes": raw.getvalue(), "path": None})
        labels.append(int(y))
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    parquet.write_table(pyarrow.table({"image": pyarrow.array(images, kind), label: labels}), path)


def _torchvision(file: str) -> ModuleType:
    try:
        return importlib.import_module("torchvision.datasets")
    except ImportError as error:
        raise ImportError(f"downloading {file} needs torchvision (pip install torchvision)") from error
