"""A figure of the results page that is drawn when asked for: its caption needs no drawing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dapcal.experiments.plots import style

try:
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError("Figures need matplotlib; install it with: pip install 'dapcal[plots]'") from error

BLACK = "#1a202c"
DPI = 100


class Drawing(NamedTuple):
    """A figure that is not drawn yet, with its caption of two sentences."""

    name: str
    caption: str
    draw: Callable[[], Figure]


def save(drawing: Drawing, path: Any) -> None:
    """As PNG, the same bytes every time."""
    with style():
        figure = drawing.draw()
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
