"""Gaussian likelihoods of targets: one noise level, or noise that depends on the input."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from dapcal.likelihoods.base import Interval, Likelihood, Unconditional, numbers_in_columns
from dapcal.likelihoods.conformal import Conformal, Moments
from dapcal.records import Conditional, Ensemble
from dapcal.storing import Stores


class NormalLikelihood(Likelihood):
    """What both Gaussian likelihoods share: moments, densities, samples and intervals of a location and a noise."""

    conformal: Conformal | None

    @abstractmethod
    def _location_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Locations and noise standard deviations."""

    def conditional(self, outputs: Tensor) -> Conditional:
        """Location, noise variance and differential entropy of every draw."""
        location, noise = self._location_and_noise(outputs.double())
        noise = noise.expand_as(location)
        return Conditional(location, noise**2, (noise.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """log N(y | location, noise²), summed over targets."""
        location, noise = self._location_and_noise(outputs)
        return log_normal(y, location, noise**2).sum(-1)

    def entropy(self, ensemble: Ensemble) -> Tensor:
        """Differential entropy of the Gaussian of the moments, (N,)."""
        return 0.5 * torch.log(2 * math.pi * math.e * self.variance(ensemble)).sum(-1)

    def shifted(self, outputs: Tensor, by: Tensor) -> Tensor:
        """Locations, which are the first outputs, plus `by`; noises as they are."""
        location = outputs[..., : by.shape[-1]] + by.to(outputs.dtype)
        return torch.cat([location, outputs[..., by.shape[-1] :]], -1)

    def unconditional(self, y: Tensor) -> Unconditional:
        """Their mean and variance."""
        return Unconditional(tuple(y.double().mean(0).tolist()), tuple(y.double().var(0, correction=0).tolist()))

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """Density of the Gaussian that has the predictive mean and variance, (N,)."""
        return log_normal(y, self.mean(ensemble), self.variance(ensemble)).sum(-1)

    def log_prob_mixture(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log Σ_s w_s N(y | location_s, noise_s² + spread), (N,)."""
        mean, variance, _ = ensemble.conditional
        density = log_normal(y, mean, variance + ensemble.spread).sum(-1)
        return torch.logsumexp(ensemble.log_weights + density, 0)

    def columns(self, ensemble: Ensemble, base: Ensemble, level: float) -> dict[str, Tensor]:
        """Mean, interval, and the parts of the standard deviation, (N, K) each."""
        found = numbers_in_columns(self, ensemble, base, level)
        return {**found, "prediction": self.bounded(found["prediction"])}

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """Targets from the Gaussian of the moments, (n, N, K)."""
        mean, variance = self.mean(ensemble), self.variance(ensemble)
        noise = torch.randn(n, *mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return mean + variance.sqrt() * noise

    def interval(self, ensemble: Ensemble, level: float) -> Interval:
        """Mean ± z · standard deviation of the Gaussian of the moments, or as `conformal` says."""
        if self.conformal is None or not len(self.conformal.scores) or self.conformal.folds == 1:
            return self.interval_of(self.mean(ensemble), self.variance(ensemble), level)
        moments = self.moments_of_folds(ensemble, self.conformal.folds)
        ends = self.conformal.ends(moments, level, _quantile(level))
        return Interval(*(self.bounded(end) for end in ends))

    def interval_of(self, mean: Tensor, variance: Tensor, level: float) -> Interval:
        """Mean ± z · standard deviation, or as wide as residuals of judging rows say; within the target's bounds."""
        mean = self.bounded(mean)  # an interval around a mean beyond the bounds would hold nothing within them
        if self.conformal is None:
            return super().interval_of(mean, variance, level)
        if self.conformal.scores.shape[1] != mean.shape[-1]:
            raise ValueError(
                f"Expected residuals of {mean.shape[-1]} targets, got those of {self.conformal.scores.shape[1]}; take "
                "them from predictions of the same targets"
            )
        if len(self.conformal.scores):
            half = self.conformal.half(level, _quantile(level)).to(mean) * variance.sqrt()
            ends = Interval(mean - half, mean + half)
        else:
            ends = super().interval_of(mean, variance, level)
        return Interval(self.bounded(ends.lower), self.bounded(ends.upper))

    def moments_of_folds(self, ensemble: Ensemble, folds: int) -> Moments:
        """Mean and standard deviation by the draws of every fold, one after the other and as many of each, (F, N, K).

        What distance adds is the same for all of them.
        """
        own = [self.conditional(draws.double()) for draws in ensemble.outputs.chunk(folds)]
        variance = [part.mean.var(0, correction=0) + part.variance.mean(0) + ensemble.spread for part in own]
        return Moments(torch.stack([part.mean.mean(0) for part in own]), torch.stack(variance).sqrt())

    def bounded(self, value: Tensor) -> Tensor:
        """The nearest value that a target can have."""
        return value if self.conformal is None else self.conformal.bounded(value)

    def _check_targets(self, y: Tensor, n: int, targets: int) -> Tensor:
        y = y[:, None] if y.ndim == 1 else y
        if y.shape != (n, targets):
            raise ValueError(
                f"Expected targets of shape ({n}, {targets}), got {tuple(y.shape)}: one for every location among the "
                "model's outputs"
            )
        if not y.is_floating_point():
            raise ValueError(f"Expected floating-point targets for regression, got {y.dtype}; use y.float()")
        if not y.isfinite().all():
            raise ValueError("Expected finite targets, got NaN or inf; drop those rows")
        return y


@dataclass(frozen=True)
class Gaussian(NormalLikelihood):
    """Targets with one noise level, learnt with the network; outputs are the K locations (N, K)."""

    stores = Stores()

    noise: float | Tensor = 1.0
    conformal: Conformal | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.noise, Tensor) and not 0 < self.noise < float("inf"):
            raise ValueError(f"Expected `noise` > 0, got {self.noise}")

    def _location_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, torch.as_tensor(self.noise, dtype=outputs.dtype, device=outputs.device)

    def free(self) -> dict[str, Tensor]:
        """The log of the noise level."""
        return {"log_noise": torch.as_tensor(self.noise).float().log()}

    def at(self, free: dict[str, Tensor]) -> Gaussian:
        """With another noise level (a tensor while it is being learnt)."""
        noise = free["log_noise"].exp()
        return replace(self, noise=noise if noise.requires_grad else float(noise))

    def rescaled(self, factor: float) -> Gaussian:
        """Noise level times `factor`."""
        return replace(self, noise=float(self.noise) * factor)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """1/noise for every target."""
        return torch.diag_embed(torch.ones_like(outputs)) / float(self.noise)

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Targets (N, K), or (N,) for one."""
        return self._check_targets(y, outputs.shape[-2], outputs.shape[-1])


@dataclass(frozen=True)
class NoiseHead(NormalLikelihood):
    """Gaussian targets whose noise depends on the input: outputs are K locations and K raw noises (N, 2K).

    The noise's standard deviation is softplus(raw) + floor, times `factor`. Only the locations are inflated.
    """

    stores = Stores()

    factor: float = 1.0
    floor: float = 1e-3
    conformal: Conformal | None = field(default=None, repr=False)

    def _location_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        location, raw = outputs.chunk(2, -1)
        return location, (softplus(raw) + self.floor) * self.factor

    def rescaled(self, factor: float) -> NoiseHead:
        """Noise times `factor`."""
        return replace(self, factor=self.factor * factor)

    def locations(self, outputs: Tensor) -> Tensor:
        """The first half of the outputs."""
        return outputs.chunk(2, -1)[0]

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """1/s for the locations, √2 s′/s for the raw noises: the Fisher information of N(location, s²) is diagonal."""
        location, raw = outputs.chunk(2, -1)
        noise = softplus(raw) + self.floor
        root = torch.cat([1 / (noise * self.factor).expand_as(location), 2**0.5 * torch.sigmoid(raw) / noise], -1)
        return torch.diag_embed(root)

    def stretch(self, outputs: Tensor, k: Tensor) -> Tensor:
        """Locations pushed away from their mean; noises as they are."""
        location, raw = outputs.chunk(2, -1)
        return torch.cat([super().stretch(location, k), raw], -1)

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Targets (N, K) where the network has 2K outputs."""
        if outputs.shape[-1] % 2:
            raise ValueError(
                f"Expected an even number of outputs (locations, then raw noises), got {outputs.shape[-1]}"
            )
        return self._check_targets(y, outputs.shape[-2], outputs.shape[-1] // 2)


class MeanAndNoise(nn.Module):
    """Two networks as one model for `NoiseHead`: parameters are named `mean.*` and `noise.*`."""

    def __init__(self, mean: nn.Module, noise: nn.Module) -> None:
        super().__init__()
        self.mean = mean
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        """Locations and raw noises side by side."""
        return torch.cat([self.mean(x), self.noise(x)], -1)


def _quantile(level: float) -> float:
    """z, within which a standard Gaussian is with probability `level`."""
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))


def log_normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y | mean, variance), elementwise."""
    return -0.5 * ((y - mean) ** 2 / variance + torch.log(2 * math.pi * variance))
