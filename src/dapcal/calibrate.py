"""Calibrate a posterior to distance: the file to read first.

train ──► distance d0 (projector, metric, radius)          held-out ──► radius, guard, p-values
calibration inputs x* ──► loss(φ), subject to the guard ──► φ ──► Calibrated
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dapcal.adjust import Inflate
from dapcal.adjust.base import base_ensemble, outputs_with_spread
from dapcal.adjust.reweight import Reweight
from dapcal.data import Data, Labelled, check_inputs, gather, split
from dapcal.diagnostics import effective_sample_size, importance_of, pareto_k
from dapcal.distances import Distance, FittedSpace, Space, fit_distance, stack_on_first
from dapcal.evidence import Evidence, fit_evidence, pieces_of
from dapcal.gap import GapCrossValidation
from dapcal.likelihoods import _Classes
from dapcal.losses import Loss, Problem, Target
from dapcal.ood_inputs import Chosen, Given, Misclassified, OODInputs
from dapcal.predictive import Prediction
from dapcal.scales import Exp
from dapcal.search import Curve, Point, search
from dapcal.spaces import informative
from dapcal.types import Adjusted, Adjustment, DapcalWarning, Ensemble, Posterior, Scale


def calibrate(
    posterior: Posterior,
    *,
    train: Data,
    held_out: Data,
    ood: Tensor | Data | OODInputs | None = None,
    distance: Space | Sequence[Space] | None = None,
    adjust: Adjustment | None = None,
    loss: Loss | None = None,
    guard: float | None = 0.01,
    temperature: bool = False,
    scale: Scale | None = None,
    candidates: int = 100,
    seed: int = 0,
) -> Calibrated:
    """Choose φ, so that predictions become as uncertain as they should be away from the training inputs.

    Args:
        posterior: any posterior with at least two draws.
        train: the data it was fitted to, whose inputs distances are measured from.
        held_out: in-distribution data it was not fitted to. Half of it (by `seed`) chooses φ, radius and scales,
            the other half gives p-values.
        ood: calibration inputs: a tensor, data with targets, or one of `dapcal.ood_inputs`. By default the
            misclassified held-out inputs (the hardest 30 % in regression, or if fewer than 10 are wrong).
        distance: where distances are measured; several spaces count by the largest. By default features and inputs,
            each where it is informative, outside the 90 % radius.
        adjust: how the posterior is adjusted; by default `Inflate()`. `Reweight()` is the paper.
        loss: what φ minimises; by default `Target()`, the paper's.
        guard: nats by which the held-out negative log-likelihood may rise; None is the paper.
        temperature: calibrate in-domain first: temperature (classification) or noise level (regression).
        scale: g(φ); by default `Exp()`.
        candidates: values of φ on the first grid.
        seed: of the split of the held-out data.

    Returns:
        What the user keeps: call it on inputs.
    """
    for name, option in (("adjust", adjust), ("loss", loss), ("scale", scale)):
        if isinstance(option, type):
            raise TypeError(
                f"Expected `{name}` as an object, got the class {option.__name__}; write {option.__name__}()"
            )
    adjust, loss, scale = adjust or Inflate(), loss or Target(), scale or Exp()
    if temperature and isinstance(loss, GapCrossValidation):
        raise ValueError(
            "temperature=True does not reach the posteriors that gap cross-validation refits; calibrate the likelihood "
            "inside `refit`"
        )
    train_data, held = gather(train, "train"), gather(held_out, "held_out")
    check_inputs(held.x, "held_out", like=train_data.x)
    if len(held.x) < 4:
        raise ValueError(f"Expected at least 4 held-out inputs, got {len(held.x)}; hold out more")
    train_data, held = _check_targets(posterior, train_data, held)
    first, second = (held.subset(rows) for rows in split(len(held.x), torch.Generator().manual_seed(seed)))
    if temperature:
        posterior = in_domain(posterior, first)
    if distance is None:
        judged = informative(posterior, train_data.x, first)
        spaces, fitted, further, notes = judged.spaces, judged.distance, judged.further, judged.notes
    else:
        several = (distance,) if isinstance(distance, Space) else distance
        if not isinstance(several, tuple | list) or not all(isinstance(space, Space) for space in several):
            raise TypeError(
                f"Expected `distance` as a dapcal.distances.Space or several, got {type(distance).__name__}; wrap a "
                "projector in Space(projector)"
            )
        spaces = tuple(several)
        fitted, further, notes = fit_distance(spaces, train_data.x, first.x, posterior), (), ()
    adjusted_first = adjust(posterior, first.x)
    if not posterior.likelihood.location_variance(adjusted_first(torch.zeros(len(first.x))).outputs).any():
        raise ValueError(
            "All draws give the same outputs at all held-out inputs: there is no spread to inflate, move or weight. "
            "Check that the posterior's draws differ"
        )
    raw_first = fitted.raw(first.x)
    d0_first = fitted.combine(raw_first)
    chosen = _calibration_inputs(ood, posterior, train_data, first, fitted, d0_first)
    check_inputs(chosen.x, "ood", like=train_data.x)
    d0 = fitted(chosen.x)
    problem = Problem(
        posterior=posterior,
        x=chosen.x,
        y=chosen.y,
        pre_distance=d0,
        adjusted=adjust(posterior, chosen.x),
        train=train_data,
        held_out=first,
        adjust=adjust,
        spaces=spaces,
    )
    loss_at = loss(problem)

    def evaluate(factor: float) -> Point:
        log_prob = posterior.likelihood.log_prob(adjusted_first(factor * d0_first), first.y)
        return Point(loss=float(loss_at(factor).mean()), nll=float(-log_prob.mean()))

    lead = 1.0 if posterior.prior is None else posterior.prior.lead
    typical = torch.cat([d0[d0 > 0], d0_first[d0_first > 0]]).double().median()
    phi, curve = search(evaluate, scale, 1 / (float(typical) * lead), guard, candidates)
    evidence = _fit_evidence(posterior, fitted, further, adjusted_first, raw_first, first.x, second.x)
    return Calibrated(
        posterior=posterior,
        distance=fitted,
        scale=scale,
        phi=phi,
        adjust=adjust,
        evidence=evidence,
        curve=curve,
        notes=(*notes, f"calibrated on {chosen.origin}"),
        example=train_data.x[:1].clone(),
    )


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A posterior that knows how far an input lies from its training data.

    Attributes:
        posterior: the base posterior.
        distance: fitted pre-distance d0.
        scale: g.
        phi: φ, calibrated.
        adjust: how the posterior is adjusted.
        evidence: OOD score and p-values.
        curve: loss and held-out NLL over φ.
        notes: what was decided on the way, in words.
        example: one training input, for the shape and dtype that inputs must have.
    """

    posterior: Posterior
    distance: Distance
    scale: Scale
    phi: float
    adjust: Adjustment
    evidence: Evidence
    curve: Curve
    notes: tuple[str, ...]
    example: Tensor

    def __call__(self, x: Tensor) -> Prediction:
        """Independent predictions at a batch of inputs. Memory: outputs of S draws, S × N × C numbers a few times."""
        check_inputs(x, "x", like=self.example)
        raw = self.distance.raw(x)
        return self._predict(x, raw, self.distance.combine(raw), is_joint=False)

    def joint(self, x: Tensor) -> Prediction:
        """One prediction for a set of inputs: one distance for all of them (paper, section 3.1)."""
        check_inputs(x, "x", like=self.example)
        raw = self.distance.raw(x)
        prediction = self._predict(x, raw, self.distance.joint(x).expand(len(x)), is_joint=True)
        if prediction.ensemble.spread.any():
            raise ValueError(
                "A joint prediction needs draws, and the closed form of Inflate has a spread alone; calibrate with "
                "adjust=Inflate(drawn=True)"
            )
        return prediction

    def save(self, path: str | Path) -> None:
        """Write everything but the network's code to one file; see `dapcal.artifact`."""
        from dapcal.artifact import save

        save(self, path)

    @property
    def factor(self) -> float:
        """g(φ)."""
        return float(self.scale(torch.tensor(self.phi, dtype=torch.float64)))

    def _predict(self, x: Tensor, raw: Tensor, pre_distance: Tensor, is_joint: bool) -> Prediction:
        adjusted = self.adjust(self.posterior, x)
        base = adjusted(torch.zeros_like(pre_distance))
        distance = self.factor * pre_distance
        ensemble = adjusted(distance)
        if isinstance(self.adjust, Reweight):
            _warn_if_collapsed(ensemble)
        further = _raw_in(self.evidence.further, x)
        score = self.evidence.score(pieces_of(self.posterior.likelihood, base, raw, further))
        gaussian, prior = self.posterior.gaussian, self.posterior.prior
        return Prediction(
            likelihood=self.posterior.likelihood,
            ensemble=ensemble,
            base_ensemble=base,
            pre_distance=pre_distance,
            distance=distance,
            ood_score=score.to(ensemble.outputs.dtype),
            ood_p_value=self.evidence.p_value(score).to(ensemble.outputs.dtype),
            contracted=0 if gaussian is None or prior is None else gaussian.contracted(prior),
            is_joint=is_joint,
        )


def in_domain(posterior: Posterior, held_out: Labelled) -> Posterior:
    """The posterior with the temperature or noise level that minimises the held-out negative log-likelihood."""
    from scipy.optimize import minimize_scalar

    if not is_dataclass(posterior) or isinstance(posterior, type):
        raise TypeError(f"{type(posterior).__name__} is no dataclass: calibrate its likelihood before, and pass it in")
    outputs = posterior.outputs(held_out.x)
    y = held_out.y.to(outputs.device)

    def nll(log_factor: float) -> float:
        likelihood = posterior.likelihood.rescaled(math.exp(log_factor))
        return float(-likelihood.log_prob(base_ensemble(likelihood, outputs), y).mean())

    best = minimize_scalar(nll, bounds=(-4, 4), method="bounded", options={"xatol": 1e-4}).x
    return replace(posterior, likelihood=posterior.likelihood.rescaled(math.exp(best)))


def _check_targets(posterior: Posterior, train: Labelled, held_out: Labelled) -> tuple[Labelled, Labelled]:
    """Targets in the shape the likelihood wants; every held-out class was seen in training."""
    one = outputs_with_spread(posterior, train.x[:1])[0]  # (1, C)
    likelihood = posterior.likelihood
    train = Labelled(train.x, likelihood.check(one.expand(len(train.x), -1), train.y.to(one.device)))
    held_out = Labelled(held_out.x, likelihood.check(one.expand(len(held_out.x), -1), held_out.y.to(one.device)))
    if isinstance(likelihood, _Classes):
        unseen = sorted(set(held_out.y.unique().tolist()) - set(train.y.unique().tolist()))
        if unseen:
            raise ValueError(
                f"Classes {unseen} appear in `held_out` but never in `train`; train on them, or drop those rows "
                "(unknown classes belong into `ood`)"
            )
    return train, held_out


def _calibration_inputs(
    ood: Tensor | Data | OODInputs | None,
    posterior: Posterior,
    train: Labelled,
    held_out: Labelled,
    distance: Distance,
    d0_held_out: Tensor,
) -> Chosen:
    """Calibration inputs, of which at least one lies outside the radius."""
    source: OODInputs
    if ood is None:
        source = Misclassified()
    elif isinstance(ood, Tensor):
        source = Given(check_inputs(ood, "ood", like=train.x))
    elif isinstance(ood, tuple | list) or not callable(ood):
        data = gather(ood, "ood")
        check_inputs(data.x, "ood", like=train.x)
        one = posterior.outputs(data.x[:1])[0]
        source = Given(data.x, posterior.likelihood.check(one.expand(len(data.x), -1), data.y.to(one.device)))
    else:
        source = ood
    chosen = source(posterior, train, held_out)
    if bool((distance(check_inputs(chosen.x, "ood", like=train.x)) > 0).any()):
        return chosen
    outside = torch.nonzero(d0_held_out > 0).flatten()
    if not len(outside):
        raise ValueError(
            "All calibration inputs and held-out inputs are at distance 0: there is nothing to calibrate φ on; give "
            "inputs away from the training data with `ood`, or a smaller radius"
        )
    warnings.warn(
        f"The calibration inputs ({chosen.origin}) all lie inside the radius, at distance 0: calibrating on the "
        f"{len(outside)} held-out inputs outside it instead; give OOD inputs with `ood`, or a smaller radius",
        DapcalWarning,
        stacklevel=3,
    )
    rows = held_out.subset(outside.to(held_out.x.device))
    return Chosen(rows.x, rows.y, f"{len(outside)} held-out inputs outside the radius")


def _fit_evidence(
    posterior: Posterior,
    distance: Distance,
    further: tuple[FittedSpace, ...],
    adjusted_first: Adjusted,
    raw_first: Tensor,
    first: Tensor,
    second: Tensor,
) -> Evidence:
    likelihood = posterior.likelihood
    base_first = adjusted_first(torch.zeros(len(first)))
    base_second = base_ensemble(likelihood, posterior.outputs(second))
    scaling = pieces_of(likelihood, base_first, raw_first, _raw_in(further, first))
    conformal = pieces_of(likelihood, base_second, distance.raw(second), _raw_in(further, second))
    return fit_evidence(further, scaling, conformal)


def _raw_in(spaces: tuple[FittedSpace, ...], x: Tensor) -> Tensor:
    return stack_on_first([space.raw(x) for space in spaces]) if spaces else torch.empty(0, len(x))


def _warn_if_collapsed(ensemble: Ensemble) -> None:
    weights = importance_of(ensemble)
    draws = len(weights)
    ess, k = effective_sample_size(weights), pareto_k(weights)
    collapsed = int(((ess < min(draws / 2, max(2, draws / 10))) | (k > 0.7)).sum())
    if collapsed:
        warnings.warn(
            f"The importance weights have collapsed at {collapsed} of {len(ess)} inputs (few effective draws or Pareto "
            "k̂ > 0.7): their reweighted prediction is not to be trusted. See prediction.diagnostics, and use "
            "adjust=Inflate(), or Transport() for a Gaussian posterior",
            DapcalWarning,
            stacklevel=4,
        )
