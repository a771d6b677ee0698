"""Whether a model says more of its target than looking at no column does, on the rows that judge it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapcal.amounts import amount
from dapcal.models.table import TableModel
from dapcal.tables.targets import Classes
from dapcal.visible import brief

FEWEST = 2  # rows that judge


def note(model: TableModel) -> str | None:
    """A note where the model is no better than the trivial answer; None where it is.

    That answer is the shares of the classes, or a Gaussian with mean and variance of the training targets (of their
    logarithms, where these are learnt). In likelihood the mean gain over it must exceed its standard error, as a model
    of pure noise gains by chance as often as it loses; the error must be smaller.
    """
    rows = model.halves()[1]
    if len(rows.x) < FEWEST:
        return None
    y = rows.y.cpu()
    parts = list(model.calibrated.judging.batches(rows.x, model.rows_at_once))
    mean = torch.cat([part.mean for part in parts]).cpu()
    own = [part.log_prob(known) for part, known in zip(parts, y.split(model.rows_at_once), strict=True)]
    log_prob = torch.cat(own).double().cpu()
    trivial, (value, constant, is_better, measure) = _without_looking(model, y), _errors(model, mean, y)
    gain = log_prob - trivial
    counts = bool(gain.mean() > gain.std() / math.sqrt(len(gain)))
    if counts and is_better:
        return None
    by_nll = f"NLL {-float(log_prob.mean()):.3g} against {-float(trivial.mean()):.3g}"
    by_error = f"{measure} {value} against {constant}"
    told = [text for text, good in ((by_nll, counts), (by_error, is_better)) if not good]
    but = [f"; its {text} is better" for text, good in ((by_nll, counts), (by_error, is_better)) if good]
    return (
        f"`{brief(model.encoder.target)}` is predicted no better than by looking at no column, on {len(y):,} rows that "
        f"judge it: {', '.join(told)}{''.join(but)}"
    )


def _without_looking(model: TableModel, y: Tensor) -> Tensor:
    """log p of targets by the trivial answer, in the unit that is learnt, (n,)."""
    known = model.train.y.cpu()
    if isinstance(model.target, Classes):
        count = torch.bincount(known, minlength=len(model.target.labels)).double()
        return ((count + 1) / (count + 1).sum()).log()[y]  # a class may be too rare for a training row
    known = known.double()
    deviation = known.std(0).clamp_min(1e-6)
    return torch.distributions.Normal(known.mean(0), deviation).log_prob(y.double()).sum(1)


def _errors(model: TableModel, mean: Tensor, y: Tensor) -> tuple[str, str, bool, str]:
    """Of the model and of the trivial answer, in words; whether the model's is smaller; what is measured."""
    if isinstance(model.target, Classes):
        frequent = torch.bincount(model.train.y.cpu()).argmax()
        right, always = (float((one == y).double().mean()) for one in (mean.argmax(-1), frequent))
        return f"{100 * right:.1f} %", f"{100 * always:.1f} %", right > always, "accuracy"
    value = model.unit.rmse(mean, y)
    targets = torch.from_numpy(model.unit.amounts(y))
    constant = float((targets - model.mean_target).square().mean().sqrt())
    return amount(value), amount(constant), value < constant, "RMSE"
