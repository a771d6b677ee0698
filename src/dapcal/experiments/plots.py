"""The look that all figures share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError("Figures need matplotlib; install it with: pip install 'dapcal[plots]'") from error

from dapcal.calibrate import Calibrated

BLUE, ORANGE, GREY, RED = "#2b6cb0", "#dd6b20", "#718096", "#c53030"

_STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 170,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@contextmanager
def style() -> Iterator[None]:
    """Our settings inside the block, the user's outside."""
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        yield


def new_figure(columns: int, width: float = 3.6, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A row of panels, without touching pyplot's global state."""
    figure = Figure(figsize=(width * columns, height))
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def new_grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    """Rows of small panels that share their axes."""
    figure = Figure(figsize=(width * columns, height * rows))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    return figure, axes.tolist()


def calibration_panel(axes: Axes, calibrated: Calibrated, title: str) -> None:
    """Loss over φ with the chosen φ; the held-out NLL with its limit where there is a guard."""
    curve = calibrated.curve
    axes.plot(curve.phi, curve.loss, color=BLUE, label="calibration loss")
    axes.axhline(curve.base_loss, color=BLUE, lw=0.8, ls=":", label="uncalibrated loss")
    axes.axvline(calibrated.phi, color=RED, lw=1, label=f"chosen φ = {calibrated.phi:.2f}")
    window = (curve.phi - calibrated.phi).abs() <= 8
    top = min(float(curve.loss[window].max()), 1.4 * curve.base_loss)
    axes.set(xlabel="φ", ylabel="loss", title=title, ylim=(0, 1.15 * top))
    axes.set_xlim(float(curve.phi[window][0]), float(curve.phi[window][-1]))
    handles, labels = axes.get_legend_handles_labels()
    if math.isfinite(curve.guard):
        right = axes.twinx()
        right.spines["right"].set_visible(True)
        right.plot(curve.phi, curve.nll, color=ORANGE, label="held-out NLL, and what the guard adds")
        right.fill_between(curve.phi, curve.nll, curve.nll + curve.error, color=ORANGE, alpha=0.3, lw=0)
        right.axhspan(curve.guard, 1e9, color=ORANGE, alpha=0.12, lw=0, label="refused by the guard")
        low = min(curve.base_nll, float(curve.nll[window].min()))
        right.set_ylim(low - 0.3 * (curve.guard - low), curve.guard + 1.5 * (curve.guard - low))
        right.set_ylabel("held-out NLL (nats)")
        more = right.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(handles, labels, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)


def mesh(low: tuple[float, float], high: tuple[float, float], steps: int) -> tuple[Tensor, tuple[int, int]]:
    """Grid points (steps², 2) and the shape to plot them in."""
    first, second = (torch.linspace(a, b, steps) for a, b in zip(low, high, strict=True))
    return torch.cartesian_prod(first, second), (steps, steps)
