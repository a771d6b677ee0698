"""Predictions as columns, one row an input, written batch by batch to a CSV file or as arrays to an npz file."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dapcal.files import complete_or_absent
from dapcal.predictive import Prediction

Columns = dict[str, np.ndarray]
"""By name: one value an input (N,), or one for every class or target (N, K)."""

SUFFIXES = (".csv", ".npz")


def columns_of(prediction: Prediction, classes: Sequence[str], level: float, alpha: float) -> Columns:
    """What a prediction says of each input.

    `prediction`; `probability` of every class, or `lower` and `upper` of the interval that holds the target with
    probability `level`; `epistemic` and `aleatoric`, the two parts of the uncertainty (targets: standard deviations;
    classes: parts of 1 − Σ p²); `distance` from the training inputs; `ood_score`; `ood_p_value`; `ood`, whether that is
    at most `alpha`.

    Args:
        prediction: at N inputs.
        classes: their names; empty in regression.
        level: of the intervals.
        alpha: share of ordinary inputs that may be called out of distribution.
    """
    if classes:
        first = np.asarray(classes)[prediction.probs.argmax(-1).cpu().numpy()]
        own = {"probability": prediction.probs, "epistemic": prediction.epistemic, "aleatoric": prediction.aleatoric}
    else:
        first = prediction.mean.cpu().numpy()
        lower, upper = prediction.interval(level)
        own = {"lower": lower, "upper": upper}
        own |= {"epistemic": prediction.epistemic.sqrt(), "aleatoric": prediction.aleatoric.sqrt()}
    further: dict[str, Tensor] = {
        **own,
        "distance": prediction.distance,
        "ood_score": prediction.ood_score,
        "ood_p_value": prediction.ood_p_value,
        "ood": prediction.ood_p_value <= alpha,
    }
    return {"prediction": first, **{name: values.cpu().numpy() for name, values in further.items()}}


@contextmanager
def writer(path: Path, classes: Sequence[str]) -> Iterator[Callable[[Columns], None]]:
    """A function that appends rows to the file, which appears when all is well."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"Expected a {' or '.join(SUFFIXES)} file for the scores, got {path}")
    with complete_or_absent(path) as part:
        if path.suffix.lower() == ".csv":
            with part.open("w", encoding="utf-8", newline="") as text:
                yield _to_csv(csv.writer(text, lineterminator="\n"), classes)
        else:
            batches: list[Columns] = []
            yield batches.append
            joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
            _savez(part, joined | ({"classes": np.asarray(classes)} if classes else {}))


def _to_csv(rows: Any, classes: Sequence[str]) -> Callable[[Columns], None]:
    begun = False

    def write(columns: Columns) -> None:
        nonlocal begun
        flat = _flat(columns, classes)
        if not begun:
            rows.writerow(flat)
            begun = True
        rows.writerows(zip(*(_texts(values) for values in flat.values()), strict=True))

    return write


def _flat(columns: Columns, classes: Sequence[str]) -> Columns:
    """Matrices column by column: `probability_<class>`; of one target `lower`, of several `lower_0`, `lower_1`, …."""
    flat: Columns = {}
    for name, values in columns.items():
        if values.ndim == 1 or values.shape[1] == 1:
            flat[name] = values.reshape(len(values))
        else:
            labels = classes or range(values.shape[1])
            flat |= {f"{name}_{label}": column for label, column in zip(labels, values.T, strict=True)}
    return flat


def _texts(values: np.ndarray) -> list[str]:
    """The shortest texts that read back as the same numbers; true and false in small letters."""
    return [str(value).lower() if values.dtype == bool else str(value) for value in values]


def _savez(path: Path, arrays: Columns) -> None:
    """As numpy.savez, which knows no array named `file`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, values, allow_pickle=False)
