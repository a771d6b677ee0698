"""Tables of texts: a column of text, a column of labels, read whole or a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dapcal.models.model import Batch, Reading, Source
from dapcal.models.text_folder import Words

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 64  # texts at a time


def column_of_texts(path: Path, name: str) -> list[str]:
    """A column as it is written."""
    from dapcal.tables import stream

    _check(path, name)
    found: list[str] = []
    for batch in stream(path):
        found += _texts(batch, name, path, len(found) + 1)
    return found


def targets(path: Path, name: str, classes: Sequence[str]) -> Tensor:
    """Labels (N,): numbers of the classes, or where there are none, float32."""
    from dapcal.tables import stream

    _check(path, name)
    if not classes:
        values = [batch[name].to_numpy() for batch in stream(path, {name: "number"})]
        found = np.concatenate(values).astype(np.float32)
        if np.isnan(found).any():
            raise ValueError(f"{path}, row {int(np.isnan(found).argmax()) + 1}: column `{name}` has no value; drop it")
        return torch.from_numpy(found)
    labels = [label for batch in stream(path, {name: "category"}) for label in batch[name].to_pylist()]
    numbers = {label: number for number, label in enumerate(classes)}
    if not any(label in numbers for label in labels):
        numbers = {str(number): number for number in range(len(classes))}
    for row, label in enumerate(labels, 1):
        if label not in numbers:
            raise ValueError(
                f"{path}, row {row}: Expected one of the model's classes in column `{name}` "
                f"({', '.join(list(classes)[:8])}, or their numbers from 0), got {label!r}"
            )
    return torch.tensor([numbers[label] for label in labels])


def read(path: Path, reading: Reading, words: Words, text: str) -> Source:
    """The texts of a table, encoded, with the columns to keep beside them."""
    from dapcal.tables import stream
    from dapcal.tables.columns import listed
    from dapcal.tables.files import columns_of

    if given := reading.given("resize", "mean", "std"):
        raise ValueError(f"A model of texts takes no {given} (they are for images); leave them out")
    _check(path, text)
    for name in reading.keep:
        if name not in (columns := columns_of(path)):
            raise ValueError(f"There is no column `{name}` in {path} to --keep; there are: {listed(columns)}")
    cut = 0

    def batches() -> Iterator[Batch]:
        nonlocal cut
        done = 0
        for table in stream(path, rows=reading.batch_size or _BATCH):
            texts = _texts(table, text, path, done + 1)
            cut += words.cut(texts)
            kept = {name: np.asarray(table[name].to_pylist(), object) for name in reading.keep}
            yield Batch({"index": np.arange(done, done + len(texts)), **kept}, words(texts, str(path), done + 1))
            done += len(texts)

    def notes() -> list[str]:
        told = f"{cut:,} texts have more than {words.length} tokens, the most that calibration saw, and were cut"
        return [told] if cut else []

    return Source(batches(), "inputs", None, False, notes)


def _texts(table: pa.Table, name: str, path: Path, first_row: int) -> list[str]:
    found = table[name].to_pylist()
    for row, text in enumerate(found, first_row):
        if not isinstance(text, str):
            raise ValueError(f"{path}, row {row}: Expected a text in column `{name}`, got {text!r}; drop or mend it")
    return found


def _check(path: Path, name: str) -> None:
    from dapcal.tables.columns import listed, nearest
    from dapcal.tables.files import columns_of

    columns = columns_of(path)
    if name not in columns:
        near = nearest(name, columns)
        told = f"did you mean `{near}`?" if near else f"the columns are: {listed(columns)}"
        raise ValueError(f"{path} has no column `{name}`; {told}")
