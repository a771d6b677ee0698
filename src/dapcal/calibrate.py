"""Calibrate a posterior to distance: the file to read first.

train ──► distance d0 (projector, metric, radius)          held-out ──► radius, guard, p-values
calibration inputs x* ──► loss(φ), subject to the guard ──► φ ──► Calibrated
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from dapcal.adjust import Inflate
from dapcal.calibration.in_domain import in_domain
from dapcal.calibration.inputs import Chosen, Given, OODInputs
from dapcal.calibration.losses import Loss, Problem, Target
from dapcal.calibration.ood_score import Evidence, fit_evidence, pieces_of
from dapcal.calibration.reference import Reference, alone, choose_reference, outputs_alone
from dapcal.calibration.scales import Exp
from dapcal.calibration.search import Curve, Point, search, unsearched
from dapcal.calibration.summary import Judged, Summary, summarise
from dapcal.data import Data, Inputs, Labelled, check_inputs, gather, inputs_of, split
from dapcal.diagnostics import collapsed, effective_sample_size, importance_of, pareto_k
from dapcal.distances import Distance, Space, raw_in
from dapcal.distances.choosing import Measured, measure
from dapcal.distances.features import one_pass
from dapcal.ensembles import Evaluated, base_ensemble, outputs_with_spread, read_by
from dapcal.errors import NothingToCalibrate
from dapcal.inputs import Fields
from dapcal.likelihoods import Likelihood
from dapcal.moving import moved
from dapcal.networks import copied, head_of, packed, packed_batches, plain, shared, take
from dapcal.posteriors.plain import around, likelihood_for, outputs_at
from dapcal.predictive import Prediction, joined
from dapcal.saving import save
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, DapcalWarning, Ensemble, Posterior, Projector, Scale

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
            its targets inside, as "labels"); their lengths may differ between batches.
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
            (the network itself, or its posterior), the standard error of what φ does to it included (so few held-out
            inputs make φ cautious); None is the paper.
        temperature: calibrate in-domain first: temperature (classification) or noise level (regression). By default
            where it helps held-out rows that it was not fitted to; without a guard, as in the paper, not.
        scale: g(φ); by default `Exp()`.
        candidates: values of φ on the first grid.
        seed: of the split of the held-out data.

    Returns:
        What the user keeps: call it on inputs.
    """
    adjust, loss, scale = _options(adjust, loss, scale)
    posterior, fields, data = take(posterior, {"train": train, "held_out": held_out}, {"ood": ood})
    train_data, held, ood = gather(data["train"], "train"), gather(data["held_out"], "held_out"), data["ood"]
    rows = split(len(held.x), torch.Generator().manual_seed(seed))
    around_network = isinstance(posterior, nn.Module)
    if isinstance(posterior, nn.Module):
        posterior = _around_network(posterior, likelihood, train_data, held, rows[0], seed)
    elif likelihood is not None:
        raise TypeError(f"A posterior has its likelihood, {posterior.likelihood}, already; leave `likelihood` out")
    train_data, held = _check_data(posterior, adjust, train_data, held)
    adjust = adjust.fitted(posterior.likelihood, train_data.y)
    first, second = (held.subset(half) for half in rows)
    given, drawn = posterior, not adjust.closed_form
    reference = choose_reference(posterior, first, drawn, temperature, guard)
    posterior = reference.posterior
    likelihood = posterior.likelihood

    with shared(posterior.network, train_data.x), shared(posterior.network, first.x):
        adjusted_first = adjust(posterior, first.x)
        base = _check_spread(likelihood, adjusted_first(torch.zeros(len(first.x))))
        chooses = Evaluated(first.x, first.y, base)
        measured = measure(distance, posterior, train_data.x, chooses, train_data.y)
        raw_first, further_first = measured.distance.raw(first.x), raw_in(measured.further, first.x)
    d0_first = measured.distance.combine(raw_first)

    source = loss.inputs(_source(ood, train_data.x))
    chosen, d0 = _calibration_inputs(source, posterior, train_data, chooses, measured.distance, d0_first)
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

    base_log_prob = likelihood.log_prob(base, first.y)

    def evaluate(factor: float) -> Point:
        log_prob = likelihood.log_prob(adjusted_first(factor * d0_first), first.y)
        error = (base_log_prob - log_prob).std() / math.sqrt(len(log_prob))
        return Point(loss=float(loss_at(factor).mean()), nll=float(-log_prob.mean()), error=float(error))

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

    with shared(posterior.network, second.x):
        adjusted_second = adjust(posterior, second.x)
        raw_second, further_second = measured.distance.raw(second.x), raw_in(measured.further, second.x)
    d0_second = measured.distance.combine(raw_second)
    base_second = adjusted_second(torch.zeros_like(d0_second))
    evidence = fit_evidence(
        measured.further,
        scaling=pieces_of(likelihood, base, raw_first, further_first),
        conformal=pieces_of(likelihood, base_second, raw_second, further_second),
    )
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
            f"smallest possible p-value: {1 / (len(second.x) + 1):.3g}",
            f"calibrated on {chosen.origin}" if measured.spaces else "nothing to calibrate: no distance counts",
        ),
        example=train_data.x[:1].clone(),
        chooses=rows[0],
        judges=rows[1],
        measured=_measured(given, reference, second, drawn, judged, evidence.held_out),
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
    """

    stores = Stores()

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

    def __call__(self, x: Inputs) -> Prediction:
        """Independent predictions at a batch of inputs. Memory: outputs of S draws, S × N × C numbers a few times."""
        x = self._taken(x)
        with one_pass(self._projectors, self.posterior, x):
            adjusted = self.adjust(self.posterior, x)  # before distances: its pass over the network serves them
            raw = self.distance.raw(x)
            return self._predict(x, adjusted, raw, self.distance.combine(raw), is_joint=False)

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
        with one_pass(self._projectors, self.posterior, x):
            adjusted, raw = self.adjust(self.posterior, x), self.distance.raw(x)
            return self._predict(x, adjusted, raw, self.distance.joint(x).expand(len(x)), is_joint=True)

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
    def _projectors(self) -> tuple[Projector, ...]:
        """Where distances and the OOD score are measured."""
        return tuple(space.projector for space in (*self.distance.spaces, *self.evidence.further))

    def _predict(self, x: Tensor, adjusted: Adjusted, raw: Tensor, pre_distance: Tensor, is_joint: bool) -> Prediction:
        base = adjusted(torch.zeros_like(pre_distance))
        distance = self.factor * pre_distance
        ensemble = adjusted(distance)
        if is_joint and adjusted(torch.ones_like(pre_distance)).spread.any():
            raise ValueError(
                f"A joint prediction needs draws, and the closed form of {type(self.adjust).__name__} has a spread "
                "alone; calibrate with adjust=Inflate(drawn=True), or Transport(drawn=True) for a Gaussian posterior"
            )
        if ensemble.importance is not None:
            _warn_if_collapsed(ensemble)
        pieces = pieces_of(self.posterior.likelihood, base, raw, raw_in(self.evidence.further, x))
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


def _options(adjust: Adjustment | None, loss: Loss | None, scale: Scale | None) -> tuple[Adjustment, Loss, Scale]:
    """Defaults filled in; what cannot work is refused."""
    for name, option in (("adjust", adjust), ("loss", loss), ("scale", scale)):
        if isinstance(option, type):
            raise TypeError(
                f"Expected `{name}` as an object, got the class {option.__name__}; write {option.__name__}()"
            )
        if option is not None and not callable(option):
            raise TypeError(f"Expected `{name}` as an object of dapcal's or a callable, got {option!r}")
    for name, option, kind in (("adjust", adjust, Adjustment), ("loss", loss, Loss)):
        if option is not None and not isinstance(option, kind):
            raise TypeError(
                f"Expected `{name}` to say all that a {kind.__name__} does, but {type(option).__name__} does not; "
                f"derive it from {kind.__module__}.{kind.__name__}"
            )
    return adjust or Inflate(), loss or Target(), scale or Exp()


def _around_network(
    network: nn.Module, likelihood: Likelihood | None, train: Labelled, held_out: Labelled, chooses: Tensor, seed: int
) -> Posterior:
    """A posterior of a trained network, which stays as it is."""
    check_inputs(held_out.x, "held_out", like=train.x)
    network = copied(plain(network)).eval()
    if likelihood is None:
        likelihood = likelihood_for(network, train)
    one = outputs_at(network, train.x[:1])
    first = held_out.subset(chooses.to(held_out.x.device))
    train, first = (_check_targets(likelihood, one, data) for data in (train, first))
    return around(network, likelihood, train, first, seed)


def _measured(
    given: Posterior, reference: Reference, judges: Labelled, drawn: bool, calibrated: Judged, scores: Tensor
) -> Summary:
    """Quality before and after at the rows that judge."""
    see = read_by(given, judges.x, drawn)
    before = Judged(given.likelihood, see(given.likelihood))
    scaled, network = calibrated, None
    if reference.network is not None and (module := alone(given)) is not None:
        outputs = outputs_alone(module, judges.x)[None]
        network = Judged(given.likelihood, base_ensemble(given.likelihood, outputs))
        scaled = Judged(reference.network, base_ensemble(reference.network, outputs))
    if reference.name == "posterior":
        own = reference.posterior.likelihood
        scaled = Judged(own, see(own))
    return summarise(judges.y, network, before, scaled, reference.name, calibrated, scores)


def _check_data(
    posterior: Posterior, adjust: Adjustment, train: Labelled, held_out: Labelled
) -> tuple[Labelled, Labelled]:
    """Inputs of one shape, targets as the likelihood wants them, held-out ones of which training says something."""
    if not hasattr(posterior, "outputs"):
        raise TypeError(
            f"Expected a posterior, got {type(posterior).__name__}; fit one to your network with "
            "dapcal.posteriors.variational.fit, or bring draws with dapcal.posteriors.samples"
        )
    if not hasattr(posterior, "moments"):
        raise TypeError(
            f"Expected a posterior with `moments(x)`, and {type(posterior).__name__} has none; let it return None "
            "where there is no closed form"
        )
    check_inputs(held_out.x, "held_out", like=train.x)
    if len(held_out.x) < 4:
        raise ValueError(f"Expected at least 4 held-out inputs, got {len(held_out.x)}; hold out more")
    moments = posterior.moments(train.x[:1]) if adjust.closed_form else None
    one = outputs_with_spread(posterior, train.x[:1])[0] if moments is None else moments.mean  # (1, C)
    train, held_out = (_check_targets(posterior.likelihood, one, data) for data in (train, held_out))
    posterior.likelihood.check_held_out(train.y, held_out.y)
    return train, held_out


def _check_targets(likelihood: Likelihood, one: Tensor, data: Labelled) -> Labelled:
    """Targets as the likelihood wants them, given outputs `one` (1, C) of one input."""
    return Labelled(data.x, likelihood.check(one.expand(len(data.x), -1), data.y.to(one.device)))


def _check_spread(likelihood: Likelihood, base: Ensemble) -> Ensemble:
    draws = len(importance_of(base))  # completed weights have one more, the uniform answer
    if not base.spread.any() and not likelihood.location_variance(base.outputs[:draws]).any():
        raise ValueError(
            "All draws give the same outputs at all held-out inputs: there is no spread to inflate, move or weight. "
            "Check that the posterior's draws differ"
        )
    return base


def _source(ood: Inputs | Data | OODInputs | None, train: Tensor) -> OODInputs | None:
    """Where the calibration inputs that were asked for come from."""
    if ood is None:
        return None
    if isinstance(ood, Tensor):
        return Given(check_inputs(ood, "ood", like=train))
    if isinstance(ood, tuple | list) or not callable(ood):
        data = gather(cast("Data", ood), "ood")
        return Given(check_inputs(data.x, "ood", like=train), data.y)
    return ood


def _calibration_inputs(
    source: OODInputs,
    posterior: Posterior,
    train: Labelled,
    held_out: Evaluated,
    distance: Distance,
    d0_held_out: Tensor,
) -> tuple[Chosen, Tensor]:
    """Calibration inputs, of which at least one lies outside the radius, and their d0."""
    chosen = source(posterior, train, held_out)
    d0 = distance(check_inputs(chosen.x, "ood", like=train.x))
    if d0.any() or not distance.spaces:
        return chosen, d0
    outside = torch.nonzero(d0_held_out > 0).flatten()
    if not len(outside):
        raise NothingToCalibrate(
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
    return Chosen(rows.x, rows.y, f"{len(outside)} held-out inputs outside the radius"), d0_held_out[outside]


def _warn_if_collapsed(ensemble: Ensemble) -> None:
    weights = importance_of(ensemble)
    ess, k = effective_sample_size(weights), pareto_k(weights)
    count = int(collapsed(ess, k, len(weights)).sum())
    if count:
        warnings.warn(
            f"The importance weights have collapsed at {count} of {len(ess)} inputs (few effective draws or Pareto "
            "k̂ > 0.7): their reweighted prediction is not to be trusted. See prediction.diagnostics, and use "
            "adjust=Inflate(), or Transport() for a Gaussian posterior",
            DapcalWarning,
            stacklevel=4,
        )
