"""What a case is about: training, held-out and test rows of a data set under a seed, and outliers that nothing sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dapcal.data import Labelled
from dapcal.experiments.datasets import DATASETS, Images, as_floats, like_mnist, uci
from dapcal.experiments.datasets.files import verified
from dapcal.experiments.no_harm.cases import Data
from dapcal.experiments.no_harm.corruptions import CORRUPTED
from dapcal.experiments.toys import sinusoid, two_moons
from dapcal.likelihoods import Categorical, Gaussian, Likelihood

MOST = 1000  # outliers of a kind


class Outside(NamedTuple):
    """Outliers; with targets where they have some (a gap)."""

    x: Tensor
    y: Tensor | None = None


class Problem(NamedTuple):
    """The parts of a data set under a seed."""

    train: Labelled
    held_out: Labelled
    test: Labelled
    outliers: dict[str, Outside]
    likelihood: Likelihood
    outputs: int
    about: str = ""  # the column of a gap


def problem(data: Data, seed: int) -> Problem:
    """Rows of a data set divided by a seed."""
    return KINDS[data["kind"]](data, seed)


def digits(data: Data, seed: int) -> Problem:
    """scikit-learn's 8×8 digits as vectors between 0 and 1."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.from_numpy(found.data).float() / 16, torch.from_numpy(found.target).long()
    return _classes(data, x, y, seed, lambda name, g: _pictures(name.removesuffix(", 8×8"), g, 8).flatten(1))


def images(data: Data, seed: int) -> Problem:
    """Some of the training images, and some of the test images to judge by."""
    generator = torch.Generator().manual_seed(seed)
    train, test = (DATASETS[data["name"]](split) for split in ("train", "test"))
    learnt, calibrating, judging = data["rows"]
    rows, tested = (
        _shuffled((~_other(part.y, data)).nonzero().flatten(), generator) for part in (train, test)
    )  # fmt: skip

    def labelled(part: Images, index: Tensor) -> Labelled:
        return Labelled(as_floats(part.x[index]), _numbered(part.y[index], data.get("without", [])))

    outliers = {}
    for name in data["outliers"]:
        if name == "other classes":
            outliers[name] = Outside(as_floats(_some(test.x[_other(test.y, data)], generator)))
        else:
            outliers[name] = Outside(_pictures(name, generator))
    return Problem(
        train=labelled(train, rows[:learnt]),
        held_out=labelled(train, rows[learnt : learnt + calibrating]),
        test=labelled(test, tested[:judging]),
        outliers=outliers,
        likelihood=Categorical(),
        outputs=10 - len(data.get("without", [])),
    )


def moons(data: Data, seed: int) -> Problem:
    """Two moons; outliers lie in a box around them, at least half a unit from every training point."""
    generator = torch.Generator().manual_seed(seed)
    train, held_out, test = (
        Labelled(*two_moons.moons(n, two_moons.NOISE, generator)) for n in (two_moons.POINTS, 500, 1000)
    )
    low, high = (torch.tensor(corner) for corner in (two_moons.LOW, two_moons.HIGH))
    places = low + (high - low) * torch.rand(4 * MOST, 2, generator=generator)
    away = places[torch.cdist(places, train.x).min(1).values > 0.5][:MOST]
    (name,) = data["outliers"]
    return Problem(train, held_out, test, {name: Outside(away)}, Categorical(), 2)


def waves(data: Data, seed: int) -> Problem:
    """Two clusters of inputs to a sine; outliers lie between and beyond them, three deviations and more from both."""
    generator = torch.Generator().manual_seed(seed)
    train, held_out, test = (Labelled(*sinusoid.waves(n, generator)) for n in (sinusoid.POINTS, 500, 1000))
    reach = sinusoid.CENTERS[1] - 3 * sinusoid.DEVIATION
    end = sinusoid.CENTERS[1] + 3 * sinusoid.DEVIATION
    uniform = torch.rand(2, MOST, 1, generator=generator)
    sides = torch.where(torch.rand(MOST, 1, generator=generator) < 0.5, -1.0, 1.0)
    between, beyond = reach * (2 * uniform[0] - 1), sides * (end + 4 * uniform[1])
    places = {"between the clusters": between, "beyond the clusters": beyond}
    outliers = {name: Outside(places[name], places[name].sin()) for name in data["outliers"]}
    return Problem(train, held_out, test, outliers, Gaussian(), 1)


def numbers(data: Data, seed: int) -> Problem:
    """A UCI table, standardised by its training rows; with `columns`, the gap in one of them is left out."""
    table, columns = uci(data["name"]), data.get("columns")
    about = columns[seed % len(columns)] if columns else ""
    gap = table.splits[table.columns.index(about)] if about else torch.empty(0, dtype=torch.long)
    outside = torch.ones(len(table.x), dtype=torch.bool)
    outside[gap] = False
    parts = divided(outside.nonzero().flatten(), data, seed)
    x, y = (_standard(values, parts[0]) for values in (table.x, table.y[:, None]))
    train, held_out, test = (Labelled(x[rows], y[rows]) for rows in parts)
    generator = torch.Generator().manual_seed(seed)
    if about:
        rows = _some(gap, generator)
        outliers = {"the gap": Outside(x[rows], y[rows])}
    else:
        outliers = {name: Outside(CORRUPTED[name](test.x, train.x, generator)) for name in data["outliers"]}
    return Problem(train, held_out, test, outliers, Gaussian(), 1, about)


def table(data: Data, seed: int) -> Problem:
    """A table with categories and missing cells, encoded by what its training rows say."""
    from dapcal.tables import fit_encoder, fit_target, read, with_target

    target = data["target"]
    rows, _ = with_target(read(verified(f"tables/{data['name']}.csv")), target)
    goal = fit_target(rows[target], data["task"], target)
    y = goal.encode(rows[target], name=target)
    classes = data["task"] == "classification"
    other = torch.zeros(len(y), dtype=torch.bool)
    if data.get("without"):
        without = [goal.labels.index(label) for label in data["without"]]
        other = torch.isin(y, torch.tensor(without))
        y = _numbered(y, without)
    parts = divided((~other).nonzero().flatten(), data, seed)
    encoder = fit_encoder(rows.take(parts[0].tolist()), target, data.get("drop", ()))
    x = encoder(rows).x
    if not classes:
        y = _standard(y.reshape(len(x), 1).double(), parts[0])
    train, held_out, test = (Labelled(x[index], y[index]) for index in parts)
    generator = torch.Generator().manual_seed(seed)
    outliers = {
        name: Outside(x[other] if name == "other classes" else CORRUPTED[name](test.x, train.x, generator))
        for name in data["outliers"]
    }
    likelihood = Categorical() if classes else Gaussian()
    return Problem(train, held_out, test, outliers, likelihood, int(y[~other].max()) + 1 if classes else 1)


KINDS: dict[str, Callable[[Data, int], Problem]] = {
    "digits": digits, "images": images, "moons": moons, "sinusoid": waves, "uci": numbers, "table": table,
}  # fmt: skip


def divided(rows: Tensor, data: Data, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for training, calibrating and judging, by the shares that the plan names."""
    rows = _shuffled(rows, torch.Generator().manual_seed(seed))
    judging, calibrating = (round(data[share] * len(rows)) for share in ("test", "held_out"))
    return rows[judging + calibrating :], rows[judging : judging + calibrating], rows[:judging]


def _classes(
    data: Data, x: Tensor, y: Tensor, seed: int, elsewhere: Callable[[str, torch.Generator], Tensor]
) -> Problem:
    """Rows of some classes, divided; outliers are rows of the other classes, or come from elsewhere."""
    other = _other(y, data)
    numbered = _numbered(y, data.get("without", []))
    parts = divided((~other).nonzero().flatten(), data, seed)
    generator = torch.Generator().manual_seed(seed)
    outliers = {
        name: Outside(x[other] if name == "other classes" else elsewhere(name, generator)) for name in data["outliers"]
    }
    train, held_out, test = (Labelled(x[rows], numbered[rows]) for rows in parts)
    return Problem(train, held_out, test, outliers, Categorical(), int(numbered[~other].max()) + 1)


def _other(y: Tensor, data: Data) -> Tensor:
    """Rows of classes that are left out."""
    return torch.isin(y, torch.tensor(data.get("without", []), dtype=y.dtype))


def _numbered(y: Tensor, without: Sequence[int]) -> Tensor:
    """The classes that are left, numbered from 0; of rows that are left out the number means nothing."""
    left = torch.tensor(sorted(set(y.unique().tolist()) - set(without)))
    return torch.searchsorted(left, y)


def _pictures(name: str, generator: torch.Generator, size: int = 28) -> Tensor:
    """Some images of another data set as MNIST has them, or smaller."""
    split = "evaluation" if name == "omniglot" else "test"
    found = like_mnist(_some(DATASETS[name](split).x, generator), invert=name == "omniglot")
    if size == found.shape[-1]:
        return found
    return interpolate(found, size=(size, size), mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)


def _some(rows: Tensor, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:MOST]]


def _shuffled(rows: Tensor, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)]


def _standard(values: Tensor, rows: Tensor) -> Tensor:
    """Columns of mean 0 and variance 1 on some rows (constant ones keep scale 1), in float32."""
    center, scale = values[rows].mean(0), values[rows].std(0, correction=0)
    return ((values - center) / torch.where(scale > 0, scale, 1)).float()
