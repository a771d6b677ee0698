"""What is kept of a unit for those who come later: logits and features of its network, scores of every row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from dapcal.experiments.cifar.bench import PhotoBench
from dapcal.experiments.images.measurement import Keep
from dapcal.experiments.images.methods import Answer
from dapcal.experiments.images.run import row_path
from dapcal.files import complete_or_absent


def keep_features(bench: PhotoBench, folder: Path | None) -> None:
    """Features (float16), logits (float32) and labels of held-out, test and OOD images, and of some training images."""
    path = None if folder is None else _seed(folder, bench.seed) / "features.npz"
    if path is None or path.exists():
        return
    readout, some = bench.readout, bench.task.learnt_kept
    seen = {
        "train": readout.train[0][:some], "held_out": readout.held_out[0], "test": readout.at(bench.test[0]),
        **{name: readout.at(x) for name, x in bench.outside.items()},
    }  # fmt: skip
    labels = {"train": bench.train[1][:some], "held_out": bench.held_out[1], "test": bench.test[1]}
    arrays = {f"features of {name}": _array(z, np.float16) for name, z in seen.items()}
    arrays |= {f"logits of {name}": _array(readout.network(z).detach(), np.float32) for name, z in seen.items()}
    _write(path, arrays | {f"labels of {name}": _array(y, np.int64) for name, y in labels.items()})


def keep_scores(folder: Path | None, seed: int, row: str, score: str) -> Keep:
    """Takes what a row said, and keeps its main score (float32) of every image."""
    return (lambda _: None) if folder is None else partial(_keep, row_path(_seed(folder, seed), row), score)


def _keep(path: Path, score: str, answers: dict[str, Answer]) -> None:
    _write(path.with_suffix(".npz"), {name: _array(one.scores[score], np.float32) for name, one in answers.items()})


def _seed(folder: Path, seed: int) -> Path:
    found = folder / f"seed-{seed}"
    found.mkdir(parents=True, exist_ok=True)
    return found


def _array(values: Tensor, kind: type) -> np.ndarray:
    return values.detach().cpu().numpy().astype(kind)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with complete_or_absent(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
