"""What an experiment is, and what it gives back."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from dapcal.posteriors.training import Epoch
from dapcal.search import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the steps done and their number."""


class Picture(NamedTuple):
    """A figure with its caption of two sentences."""

    name: str
    figure: Figure
    caption: str


class Outcome(NamedTuple):
    """Numbers that go into the result file, and pictures."""

    numbers: dict[str, Any]
    pictures: list[Picture]


class Experiment(NamedTuple):
    """One experiment of the paper."""

    title: str
    text: str
    run: Callable[[int, Progress], Outcome]  # seed, progress


def environment() -> dict[str, str]:
    """Versions that a result depends on."""
    from dapcal import __version__

    return {
        "dapcal": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": "cpu",
    }


def curve_numbers(curve: Curve) -> dict[str, Any]:
    """A calibration curve for the result file; values beyond what JSON holds are left out (null)."""

    def plain(values: torch.Tensor) -> list[float | None]:
        return [round(v, 6) if abs(v) < 1e30 else None for v in values.tolist()]

    return {
        "phi": plain(curve.phi),
        "loss": plain(curve.loss),
        "held_out_nll": plain(curve.nll),
        "uncalibrated_loss": curve.base_loss,
        "uncalibrated_nll": curve.base_nll,
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small run several times faster without threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def epochs_of(progress: Progress, stage: str) -> Callable[[Epoch], None]:
    """A training callback that reports epochs as steps of a stage."""
    return lambda epoch: progress(stage, epoch.number, epoch.total)
