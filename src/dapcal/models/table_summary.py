"""What a model of a table has learnt: how good it is, what it looks at, and what happens away from the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dapcal import metrics
from dapcal.amounts import amount
from dapcal.data import Labelled
from dapcal.ensembles import seen
from dapcal.models.table import TableModel
from dapcal.predictive import Prediction
from dapcal.records import ALPHA, LEVEL
from dapcal.tables.targets import Classes, Numbers
from dapcal.visible import brief

UNCHANGED = "none"  # what an adjustment is called that changes nothing
_MOST_ROWS = 1000  # held-out rows that columns are shuffled in
_MOST_COLUMNS = 200  # that are shuffled; of more, those that predictions go with most


@dataclass(frozen=True)
class Summary:
    """Numbers on the half of the held-out rows that nothing was chosen on; losses are in nats per row.

    Attributes:
        task: classification or regression.
        train_rows: rows that the networks learnt from.
        held_out: rows held out of training; half of them stopped it and chose φ.
        rows: the other half, which is measured here.
        columns: of the table that predictions are made from.
        measure: "accuracy" or "RMSE" (in the target's unit).
        value: of the model.
        constant: of the best answer that looks at no column: the most frequent class, or the mean.
        nll: negative log-likelihood; in regression of the target in its own unit.
        base_nll: the same before distances count.
        coverage: share of held-out targets within the interval of `LEVEL`; None for classes.
        flagged: share of rows with a p-value of at most `ALPHA`, among those that p-values are not read from.
        adjustment: what distance does to predictions, by name.
        phi: φ; it has no meaning without adjustment.
        radius: for every space the distance within which nothing is far.
        widening: k, by which the spread is multiplied at twice the radius (without one: a standard deviation away).
        important: columns, and what the measure loses when their held-out values are shuffled; largest loss first.
    """

    task: str
    train_rows: int
    held_out: int
    rows: int
    columns: int
    measure: str
    value: float
    constant: float
    nll: float
    base_nll: float
    coverage: float | None
    flagged: float
    adjustment: str
    phi: float
    radius: dict[str, float | None]
    widening: float
    important: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def summarise(model: TableModel, seed: int = 0) -> Summary:
    """Measure a model on held-out rows; `seed` is of the shuffling."""
    (chose, held_out), target = model.halves(), model.target
    y, after, before, inside = held_out.y.cpu(), [], [], []
    means = []
    for prediction, own in zip(_predictions(model, held_out.x), y.split(model.rows_at_once), strict=True):
        means.append(prediction.mean)
        after.append(-prediction.log_prob(own))
        before.append(-prediction.base.log_prob(own))
    if isinstance(target, Numbers):  # at rows that the width of intervals was not taken from
        own_y = chose.y.cpu().split(model.rows_at_once)
        for prediction, own in zip(_predictions(model, chose.x), own_y, strict=True):
            lower, upper = prediction.interval(LEVEL)
            inside.append((lower <= own) & (own <= upper))
    unit = 0.0 if isinstance(target, Classes) else float(model.unit.log_slopes(y).mean())
    p_values = torch.cat([prediction.ood_p_value for prediction in _predictions(model, chose.x)])
    mean = torch.cat(means)
    return Summary(
        task=model.task,
        train_rows=len(model.train.x),
        held_out=len(model.held_out.x),
        rows=len(held_out.x),
        columns=len(model.encoder.columns),
        measure="accuracy" if isinstance(target, Classes) else "RMSE",
        value=_value(model, mean, y),
        constant=_without_looking(model, y),
        nll=_mean(after) + unit,
        base_nll=_mean(before) + unit,
        coverage=_mean(inside) if inside else None,
        flagged=float((p_values <= ALPHA).double().mean()),
        adjustment=type(model.calibrated.adjust).__name__ if model.calibrated.adjust.heeds_distance else UNCHANGED,
        phi=model.calibrated.phi,
        radius={s.name: None if s.radius is None else s.radius.start for s in model.calibrated.distance.spaces},
        widening=_widening(model),
        important=_important(model, held_out, seed),
    )


def words(summary: Summary, target: str) -> str:
    """Three lines: how good, what it looks at, what happens away from the data."""
    if summary.task == "classification":
        good = (
            f"right in {100 * summary.value:.1f} % of {summary.rows:,} held-out rows (always the most frequent class: "
        )
        good += f"{100 * summary.constant:.1f} %)"
    else:
        good = f"off by {amount(summary.value)} (RMSE) on {summary.rows:,} held-out rows (always the mean: "
        held = f"{100 * (summary.coverage or 0):.0f} % of the others"
        good += f"{amount(summary.constant)}); its {100 * LEVEL:.0f} % intervals hold {held}"
    names = [f"`{brief(name)}`" for name, loss in list(summary.important.items())[:3] if loss > 0]
    looks = f"It looks most at {', '.join(names)}." if names else "No column alone makes a difference to it."
    where = "At twice the usual distance" if any(summary.radius.values()) else "A standard deviation away"
    doubt = f"{where} from the training rows its doubt {_growth(summary.widening)}"
    if summary.adjustment == UNCHANGED:
        doubt = "Distance from the training rows does not change its predictions"
    away = (
        f"{doubt}; {100 * summary.flagged:.1f} % of other held-out rows are flagged as out of distribution "
        f"(expected: {100 * ALPHA:.0f} %)."
    )
    better = summary.value > summary.constant if summary.measure == "accuracy" else summary.value < summary.constant
    useless = "" if better else " That is no better than looking at no column."
    return f"`{brief(target)}` is {good}.{useless}\n{looks}\n{away}"


def _growth(widening: float) -> str:
    if widening < 1.05:
        return "hardly grows"
    return f"is {widening:.2g} times as large" if widening <= 10 else "is more than 10 times as large"


def _value(model: TableModel, mean: Tensor, y: Tensor) -> float:
    if isinstance(model.target, Classes):
        return float((mean.argmax(-1) == y).double().mean())
    return model.unit.rmse(mean, y)


def _without_looking(model: TableModel, y: Tensor) -> float:
    """Of the most frequent class, or of the mean."""
    if isinstance(model.target, Classes):
        frequent = torch.bincount(model.train.y.cpu(), minlength=len(model.target.labels)).argmax()
        return float((frequent == y).double().mean())
    targets = torch.from_numpy(model.unit.amounts(y))
    return metrics.rmse(torch.full_like(targets, model.mean_target), targets)


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean())


def _predictions(model: TableModel, x: Tensor) -> Iterator[Prediction]:
    return model.calibrated.judging.batches(x, model.rows_at_once)


def _widening(model: TableModel) -> float:
    """k = (σ0 + d)/σ0, or 1 + d where there is no σ0, at twice the radius in every space; 1 without adjustment."""
    calibrated = model.calibrated
    if not calibrated.adjust.heeds_distance:
        return 1.0
    twice = [1.0 if space.radius is None else 2 * space.radius.start for space in calibrated.distance.spaces]
    distance = calibrated.factor * calibrated.distance.combine(
        torch.tensor(twice, device=model.train.x.device)[:, None]
    )
    prior = calibrated.posterior.prior
    return float(1 + distance if prior is None else prior.widening(distance))


def _important(model: TableModel, held_out: Labelled, seed: int) -> dict[str, float]:
    """Permutation importance (Breiman 2001) of the columns of the table, by the members alone: distance is not asked.

    Every shuffled column costs a prediction, which costs as much as there are columns: so of a wide table only some
    are shuffled.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = held_out.x[:_MOST_ROWS], held_out.y[:_MOST_ROWS].cpu()
    names = model.encoder.names
    sign = 1 if isinstance(model.target, Classes) else -1
    posterior = model.calibrated.judging.posterior

    def predicted(inputs: Tensor) -> Tensor:
        parts = inputs.split(model.rows_at_once)
        return torch.cat([posterior.likelihood.mean(seen(posterior, part)).cpu() for part in parts])

    mean = predicted(x)
    best = sign * _value(model, mean, y)
    losses = {}
    for name in _shuffled(names, x.cpu(), mean):
        own = torch.tensor([other == name for other in names], device=x.device)
        order = torch.randperm(len(x), generator=generator).to(x.device)
        losses[name] = best - sign * _value(model, predicted(torch.where(own, x[order], x)), y)
    return dict(sorted(losses.items(), key=lambda item: -item[1]))


def _shuffled(names: Sequence[str], x: Tensor, mean: Tensor) -> list[str]:
    """Columns that may matter: all, or those whose inputs (N, P) correlate most with predictions (N, K)."""
    different = list(dict.fromkeys(names))
    if len(different) <= _MOST_COLUMNS:
        return different
    inputs, outputs = (values.double() - values.double().mean(0) for values in (x, mean))
    scale = (inputs.norm(dim=0)[:, None] * outputs.norm(dim=0)).clamp_min(1e-12)
    strength = ((inputs.T @ outputs).abs() / scale).amax(1)  # (P,)
    strongest = dict.fromkeys(names[place] for place in strength.argsort(descending=True).tolist())
    kept = set(list(strongest)[:_MOST_COLUMNS])
    return [name for name in different if name in kept]
