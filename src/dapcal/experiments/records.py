"""What an experiment is, and what it gives back."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from dapcal.calibration.search import Curve
from dapcal.experiments.checkout import commit
from dapcal.posteriors.training import Progress
from dapcal.progress import Stages

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A figure with its caption of two sentences."""

    name: str
    figure: Figure
    caption: str


class Outcome(NamedTuple):
    """Numbers that go into the result file, and pictures."""

    numbers: dict[str, Any]
    pictures: list[Picture]
    unfinished: int = 0  # rows that are still to come, where a run was told to stop before


@dataclass(frozen=True)
class Run:
    """What an experiment is told about one run of it.

    Attributes:
        work: folder for unfinished work, from which an interrupted run goes on; removed when the run is complete.
        seed: of data, networks and draws; the first of several.
        seeds: number of seeds, where an experiment takes several; None for as many as it wants.
        device: where networks are trained and evaluated.
        parts: of its table that are made, where an experiment has several; None for all.
        jobs: processes at a time.
        full: without what was cut to save time.
        minutes: after which nothing more is begun; None: until all is done.
        kept: folder for what is worth keeping beside the result file; None: nowhere.
        elsewhere: takes calls in place of processes of this machine; None: nobody.
        progress: told of steps done.
        say: told of finished parts, one line each.
    """

    work: Path
    seed: int = 0
    seeds: int | None = None
    device: str = "cpu"
    parts: tuple[str, ...] | None = None
    jobs: int = 1
    full: bool = False
    minutes: float | None = None
    kept: Path | None = None
    elsewhere: Callable[..., Future[Any]] | None = None
    progress: Stages = lambda *_: None
    say: Callable[[str], None] = lambda _: None


class Experiment(NamedTuple):
    """One experiment of the paper."""

    title: str
    text: str
    run: Callable[[Run], Outcome]
    options: tuple[str, ...] = ()  # fields of `Run` beyond the seed that it uses
    settings: dict[str, Any] | None = None  # what unfinished work must agree with to be gone on from


DEFAULTS = "4"
"""Of `dapcal.calibrate`, counted: files without it were made before harm was measured against the network itself and
before scaling in the domain, with the features of an ensemble's first member alone; in those of "2" all pieces of
evidence weigh the same in the OOD score, in those of "3" by AUROC."""


def environment(device: str = "cpu") -> dict[str, str]:
    """Versions, device and commit that a result depends on."""
    from dapcal import __version__

    return {
        "dapcal": __version__,
        "defaults": DEFAULTS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device,
        "commit": commit(),
    }


def unfinished(path: Path) -> dict[str, Any]:
    """A result file that another run may go on with; empty where there is none, or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whatever it is, the run writes over it
        return {}
    is_one = isinstance(found, dict) and found.get("unfinished") and {"settings", "environment"} <= set(found)
    return found if is_one else {}


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


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nest of dicts and lists with everything inside it that is neither of them changed.

    >>> with_leaves({"a": [1.26, "b"], "c": (2.0,)}, lambda leaf: round(leaf, 1) if isinstance(leaf, float) else leaf)
    {'a': [1.3, 'b'], 'c': [2.0]}
    """
    if isinstance(value, dict):
        return {name: with_leaves(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_leaves(inner, change) for inner in value]
    return change(value)


def short(leaf: Any) -> Any:
    """A number to seven digits: more would say nothing, and fill a result file."""
    return float(f"{leaf:.7g}") if isinstance(leaf, float) else leaf


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small run several times faster without threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def epochs_of(progress: Stages, stage: str) -> Progress:
    """A training callback that reports epochs as steps of a stage."""
    return lambda epoch: progress(stage, epoch.number, epoch.total)
