"""Calibrate a posterior to distance: the file to read first.

train ──► distance d0 (projector, metric, radius)          held-out ──► radius, guard, p-values
calibration inputs x* ──► loss(φ), subject to the guard ──► φ ──► Calibrated
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dapcal.calibration.checks import check_data, check_spread, options, told_of_rows
from dapcal.calibration.guard import Rows, crossed
from dapcal.calibration.in_domain import in_domain
from dapcal.calibration.inputs import OODInputs, calibration_inputs, source_of
from dapcal.calibration.losses import Loss, Problem
from dapcal.calibration.ood_score import Evidence, fit_evidence, pieces_of
from dapcal.calibration.reference import choose_reference
from dapcal.calibration.search import Curve, Point, search, unsearched
from dapcal.calibration.summary import Judged, Summary, before_and_after
from dapcal.calibration.weighing import weigh
from dapcal.data import Data, Inputs, check_inputs, gather, inputs_of, split
from dapcal.diagnostics import warn_if_collapsed
from dapcal.distances import Distance, FittedSpace, Space, raw_in
from dapcal.distances.choosing import Measured, measure
from dapcal.distances.features import OnePass, in_place_of, one_pass
from dapcal.distances.once import searched_once
from dapcal.distances.spread import Spread
from dapcal.engines import Engine, named
from dapcal.ensembles import Evaluated, seen
from dapcal.inputs import Fields
from dapcal.likelihoods import Likelihood
from dapcal.moving import moved
from dapcal.networks import head_of, packed, packed_batches, shared, take
from dapcal.posteriors.plain import around_given
from dapcal.predictive import Prediction, joined
from dapcal.saving import save
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, Ensemble, Posterior, Scale

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from dapcal.deploy import Deployed


def calibrate(
    posterior: Posterior | nn.Module,
    likelihood: Likelihood | None = None,
    *,
    train: Data,
    held_out: Data,
    ood: Inputs | Data | OODInputs | None = None,
    distance: Space | Sequence[Space] | Measured | None = None,
    adjust: Adjustment | None = None,
    loss: Loss | None = None,
    guard: float | None = 0.01,
    temperature: bool | None = None,
    scale: Scale | None = None,
    candidates: int = 100,
    seed: int = 0,
    engine: Engine | str | None = None,
) -> Calibrated:
    """Choose φ, so that predictions become as uncertain as they should be away from the training inputs.

    Args:
        posterior: a trained network, or any posterior with at least two draws. A network gets a Laplace
            approximation of its last layer, with the σ0 that is best for the half of the held-out data that chooses φ.
        likelihood: p(y | outputs) of a network; by default `Categorical()` for whole-number targets, one output a
            class, `Bernoulli()` for one logit, `MultiLabel()` for zeros and ones (N, L), and `Gaussian` for fractions.
            A posterior has its own.
        train: the data it was fitted to, whose inputs distances are measured from: (inputs, targets), a Dataset or a
            DataLoader. Inputs are what the network takes: a tensor, several (`((a, b), targets)`), or a dict (with
            its targets inside, as "labels"); their lengths may differ between batches. A Dataset or DataLoader is
            read once, and many inputs go to a temporary file as they come.
        held_out: in-distribution data it was not fitted to. Half of it (by `seed`) chooses φ, radius and scales,
            the other half gives p-values. A hundred or more are a good start.
        ood: calibration inputs: a tensor, data with targets, or one of `dapcal.calibration.inputs`. By default the
            misclassified held-out inputs (the hardest 30 % in regression, or if fewer than 10 are wrong).
        distance: where distances are measured; several spaces count by the largest. By default features and inputs,
            each where it is informative, outside the 90 % radius. What `dapcal.distances.informative` has found on
            the same training inputs serves again, e.g. for another adjustment.
        adjust: how the posterior is adjusted; by default `Inflate()`. `Reweight()` is the paper.
        loss: what φ minimises; by default `Target()`, the paper's.
        guard: nats by which the held-out negative log-likelihood may rise above the best of what was there before
            (the network itself, or its posterior), with what few held-out inputs may hide included
            (`dapcal.calibration.guard`), so that few make φ cautious; None is the paper.
        temperature: calibrate in-domain first: temperature (classification) or noise level (regression). By default
            where it helps held-out rows that it was not fitted to; without a guard, as in the paper, not.
        scale: g(φ); by default `Exp()`.
        candidates: values of φ on the first grid.
        seed: of the split of the held-out data.
        engine: where features of the training inputs are computed and their neighbours looked for: "ray", the cluster
            that this machine is a node of, or an engine of `dapcal.engines`; by default here. What comes back holds
            everything, and is the same.

    Returns:
        What the user keeps: call it on inputs.
    """
    adjust, loss, scale = options(adjust, loss, scale)
    posterior, fields, data = take(posterior, {"train": train, "held_out": held_out}, {"ood": ood})
    train_data, held, ood = gather(data["train"], "train"), gather(data["held_out"], "held_out"), data["ood"]
    rows = split(len(held.x), torch.Generator().manual_seed(seed))
    around_network = isinstance(posterior, nn.Module)
    if isinstance(posterior, nn.Module):
        posterior = around_given(posterior, likelihood, train_data, held, rows[0], seed)
    elif likelihood is not None:
        raise TypeError(f"A posterior has its likelihood, {posterior.likelihood}, already; leave `likelihood` out")
    train_data, held = check_data(posterior, adjust, train_data, held)
    adjust = adjust.fitted(posterior.likelihood, train_data.y)
    first, second = (held.subset(half) for half in rows)
    given, drawn = posterior, not adjust.closed_form
    reference = choose_reference(posterior, first, drawn, temperature, guard)
    posterior = reference.posterior
    likelihood = posterior.likelihood

    spread = Spread(None if engine is None else named(engine), train_data.x)
    with (
        spread.open(),
        shared(posterior.network, train_data.x),
        shared(posterior.network, first.x),
        searched_once(first.x),
    ):
        adjusted_first = adjust(posterior, first.x)
        base = check_spread(likelihood, adjusted_first(torch.zeros(len(first.x))))
        chooses = Evaluated(first.x, first.y, base)
        measured = measure(distance, posterior, train_data.x, chooses, train_data.y)
        if reference.share < 1 and not (measured.spaces and adjust.heeds_distance):  # the guard is left to the spread
            reference = choose_reference(given, first, drawn, temperature, guard, whole=True)
            posterior, likelihood = reference.posterior, reference.posterior.likelihood
            adjusted_first = adjust(posterior, first.x)
            base = adjusted_first(torch.zeros(len(first.x)))
        raw_first, further_first = measured.distance.raw(first.x), raw_in(measured.further, first.x)
    d0_first = measured.distance.combine(raw_first)

    source = loss.inputs(source_of(ood, train_data.x))
    chosen, d0 = calibration_inputs(source, posterior, train_data, chooses, measured.distance, d0_first)
    problem = Problem(
        posterior=posterior,
        x=chosen.x,
        y=chosen.y,
        pre_distance=d0,
        adjusted=adjust(posterior, chosen.x),
        train=train_data,
        adjust=adjust,
        spaces=measured.spaces,
        in_domain=partial(in_domain, drawn=drawn) if likelihood != given.likelihood else None,
        share=reference.share,
        given=given if given is not posterior else None,
        around_network=around_network,
    )
    loss_at = loss(problem) if measured.spaces else lambda _: d0

    counted = Rows(
        likelihood, base, first.y, adjusted_first, d0_first, crossed(measured.spaces, measured.distance, raw_first)
    )

    def evaluate(factor: float) -> Point:
        nll, error = counted.at(factor)
        return Point(loss=float(loss_at(factor).mean()), nll=nll, error=error)

    if measured.spaces and adjust.heeds_distance:
        lead = 1.0 if posterior.prior is None else posterior.prior.lead
        typical = float(torch.cat([d0[d0 > 0], d0_first[d0_first > 0]]).double().median())
        phi, curve = search(
            evaluate,
            scale,
            unit=1 / (typical * lead),
            guard=guard,
            candidates=candidates,
            limited=adjust.limited,
            reference=float(-reference.log_prob.mean()),
        )
    else:
        phi, curve = unsearched(evaluate(0.0), scale, guard, float(-reference.log_prob.mean()))

    with spread.open(), shared(posterior.network, second.x):
        adjusted_second = adjust(posterior, second.x)
        raw_second, further_second = measured.distance.raw(second.x), raw_in(measured.further, second.x)
    d0_second = measured.distance.combine(raw_second)
    base_second = adjusted_second(torch.zeros_like(d0_second))
    scaling = pieces_of(likelihood, base, raw_first, further_first)
    with spread.open():
        weighed = weigh(posterior, adjust, measured, train_data.x, first.x, scaling)
    conformal = pieces_of(likelihood, base_second, raw_second, further_second)
    evidence = fit_evidence(measured.further, scaling, conformal, weighed.weights)
    factor = float(scale(torch.tensor(phi, dtype=torch.float64)))
    judged = Judged(likelihood, adjusted_second(factor * d0_second))
    return Calibrated(
        posterior=posterior,
        distance=measured.distance,
        scale=scale,
        phi=phi,
        adjust=adjust,
        evidence=evidence,
        curve=curve,
        notes=(
            *reference.notes,
            *measured.notes,
            *weighed.notes,
            told_of_rows(len(held.x), len(second.x)),
            f"calibrated on {chosen.origin}" if measured.spaces else "nothing to calibrate: no distance counts",
        ),
        example=train_data.x[:1].clone(),
        chooses=rows[0],
        judges=rows[1],
        measured=before_and_after(given, reference, second, drawn, judged, evidence.held_out),
        inputs=fields,
        head=head_of(posterior.network),
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
        chooses: rows of the held-out data that chose φ, the radius and scales; None in files of earlier versions.
        judges: rows of the held-out data that p-values are read from; on these nothing was chosen.
        measured: quality before and after at the rows that judge; None in files of earlier versions.
        inputs: the fields that a network takes (a dict, several tensors, several lengths), which lie in one tensor
            inside; None where it takes one tensor of one shape.
        head: a last layer that is applied after the places of a text are pooled, while the network itself does it
            before, which is the same; None where there is none.
        before: members as they were before they were trained again on all rows, the held-out ones among them: by these
            an input is doubted that is scored; None where nothing was trained again.
    """

    stores = Stores(again="before")

    posterior: Posterior
    distance: Distance
    scale: Scale
    phi: float
    adjust: Adjustment
    evidence: Evidence
    curve: Curve
    notes: tuple[str, ...]
    example: Tensor
    chooses: Tensor | None = None
    judges: Tensor | None = None
    measured: Summary | None = None
    inputs: Fields | None = None
    head: str | None = None
    before: Posterior | None = None

    def __call__(self, x: Inputs) -> Prediction:
        """Independent predictions at a batch of inputs. Memory: outputs of S draws, S × N × C numbers a few times."""
        x = self._taken(x)
        with self._pass.over(x):
            adjusted, doubted = self._seen(x)
            raw = self.distance.raw(x)
            return self._predict(x, adjusted, doubted, raw, self.distance.combine(raw))

    def predict(self, data: Inputs | Data, batch_size: int = 512) -> Prediction:
        """Predictions at any number of inputs, a batch at a time; targets beside them are not looked at.

        Memory: the outputs of all draws at all inputs come back, S × N × C numbers; `batches` hands them out one by
        one.

        Args:
            data: inputs as in `calibrate`, (inputs, targets), a Dataset or a DataLoader.
            batch_size: inputs at a time, where the data are not a DataLoader.
        """
        return joined(self.batches(data, batch_size))

    def batches(self, data: Inputs | Data, batch_size: int = 512) -> Iterator[Prediction]:
        """The same batch by batch, in main memory."""
        if batch_size < 1:
            raise ValueError(f"Expected `batch_size` >= 1, got {batch_size}")
        fields = self.inputs
        for x in inputs_of(data, batch_size) if fields is None else packed_batches(data, fields, batch_size):
            yield self(x.to(self.example.device)).cpu()

    def to(self, device: str | torch.device) -> Calibrated:
        """The same with everything on another device."""
        return moved(self, torch.device(device))

    def joint(self, x: Inputs) -> Prediction:
        """One prediction for a set of inputs: one distance for all of them (paper, section 3.1)."""
        x = self._taken(x)
        with self._pass.over(x), searched_once(x):
            adjusted, doubted = self._seen(x)
            distance = self.distance.joint(x).expand(len(x))
            return self._predict(x, adjusted, doubted, self.distance.raw(x), distance, is_joint=True)

    def with_likelihood(self, likelihood: Likelihood) -> Calibrated:
        """The same with another likelihood of the same outputs (wider intervals); features come from it, too."""
        old = self.posterior
        new: Posterior = replace(old, likelihood=likelihood)  # type: ignore[type-var]

        def moved_to(space: FittedSpace) -> FittedSpace:
            return replace(space, projector=in_place_of(old, new, space.projector))

        return replace(
            self,
            posterior=new,
            distance=Distance(tuple(moved_to(space) for space in self.distance.spaces)),
            evidence=replace(self.evidence, further=tuple(moved_to(space) for space in self.evidence.further)),
        )

    @cached_property
    def judging(self) -> Calibrated:
        """The same as it was before members were trained again: what held-out rows may be shown to."""
        return self if self.before is None else replace(self, posterior=self.before, before=None)

    def summary(self) -> Summary:
        """What was there before and what is there now, at held-out rows that chose nothing; print it.

        Nothing is accepted, rejected or chosen by these numbers.
        """
        if self.measured is None:
            raise ValueError("This file is of an earlier version, which kept no summary; calibrate again to have one")
        return self.measured

    def __repr__(self) -> str:
        spaces = ", ".join(space.name for space in self.distance.spaces) or "no space"
        return f"Calibrated(phi={self.phi:.4g}, adjust={self.adjust}, distance in: {spaces})"

    def save(self, path: str | Path, sign: str | Path | Ed25519PrivateKey | None = None) -> None:
        """Write everything but the network's code to one file, signed by a key or not; see `dapcal.artifact`."""
        save(self, path, sign=sign)

    def module(self) -> Deployed:
        """The same predictions as one nn.Module of tensors, for torch.export and ONNX (`dapcal.deploy`)."""
        from dapcal.deploy import module  # costs an import that few need

        return module(self)

    @property
    def factor(self) -> float:
        """g(φ)."""
        return float(self.scale(torch.tensor(self.phi, dtype=torch.float64)))

    def _taken(self, x: Inputs) -> Tensor:
        """Inputs as one tensor, like those in training."""
        if self.inputs is not None:
            return packed(x, self.inputs, "x")
        return check_inputs(x, "x", like=self.example)  # type: ignore[arg-type]

    @cached_property
    def _pass(self) -> OnePass:
        """Over inputs, for the distances and the OOD score, too."""
        spaces = (*self.distance.spaces, *self.evidence.further)
        return one_pass((space.projector for space in spaces), self.before or self.posterior)

    def _seen(self, x: Tensor) -> tuple[Adjusted, Ensemble]:
        """The posterior, and that which an input is doubted by; before distances, which their passes serve."""
        adjusted = self.adjust(self.posterior, x)
        doubted = adjusted(x.new_zeros(len(x), dtype=torch.float64)) if self.before is None else seen(self.before, x)
        return adjusted, doubted

    def _predict(
        self,
        x: Tensor,
        adjusted: Adjusted,
        doubted: Ensemble,
        raw: Tensor,
        pre_distance: Tensor,
        is_joint: bool = False,
    ) -> Prediction:
        base = doubted if self.before is None else adjusted(torch.zeros_like(pre_distance))
        distance = self.factor * pre_distance
        ensemble = adjusted(distance)
        if is_joint and adjusted(torch.ones_like(pre_distance)).spread.any():
            raise ValueError(
                f"A joint prediction needs draws, and the closed form of {type(self.adjust).__name__} has a spread "
                "alone; calibrate with adjust=Inflate(drawn=True), or Transport(drawn=True) for a Gaussian posterior"
            )
        if ensemble.importance is not None:
            warn_if_collapsed(ensemble)
        pieces = pieces_of(self.posterior.likelihood, doubted, raw, raw_in(self.evidence.further, x))
        score = self.evidence.score(pieces)
        gaussian, prior = self.posterior.gaussian, self.posterior.prior
        return Prediction(
            likelihood=self.posterior.likelihood,
            ensemble=ensemble,
            base_ensemble=base,
            pre_distance=pre_distance,
            distance=distance,
            ood_score=score.to(ensemble.outputs.dtype),
            ood_p_value=self.evidence.p_value(score),  # float64: a p-value is a share of whole numbers
            contracted=0 if gaussian is None or prior is None else gaussian.contracted(prior),
            is_joint=is_joint,
            evidence=self.evidence.by_name(pieces, self.distance.spaces),
        )
