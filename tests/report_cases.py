"""Small subjects of reports: two moons, a table, images, one column; calibrated once and kept for all tests."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from dapcal import calibrate
from dapcal.adjust import Reweight
from dapcal.calibrate import Calibrated
from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, Gaussian, Likelihood
from dapcal.models.columns import Unit
from dapcal.models.judged_rows import GroupCoverage, Judged, JudgedClasses, JudgedNumbers
from dapcal.models.subject import Axis, Picture, Subject
from dapcal.png import image_png
from dapcal.posteriors import ensemble, gaussian
from dapcal.types import DapcalWarning

COLUMNS = (
    "area",
    "rooms",
    "age",
    "height",
    "distance to centre",
    "noise",
    "light",
    "sun",
    "wind",
    "town",
    "town",
    "town",
)
TOWNS = ("Bern", "Lyon", "<script>alert(1)</script>")


def calibrated_ensemble(
    train: Labelled, held_out: Labelled, likelihood: Likelihood, outputs: int, width=24, epochs=30, **options
) -> Calibrated:
    """Three small networks, trained quickly."""
    flat = train.x[0].numel()

    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(flat, width), nn.Tanh(), nn.Linear(width, outputs))

    data = (train.x, train.y)
    posterior = ensemble.fit(make, likelihood, data, members=3, epochs=epochs, learning_rate=0.03, batch_size=128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)
        return calibrate(posterior, train=data, held_out=(held_out.x, held_out.y), **options)


def moons(n: int, generator: torch.Generator) -> Labelled:
    """Two interleaving half circles."""
    angle = math.pi * torch.rand(n, generator=generator)
    y = torch.arange(n) % 2
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    x = torch.where(y[:, None] == 0, upper, lower) + 0.2 * torch.randn(n, 2, generator=generator)
    return Labelled(x, y)


@cache
def two_moons(n: int = 300) -> Subject:
    """Classification of two inputs, without new data."""
    generator = torch.Generator().manual_seed(0)
    train, held_out = moons(n, generator), moons(n, generator)
    return Subject(
        calibrated=calibrated_ensemble(train, held_out, Categorical(), 2),
        train=train,
        held_out=held_out,
        title="moons.dap",
        target="moon",
        show=lambda x: [{"east": f"{100 + 10 * a:.1f}", "north": f"{50 + 10 * b:.1f}"} for a, b in x.tolist()],
        classes=("upper", "lower"),
        features=("east", "north"),
        axes=(Axis("east", 100, 10), Axis("north", 50, 10)),
    )


@cache
def table(n: int = 300) -> Subject:
    """Regression on twelve input columns (ten of the table, one of them in three codes), with new data."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> Labelled:
        x = torch.randn(count, 12, generator=generator)
        town = torch.randint(3, (count,), generator=generator)
        x[:, 9:] = nn.functional.one_hot(town, 3).float()
        y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] - 0.3 * x[:, 2] * x[:, 3] + 0.4 * town
        return Labelled(x, (y + 0.3 * torch.randn(count, generator=generator))[:, None])

    train, held_out = draw(n), draw(n)
    new = draw(120).x
    new[60:, 0] += 4  # half of it is of another kind: large, and far from the centre
    new[60:, 4] -= 5
    return Subject(
        calibrated=calibrated_ensemble(train, held_out, Gaussian(), 1),
        train=train,
        held_out=held_out,
        title="house.dap",
        target="price",
        show=shown_rows,
        unit=Unit(300.0, 80.0),
        features=COLUMNS,
        new=new,
        new_name="offers of May",
    )


@cache
def with_amounts() -> Subject:
    """The same, whose new rows have the target: amounts of seven digits, and categories that intervals miss."""
    generator = torch.Generator().manual_seed(4)
    predicted = 2e6 * (1 + torch.rand(120, generator=generator, dtype=torch.float64))
    true = predicted + 2e5 * torch.randn(120, generator=generator, dtype=torch.float64)
    rows = JudgedNumbers(true, predicted, predicted - 4e5, predicted + 4e5, torch.arange(120) >= 100)
    groups = (
        GroupCoverage("town", TOWNS[2], 40, 0.7, is_low=True),
        GroupCoverage("a column with a long name", "a category with a long name", 60, 0.94, is_low=False),
    )
    lines = (("error (root mean square)", "200,000", "600,000"),)
    return replace(table(), judged=Judged(lines, 120, rows, 0.95, groups))


@cache
def with_classes() -> Subject:
    """The moons, with new ones whose class is known."""
    new = moons(80, torch.Generator().manual_seed(5))
    probabilities = two_moons().calibrated(new.x).probs.double()
    judged = Judged((("share right", "95 %", "50 %"),), 80, JudgedClasses(new.y, probabilities))
    return replace(two_moons(), new=new.x, judged=judged)


def shown_rows(x: Tensor) -> list:
    """Rows of the table as a person reads them."""
    rows = []
    for values in x.tolist():
        row = {name: f"{100 + 20 * value:.1f}" for name, value in zip(COLUMNS[:9], values[:9], strict=True)}
        rows.append(row | {"town": TOWNS[max(range(3), key=lambda place: values[9 + place])]})
    return rows


@cache
def images(n: int = 250) -> Subject:
    """Three classes of 1 × 8 × 8 images: bars that lie, stand or cross; new ones are discs."""
    generator = torch.Generator().manual_seed(2)

    def draw(count: int) -> Labelled:
        y = torch.arange(count) % 3
        x = 0.15 * torch.rand(count, 1, 8, 8, generator=generator)
        for image, label, place in zip(x, y.tolist(), torch.randint(2, 5, (count,), generator=generator), strict=True):
            image[0, place : place + 2] += 0.8 * (label != 1)
            image[0, :, place : place + 2] += 0.8 * (label != 0)
        return Labelled(x, y)

    train, held_out = draw(n), draw(n)
    side = torch.linspace(-1, 1, 8)
    disc = ((side[:, None] ** 2 + side**2) < 0.6).float()
    new = (disc - 0.1 * torch.rand(20, 1, 8, 8, generator=generator)).clamp_min(0)
    return Subject(
        calibrated=calibrated_ensemble(train, held_out, Categorical(), 3, epochs=10),
        train=train,
        held_out=held_out,
        title="bars.dap",
        target="kind of bar",
        show=lambda x: [Picture(image_png(image)) for image in x],
        classes=("lying", "standing", "cross"),
        new=new,
        new_name="discs",
    )


@cache
def one_column(n: int = 120) -> Subject:
    """Regression on a single number, without new data; another seed of the split."""
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(2 * n, 1, generator=generator)
    y = x.sin() + 0.2 * torch.randn(2 * n, 1, generator=generator)
    train, held_out = Labelled(x[:n], y[:n]), Labelled(x[n:], y[n:])
    return Subject(
        calibrated=calibrated_ensemble(train, held_out, Gaussian(), 1, seed=7),
        train=train,
        held_out=held_out,
        title="sine.dap",
        target="height",
        show=lambda values: [{"time": f"{value:.2f}"} for value in values[:, 0].tolist()],
    )


@cache
def reweighted() -> Subject:
    """The moons with the paper's importance weights, and a φ so large that they collapse."""
    subject = two_moons()
    network = subject.calibrated.posterior.network
    assert network is not None
    scale = {name: torch.full_like(parameter, 0.5) for name, parameter in network.named_parameters()}
    posterior = gaussian.diagonal(network, Categorical(), scale, draws=30)
    train, held_out = ((data.x, data.y) for data in (subject.train, subject.held_out))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)
        calibrated = calibrate(posterior, train=train, held_out=held_out, adjust=Reweight(), guard=None)
    calibrated = replace(calibrated, phi=calibrated.phi + 4)
    return Subject(calibrated, subject.train, subject.held_out, "weights.dap", "moon", subject.show, subject.classes)
