"""Conformal intervals beside MAPIE's, around the same point predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dapcal.experiments.performance import AS_FAST, Row
from dapcal.likelihoods import Conformal, Gaussian, scores_of
from performance.apart import peaks
from performance.turns import in_turns, shares

__all__ = ["rows"]

JUDGING, LEVEL = 10_000, 0.9


def rows(repeats: int, small: bool) -> list[Row]:
    count = 10_000 if small else 100_000
    ways = {name: prepare(name, count) for name in ("ours", "MAPIE")}
    first, second = (np.array(way()) for way in ways.values())
    name = f"intervals of {count:,} rows, residuals of {JUDGING:,}"
    note = f"ends differ by at most {np.abs(first - second).max():.1e}"
    seconds = in_turns(ways, repeats)
    memory = {way: peaks(repeats, prepare_alone, way, count) for way in ways}
    return [
        Row(name, "s", *_beside(seconds), AS_FAST, note=note, profile=shares(ways["ours"])),
        Row(f"memory of {name}", "MiB", *_beside(memory), AS_FAST),
    ]


def prepare(name: str, count: int) -> Callable[[], np.ndarray]:
    """A way from targets and predictions to lower and upper ends (N, 2)."""
    random = np.random.default_rng(0)
    held_out, held_out_y = _rows(random, JUDGING)
    x, _ = _rows(random, count)
    return _ours(held_out, held_out_y, x) if name == "ours" else _mapie(held_out, held_out_y, x)


def prepare_alone(name: str, count: int) -> Callable[[], float]:
    """The same with an answer that is plain enough for JSON; both have run once, so that nothing is loaded later."""
    prepare(name, 100)()
    call = prepare(name, count)
    return lambda: float(call().mean())


def _ours(held_out: np.ndarray, held_out_y: np.ndarray, x: np.ndarray) -> Callable[[], np.ndarray]:
    def run() -> np.ndarray:
        mean, y = _predicted(held_out), held_out_y[:, None]
        scores = scores_of(torch.from_numpy(mean)[:, None], torch.ones(1, 1).double(), torch.from_numpy(y))
        likelihood = Gaussian(1.0, Conformal(scores))
        new = torch.from_numpy(_predicted(x))[:, None]
        return torch.cat(likelihood.interval_of(new, new.new_ones(1, 1), LEVEL), 1).numpy()

    return run


def _mapie(held_out: np.ndarray, held_out_y: np.ndarray, x: np.ndarray) -> Callable[[], np.ndarray]:
    from mapie.regression import SplitConformalRegressor

    def run() -> np.ndarray:
        split = SplitConformalRegressor(_Known(), confidence_level=LEVEL, prefit=True)
        split.conformalize(held_out, held_out_y)
        return split.predict_interval(x)[1][:, :, 0]

    return run


class _Known:
    """A fitted regressor in scikit-learn's sense that costs next to nothing."""

    is_fitted = True  # MAPIE looks for it

    def fit(self, *_: Any) -> _Known:
        """Nothing is learnt."""
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Point predictions (N,)."""
        return _predicted(x)


def _predicted(x: np.ndarray) -> np.ndarray:
    return x[:, 0] + 0.5 * x[:, 1]


def _rows(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    x = random.normal(size=(count, 20))
    return x, _predicted(x) + random.standard_t(4, count)


def _beside(found: dict[str, list[float]]) -> tuple[list[float], str, list[float]]:
    return found["ours"], "MAPIE", found["MAPIE"]
