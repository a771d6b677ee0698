"""How every posterior looks on both toy problems, alone and with distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dapcal.experiments.plots import BLUE, GREY, ORANGE, RED, mesh, new_grid, style
from dapcal.experiments.toys import sinusoid, two_moons
from dapcal.predictive import Prediction

MOONS = (
    "Confidence on two moons of twelve posteriors, each alone and with dapcal's default. Most are sure far from the "
    "data; with distance they fall to one half there and stay as they were on the moons."
)
WAVES = (
    "Prediction and 95 % epistemic band on the sinusoid of twelve posteriors, each alone and with dapcal's default. "
    "Bands open between and beyond the clusters where their variance was under ten times that at the training inputs."
)


def figure(panels: list[tuple[str, Prediction]], train: tuple[Tensor, Tensor], draw: Callable[..., Any]) -> Any:
    """Pairs of rows: the posterior alone, and below it with dapcal's default."""
    columns = 6
    with style():
        drawn, axes = new_grid(2 * -(-len(panels) // columns), columns, 1.75, 1.6)
        for place, (title, prediction) in enumerate(panels):
            row, column = 2 * (place // columns), place % columns
            for offset, shown in enumerate((prediction.base, prediction)):
                panel = axes[row + offset][column]
                image = draw(panel, shown, train)
                panel.tick_params(labelsize=6)
                if column == 0:
                    panel.set_ylabel(("alone", "with distance")[offset], fontsize=8)
            axes[row][column].set_title(title, fontsize=8)
        if image is not None:
            drawn.colorbar(image, ax=[panel for row in axes for panel in row], label="confidence", shrink=0.5)
    return drawn


def draw_moons(axes: Any, prediction: Prediction, train: tuple[Tensor, Tensor]) -> Any:
    """Confidence over the plane; the image, for a colour bar."""
    side = round(len(prediction.probs) ** 0.5)
    image = axes.imshow(
        prediction.probs.max(-1).values.double().reshape(side, side).T.numpy(), origin="lower", cmap="viridis",
        extent=(two_moons.LOW[0], two_moons.HIGH[0], two_moons.LOW[1], two_moons.HIGH[1]), vmin=0.5, vmax=1.0,
    )  # fmt: skip
    x, y = train
    for label, colour in ((0, "white"), (1, ORANGE)):
        axes.scatter(*x[y == label].T.numpy(), s=0.6, c=colour, lw=0)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return image


def draw_waves(axes: Any, prediction: Prediction, train: tuple[Tensor, Tensor]) -> None:
    """Mean and epistemic band."""
    x, mean, half = grid("sinusoid")[:, 0], prediction.mean[:, 0], sinusoid.band(prediction)
    axes.fill_between(x, mean - half, mean + half, color=BLUE, alpha=0.25, lw=0)
    axes.plot(x, x.sin(), color=GREY, lw=0.5, ls="--")
    axes.plot(x, mean, color=BLUE, lw=1)
    axes.scatter(*(t[:, 0].numpy() for t in train), s=1, c=RED, lw=0, alpha=0.5)
    axes.set(ylim=(-4, 4), xlim=(-12, 12))


def grid(name: str) -> Tensor:
    """Inputs at which a problem's posteriors are drawn."""
    if name == "two moons":
        return mesh(two_moons.LOW, two_moons.HIGH, 101)[0]
    return torch.linspace(-12, 12, 301)[:, None]
