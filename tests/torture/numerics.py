"""Numbers from denormals to 1e308, as inputs, targets, weights and cells: a clear refusal, or sane predictions.

`run(count, seed)` tries `count` sizes. Sane is: probabilities that sum to one, variances that are not negative,
p-values above 0 and up to 1, what lies far beyond the training inputs less likely than these, and NaN at most where the
network itself overflows, with the least p-value. By hand: `python tests/torture/numerics.py 200 0`.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import artefacts

import dapcal
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.models.table_fitting import fit
from dapcal.posteriors import laplace
from dapcal.posteriors.samples import from_state_dicts
from dapcal.recipes import Recipe
from torture.tally import Tally

TABLES = 10  # trials of all to one of a table
POWERS = {torch.float32: (-46, 38), torch.float64: (-324, 308)}
FAR = 1e6  # times the training inputs


def run(count: int, seed: int = 0) -> Tally:
    """Try `count` sizes; how many were tried, and a line for each that failed."""
    failed = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        trial = table if number % TABLES == TABLES - 1 else draw.choice([classes, numbers, last_layer])
        raised, found = None, ""
        try:
            with warnings.catch_warnings(action="ignore"), artefacts._limited(artefacts.MOST_SECONDS):
                found = trial(draw)
        except BaseException as error:  # whatever it is, it is told
            raised = error
        trouble = found or artefacts._judged(raised, None, None)
        if trouble:
            failed.append(f"seed {seed}, size {number}, {trial.__name__}: {trouble}")
    return Tally("numerics", count, failed)


def classes(draw: random.Random) -> str:
    """Draws of a classifier; weights of a size, too."""
    x, size = _inputs(draw)
    nets = _networks(draw, x.dtype, 3)
    posterior = from_state_dicts(nets[0], Categorical(), [net.state_dict() for net in nets])
    return _asked(posterior, x, (x[:, 0] > 0).long(), size, draw)


def numbers(draw: random.Random) -> str:
    """Draws of a regression, with targets of a size."""
    x, size = _inputs(draw)
    nets = _networks(draw, x.dtype, 1)
    y = (torch.randn(len(x), 1, dtype=torch.float64) * _size(draw, x.dtype)).to(x.dtype)
    noise = float(y.double().std())
    posterior = from_state_dicts(nets[0], Gaussian(noise or 1.0), [net.state_dict() for net in nets])
    return _asked(posterior, x, y, size, draw)


def last_layer(draw: random.Random) -> str:
    """A Gaussian over the weights of a last layer."""
    x, size = _inputs(draw)
    (net,) = _networks(draw, x.dtype, 3, 1)
    y = (x[:, 0] > 0).long()
    return _asked(laplace.last_layer(net, Categorical(), (x[:60], y[:60]), draws=8), x, y, size, draw)


def table(draw: random.Random) -> str:
    """Cells and targets of a size, through `fit` and `predict`."""
    draws = np.random.default_rng(draw.randrange(2**31))
    area = draws.normal(draw.choice([0, 1, 100]), 1, 120) * _size(draw, torch.float64)
    price = (draws.normal(size=120) + np.sign(area)) * _size(draw, torch.float64)
    with np.errstate(all="ignore"):
        rows = pa.table({"area": area, "other": draws.normal(size=120), "price": price})
        model = fit(rows, "price", task="regression", recipe=Recipe(hidden=(4,), epochs=1, members=2, fast=True))
        asked = rows.slice(0, 8).drop_columns(["price"])
        found = model.predict(asked).table
    cells = {name: np.array(found[name].to_pylist(), float) for name in ("prediction", "lower", "upper", "ood_p_value")}
    if not all(np.isfinite(values).all() for values in cells.values()):
        return f"not finite: {cells}"
    ordered = (cells["lower"] <= cells["prediction"]) & (cells["prediction"] <= cells["upper"])
    return "" if ordered.all() else f"a prediction outside of its interval: {cells}"


def _asked(posterior: dapcal.types.Posterior, x: Tensor, y: Tensor, size: float, draw: random.Random) -> str:
    calibrated = dapcal.calibrate(posterior, train=(x[:60], y[:60]), held_out=(x[60:], y[60:]), candidates=3)
    largest = torch.finfo(x.dtype).max
    far = torch.tensor([[FAR * size, 0], [0, -FAR * size], [largest, -largest]], dtype=torch.float64)
    odd = torch.tensor([[0.0, -0.0], [_size(draw, x.dtype), 0], [largest, 5e-324]], dtype=torch.float64)
    asked = torch.cat([x[:4], odd.to(x.dtype), far.clamp(-largest, largest).to(x.dtype)])
    found = calibrated(asked)
    parts = ("mean", "variance", "epistemic", "aleatoric", "distance", "ood_score", "ood_p_value")
    is_nan = torch.stack([getattr(found, name).reshape(len(asked), -1).isnan().any(1) for name in parts]).any(0)
    least = 1 / (1 + len(calibrated.evidence.held_out))
    if is_nan[:4].any() or not (found.ood_p_value[is_nan] <= least * (1 + 1e-9)).all():
        return f"NaN that is not flagged at inputs around {size:.3g}"
    found = found[~is_nan]
    if not ((found.ood_p_value > 0) & (found.ood_p_value <= 1)).all():
        return f"p-values {found.ood_p_value.tolist()}"
    if min(float(getattr(found, name).min()) for name in ("variance", "epistemic", "aleatoric", "distance")) < 0:
        return "a negative variance or distance"
    sums = found.mean.double().sum(1)
    if posterior.likelihood.task != "regression" and not torch.allclose(sums, torch.ones_like(sums), atol=1e-5):
        return f"probabilities sum to {sums.tolist()}"
    measured = any(space.name == "inputs" for space in calibrated.distance.spaces)
    is_far = (torch.arange(len(asked)) >= len(asked) - len(far))[~is_nan]
    unlikely = found.ood_p_value[is_far] <= found.ood_p_value[:4].min()
    return "" if unlikely.all() or not measured else f"far inputs look ordinary: {found.ood_p_value.tolist()}"


def _inputs(draw: random.Random) -> tuple[Tensor, float]:
    """A hundred and twenty rows of a size, and it; one column may be of another."""
    dtype = draw.choice(list(POWERS))
    torch.manual_seed(draw.randrange(2**31))
    x, size = torch.randn(120, 2, dtype=torch.float64), _size(draw, dtype)
    sizes = torch.tensor([size, draw.choice([size, size, _size(draw, dtype)])], dtype=torch.float64)
    largest = torch.finfo(dtype).max
    return (x * sizes).clamp(-largest, largest).to(dtype), float(sizes.max())


def _size(draw: random.Random, dtype: torch.dtype) -> float:
    """A power of ten, ordinary ones as often as all others."""
    low, high = POWERS[dtype]
    return 10.0 ** (draw.uniform(-3, 3) if draw.random() < 0.5 else draw.uniform(low, high))


def _networks(draw: random.Random, dtype: torch.dtype, outputs: int, count: int = 3) -> list[nn.Module]:
    activation: Callable[[], nn.Module] = draw.choice([nn.Tanh, nn.ReLU])
    nets = [
        nn.Sequential(nn.Linear(2, 6), activation(), nn.Linear(6, outputs)).to(dtype).requires_grad_(True)
        for _ in range(count)
    ]
    size = _size(draw, dtype) if draw.random() < 0.2 else 1.0
    with torch.no_grad():
        for net in nets:
            net[2].weight.mul_(size)
    return nets


if __name__ == "__main__":
    found = run(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(found.failed[:40]))
    print(f"tried {found.tried}, failed {len(found.failed)}")
