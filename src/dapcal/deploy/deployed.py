"""`Calibrated.__call__` as an nn.Module: the same maths, with nothing that looks at the values of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from dapcal.adjust import Inflate, Revert, Unchanged
from dapcal.calibration.ood_score import Evidence, pieces_of
from dapcal.data import Inputs
from dapcal.deploy.fitted import Fitted
from dapcal.deploy.posteriors import Seen, posterior_module
from dapcal.deploy.spaces import Entering, SpaceModule
from dapcal.distances.projectors import LayerFeatures, MemberFeatures
from dapcal.inputs import Fields
from dapcal.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
    NoiseHead,
    Poisson,
    Unconditional,
    VaryingNoise,
)
from dapcal.networks import reads
from dapcal.predictive import Prediction

LIKELIHOODS = (Categorical, Bernoulli, MultiLabel, Gaussian, NoiseHead, Poisson, VaryingNoise)


def module(calibrated: Fitted) -> Deployed:
    """The module that predicts what `calibrated` does; weights, training points and all numbers are its own copies."""
    if not isinstance(calibrated, Fitted):
        raise TypeError(f"Expected what dapcal.calibrate returns, got {type(calibrated).__name__}")
    adjust, likelihood = calibrated.adjust, calibrated.posterior.likelihood
    if not isinstance(adjust, Inflate | Revert | Unchanged) or (not isinstance(adjust, Revert) and adjust.drawn):
        raise TypeError(
            "Expected adjust=Inflate(), the default, Revert() or Unchanged(), the closed forms that deploy, got "
            f"{adjust}; calibrate with one of them, or predict with calibrated(x)"
        )
    if type(likelihood) not in LIKELIHOODS:
        names = ", ".join(kind.__name__ for kind in LIKELIHOODS)
        raise TypeError(
            f"Expected one of dapcal's likelihoods ({names}), got {type(likelihood).__name__}; predict with "
            "calibrated(x)"
        )
    return Deployed(calibrated, adjust)


class Predicted(NamedTuple):
    """The tensors of a prediction, as `dapcal.predictive.Prediction` names them.

    They agree with those of `calibrated(x)` up to rounding. For an input that was itself held out rounding decides a
    tie, and its p-value may be off by one step, 1/(n + 1).
    """

    mean: Tensor  # (N, K) class or label probabilities, or expected targets
    variance: Tensor  # (N,) for classes: 1 − Σ p²; (N, K) for labels and targets
    epistemic: Tensor  # as variance
    aleatoric: Tensor  # as variance
    distance: Tensor  # (N,)
    ood_score: Tensor  # (N,)
    ood_p_value: Tensor  # (N,) in float64


class Deployed(nn.Module):
    """What `module` returns. Its state dict holds every number that predictions depend on.

    Inputs must be on its device. One that holds NaN or inf gets NaN in every field, for a program cannot refuse it.
    Memory: N × 16,384 float64 numbers for the search among training points, k + 8 of those points for every input, and
    the outputs of all draws; split large batches. Training points and distances are in float64, so move the module by
    `.to(device)`, not to another dtype.
    """

    start: Tensor
    unit: Tensor
    factor: Tensor
    lead: Tensor
    center: Tensor
    scale: Tensor
    held_out: Tensor
    weights: Tensor

    def __init__(self, calibrated: Fitted, adjust: Inflate | Revert | Unchanged) -> None:
        super().__init__()
        posterior, distance, evidence = calibrated.posterior, calibrated.distance, calibrated.evidence
        self.shape, self.dtype = tuple(calibrated.example.shape[1:]), calibrated.example.dtype
        self.fields = reads(posterior.network)
        spaces = (*distance.spaces, *evidence.further)
        by_draw = {space.projector.layer for space in spaces if isinstance(space.projector, MemberFeatures)}
        self.posterior = posterior_module(posterior, calibrated.example, sorted(by_draw))
        before = calibrated.before
        self.before = None if before is None else posterior_module(before, calibrated.example, sorted(by_draw))
        self.spaces = nn.ModuleList(SpaceModule(space, posterior, calibrated.example) for space in spaces)
        layers = {space.projector.layer for space in spaces if isinstance(space.projector, LayerFeatures)}
        self.entering = Entering(posterior.network, layers.union(self.posterior.layers))
        self.reverts = isinstance(adjust, Revert)
        limit = (
            None if isinstance(adjust, Unchanged) else adjust.targets if isinstance(adjust, Revert) else adjust.limit
        )
        self.limit = Limit(limit) if isinstance(limit, Unconditional) else None
        # unchanged: inflated by a distance of 0
        lead = 1.0 if posterior.prior is None else posterior.prior.lead
        self.kind: Callable[..., Likelihood] = type(posterior.likelihood)
        settings = {name: v for name, v in vars(posterior.likelihood).items() if name != "conformal"}  # of intervals
        self.settings = tuple(settings)  # names: temperature, noise, ...
        names = ("beside", "alone", "times", "sum_center", "sum_scale", "soft")
        self.combination = {name: getattr(evidence, name) for name in names}
        radii = [(0.0, 1.0) if s.radius is None else (s.radius.start, s.radius.unit) for s in distance.spaces]
        numbers = {
            "start": [[start] for start, _ in radii],
            "unit": [[unit] for _, unit in radii],
            "factor": calibrated.factor,
            "lead": lead if adjust.heeds_distance else 0.0,
            "center": evidence.center,
            "scale": evidence.scale,
            "held_out": evidence.held_out,
            "weights": torch.ones(len(evidence.center) - evidence.beside)
            if evidence.weights is None
            else evidence.weights,
            **{f"likelihood_{name}": value for name, value in settings.items()},
        }
        for name, value in numbers.items():
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float64).clone())
        self.to(next(iter(self.posterior.state_dict().values())).device)
        self.eval()

    def forward(self, x: Inputs) -> Predicted:
        """Predictions at a batch of inputs as the network takes them, (N, ...) each, each input on its own."""
        x = self._packed(x) if self.fields is not None and not isinstance(x, Tensor) else cast("Tensor", x)
        longer = self.fields is not None and self.fields.varies and self.fields.holds(x)  # or shorter
        if not longer and (tuple(x.shape[1:]) != self.shape or x.dtype != self.dtype):
            raise ValueError(
                f"Expected inputs (N, {', '.join(map(str, self.shape))}) of {self.dtype} as in training, got "
                f"{tuple(x.shape)} of {x.dtype}"
            )
        likelihood = self.kind(**{name: self.get_buffer(f"likelihood_{name}") for name in self.settings})
        entering = self.entering(x)
        outputs = self.posterior(x, entering)  # before distances: members leave there what enters their layers
        before = outputs if self.before is None else self.before(x, entering)  # after it, as distances are theirs
        nothing = self.factor * torch.zeros_like(x.flatten(1)[:, 0], dtype=torch.float64)  # (N,)
        distances = [space(x, entering) for space in self.spaces]
        raw = torch.stack([nothing, *distances])[1:]  # (spaces, N)
        raw, further = raw[: len(self.start)], raw[len(self.start) :]
        pre_distance = ((raw - self.start) / self.unit).clamp_min(0).amax(0) if len(self.start) else nothing
        distance = self.factor * pre_distance

        limit = cast("Unconditional | None", self.limit)
        adjust = Revert(limit) if self.reverts else Inflate(limit=limit)
        adjusted = adjust(Seen(likelihood, outputs), x)
        base = adjusted(torch.zeros_like(distance))
        doubted = base if self.before is None else adjust(Seen(likelihood, before), x)(torch.zeros_like(distance))
        evidence = Evidence((), self.center, self.scale, self.held_out, weights=self.weights, **self.combination)
        score = evidence.score(pieces_of(likelihood, doubted, raw, further))
        # what `Evidence.p_value` finds by a sorted search, which ONNX does not have
        p_value = (1 + (self.held_out >= score[:, None]).sum(1)).double() / (len(self.held_out) + 1)
        prediction = Prediction(
            likelihood=likelihood,
            ensemble=adjusted(self.lead * distance),
            base_ensemble=base,
            pre_distance=pre_distance,
            distance=distance,
            ood_score=score,
            ood_p_value=p_value,
        )
        values = {name: getattr(prediction, name) for name in Predicted._fields}
        dtypes = {name: torch.float64 if name == "ood_p_value" else prediction.mean.dtype for name in values}
        predicted = Predicted(*(value.to(dtypes[name]) for name, value in values.items()))
        return _where_finite(x, predicted) if x.is_floating_point() else predicted

    def _packed(self, x: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """Several inputs, by their names or in their order, as one tensor."""
        fields = cast("Fields", self.fields)
        parts = dict(x) if isinstance(x, Mapping) else dict(zip(fields.names, x, strict=True))
        missing = [name for name in fields.names if name not in parts]
        if missing:
            raise ValueError(f"Expected inputs {list(fields.names)}, got {list(parts)}; add {missing}")
        return fields.side_by_side(parts, fields.places(parts))

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stays in evaluation mode: with dropout or batch statistics it would be another model."""
        return super().train(False)


def _where_finite(x: Tensor, predicted: Predicted) -> Predicted:
    """NaN in every field for inputs that are not finite."""
    finite = x.flatten(1).isfinite().all(1)
    return Predicted(*(v.where(finite if v.ndim == 1 else finite[:, None], torch.nan) for v in predicted))


class Limit(nn.Module):
    """`Unconditional` with its numbers as buffers."""

    mean: Tensor
    variance: Tensor

    def __init__(self, limit: Unconditional) -> None:
        super().__init__()
        self.own_spread = limit.own_spread
        self.register_buffer("mean", torch.tensor(limit.mean, dtype=torch.float64))
        self.register_buffer("variance", torch.tensor(limit.variance, dtype=torch.float64))

    def variance_around(self, location: Tensor) -> Tensor:
        """As `Unconditional` has it, (N, K)."""
        return self.variance.expand_as(location) if self.own_spread else self.variance + (location - self.mean) ** 2
