"""Artefacts of the previous version, one of each kind, and the networks that they are loaded into.

The files in tests/previous were written by the previous version (commit dce9426), with this file as the script:
`PYTHONPATH=<checkout of it>/src python tests/previous_cases.py tests/previous`. They are not written again: what they
are for is that later versions still read them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "previous"


def smooth() -> nn.Module:
    """Two numbers to the logits of three classes."""
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))


def one_number() -> nn.Module:
    """Two numbers to one."""
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))


def dropping() -> nn.Module:
    """As `smooth`, with dropout."""
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def stacked(x: Tensor) -> Tensor:
    """Predictions of three draws, (3, N, 3)."""
    return torch.stack([torch.cat([scale * x, x.sum(1, keepdim=True)], 1) for scale in (0.8, 1.0, 1.3)])


CORE = {
    "ensemble": smooth,
    "last-layer": smooth,
    "variational": one_number,
    "dropout": dropping,
    "stacked": lambda: stacked,
}
"""What each artefact of the core is loaded into."""


def inputs() -> Tensor:
    """Near the training inputs and away from them, (8, 2)."""
    return torch.tensor(
        [[0.0, 0.0], [1.0, 0.2], [-1.0, 0.5], [0.3, -1.2], [2.0, 2.0], [-3.0, 3.0], [6.0, 0.0], [0, -20]]
    )


def asked_rows() -> dict[str, list[Any]]:
    """Rows of a table, the last away from the training rows."""
    return {"area": [70.0, 95.5, 60.0, 900.0], "city": ["Rome", "Oslo", None, "Lima"]}


def expected(name: str) -> dict[str, Any]:
    """What the previous version predicted."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def make(folder: Path) -> None:
    """Write all artefacts, and what is predicted from them."""
    _make_core(folder)
    _make_network(folder)
    _make_tables(folder)


def _classes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    noisy = x + 0.4 * torch.randn(n, 2, generator=generator)
    return x, (noisy[:, 0] > 0).long() + (noisy[:, 1] > 0.5).long()


def _numbers(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, (x[:, :1].sin() + x[:, 1:] + 0.2 * torch.randn(n, 1, generator=generator))


def _make_core(folder: Path) -> None:
    import dapcal
    from dapcal.likelihoods import Categorical, Gaussian
    from dapcal.posteriors import dropout, ensemble, laplace, variational
    from dapcal.posteriors.predictions import StackedPredictions

    train, held_out = _classes(60, 0), _classes(60, 1)
    trained = ensemble.fit(smooth, Categorical(), train, members=3, epochs=60, batch_size=20)
    posteriors = {
        "ensemble": trained,
        "last-layer": laplace.last_layer(trained.network, Categorical(), train, draws=20),
        "dropout": dropout.wrap(
            ensemble.fit(dropping, Categorical(), train, members=2, epochs=60).network, Categorical(), draws=20
        ),
        "stacked": StackedPredictions(stacked, Categorical()),
    }
    for name, posterior in posteriors.items():
        _write_core(dapcal.calibrate(posterior, train=train, held_out=held_out), folder, name)
    train, held_out = _numbers(60, 0), _numbers(60, 1)
    torch.manual_seed(0)
    found = variational.fit(one_number(), Gaussian(0.2), train, draws=20, epochs=60, batch_size=20)
    _write_core(dapcal.calibrate(found, train=train, held_out=held_out), folder, "variational")


def _write_core(calibrated: Any, folder: Path, name: str) -> None:
    calibrated.save(folder / f"{name}.dap")
    prediction = calibrated(inputs())
    parts = ("mean", "variance", "epistemic", "aleatoric", "distance", "ood_score", "ood_p_value")
    _write_json(folder / f"{name}.json", {part: getattr(prediction, part).tolist() for part in parts})


def _make_network(folder: Path) -> None:
    from dapcal.own import model
    from dapcal.own.scores import columns_of

    from dapcal.data import Labelled

    torch.manual_seed(0)
    network = smooth()
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    x, y = _classes(60, 0)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    fitted = model.fit(
        [network], Labelled(x, y), Labelled(*_classes(60, 1)), classes=("a", "b", "c"), factory="nets:make"
    )
    fitted.save(folder / "network.dap")
    columns = columns_of(fitted.predict(inputs()), fitted.classes, 0.95, 0.05)
    _write_json(folder / "network.json", {name: values.tolist() for name, values in columns.items()})


def _make_tables(folder: Path) -> None:
    import numpy as np
    import pyarrow as pa

    from dapcal.recipes import Recipe
    from dapcal.tables import model

    random = np.random.default_rng(0)
    n = 120
    area, city = random.normal(80, 20, n), random.choice(["Rome", "Oslo", "Lima"], n)
    price = 3 * area + 40 * (city == "Rome") + random.normal(0, 15, n)
    dear = np.where(price > np.median(price), "yes", "no")
    recipe = Recipe(hidden=(6,), members=2, epochs=40)
    for name, target in (("table-regression", price), ("table-classification", dear)):
        fitted = model.fit(pa.table({"area": area, "city": city, "target": target}), "target", recipe=recipe)
        fitted.save(folder / f"{name}.dap")
        _write_json(folder / f"{name}.json", fitted.predict(pa.table(asked_rows())).table.to_pydict())


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
