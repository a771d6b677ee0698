"""Likelihoods: what a network's outputs say about targets, for one draw and for weighted draws.

A likelihood of your own subclasses `Likelihood` and gives `conditional`, `log_likelihood` and `check`; the
predictive mean, variance and density of weighted draws then follow. Override those where a closed form is better. One
for classes subclasses `ClassLikelihood` and gives `class_logits` and `check`; what is no `ClassLikelihood` counts as
regression.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from dapcal.types import Conditional, Ensemble


class Interval(NamedTuple):
    """Lower and upper ends, (N, K) each."""

    lower: Tensor
    upper: Tensor


class Split(NamedTuple):
    """A predictive variance and its two parts, shaped as `Likelihood.variance`."""

    total: Tensor
    epistemic: Tensor
    aleatoric: Tensor


class Likelihood(ABC):
    """p(y | outputs), with what a weighted ensemble of outputs predicts."""

    @abstractmethod
    def conditional(self, outputs: Tensor) -> Conditional:
        """Moments of p(y | θ_s, x_n) from outputs (S, N, C), in float64."""

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """log p(y_n | θ, x_n) for outputs (..., N, C), differentiable, (..., N)."""

    @abstractmethod
    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Targets in the shape and dtype that `log_likelihood` wants; an error that says what is wrong."""

    def free(self) -> dict[str, Tensor]:
        """Unconstrained values that are learnt together with the network."""
        return {}

    def at(self, free: dict[str, Tensor]) -> Self:
        """The same likelihood with other learnt values."""
        return self

    def rescaled(self, factor: float) -> Self:
        """In-domain calibration: temperature or noise level multiplied by `factor`."""
        raise TypeError(f"{type(self).__name__} has no in-domain calibration; use temperature=False")

    def location_variance(self, outputs: Tensor) -> Tensor:
        """V, the draws' variance of the location outputs (what Inflate multiplies), (N, K)."""
        return self.spread(self.pooled(self.locations(outputs.double()).var(0, correction=0)))

    def locations(self, outputs: Tensor) -> Tensor:
        """The linear function of the outputs whose variance counts, (..., C) to (..., L)."""
        return outputs

    def pooled(self, variance: Tensor) -> Tensor:
        """Variances of the locations (..., L) as the numbers that `spread` takes (..., K)."""
        return variance

    def spread(self, variance: Tensor) -> Tensor:
        """A pooled variance in the units of `Ensemble.spread`."""
        return variance

    def closed_spread(self, variance: Tensor, outputs: int) -> Tensor:
        """A pooled variance of `outputs` outputs, known in closed form, as `Ensemble.spread`."""
        return self.spread(variance)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """R (N, C, M) with R Rᵀ the Fisher information of p(y | outputs), for outputs (N, C)."""
        raise TypeError(
            f"{type(self).__name__} gives no curvature; write `curvature_root`, or use "
            "curvature=dapcal.posteriors.laplace.empirical_fisher"
        )

    def stretch(self, outputs: Tensor, k: Tensor) -> Tensor:
        """Draws pushed away from their mean by k (N,), location outputs only, (S, N, C)."""
        mean = outputs.mean(0)
        return torch.where((k == 1)[:, None], outputs, mean + k.to(outputs.dtype)[:, None] * (outputs - mean))

    def mean(self, ensemble: Ensemble) -> Tensor:
        """Predictive mean E[y], (N, K)."""
        return expectation(ensemble, ensemble.conditional.mean)

    def variance(self, ensemble: Ensemble) -> Tensor:
        """Total predictive variance: expected noise plus variance of the mean."""
        mean = ensemble.conditional.mean
        location = expectation(ensemble, mean**2) - expectation(ensemble, mean) ** 2
        # unnormalised weights above 1 can make the difference of moments negative
        return self.aleatoric(ensemble) + location.clamp_min(0) + ensemble.spread

    def aleatoric(self, ensemble: Ensemble) -> Tensor:
        """Expected conditional variance E[Var[y | θ]], over normalised weights, shaped as `variance`."""
        return expectation(normalised(ensemble), ensemble.conditional.variance)

    def split(self, ensemble: Ensemble, base: Ensemble) -> Split:
        """Distance adds epistemic variance alone: aleatoric is what the base draws say, at most the total."""
        total = self.variance(ensemble).clamp_min(0)  # unnormalised weights above 1 can make 1 − Σ p² negative
        aleatoric = torch.minimum(self.aleatoric(base), total)
        return Split(total, total - aleatoric, aleatoric)

    def entropy(self, ensemble: Ensemble) -> Tensor:
        """Entropy of the predictive distribution, (N,)."""
        raise TypeError(f"{type(self).__name__} gives no predictive entropy; use the variance")

    def expected_entropy(self, ensemble: Ensemble) -> Tensor:
        """E[H[y | θ]] over normalised weights, (N,)."""
        return expectation(normalised(ensemble), ensemble.conditional.entropy)

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log density of the predictive distribution at y, (N,)."""
        return self.log_prob_mixture(ensemble, y)

    def log_prob_mixture(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log Σ_s w_s p(y | θ_s), (N,)."""
        if ensemble.spread.any():
            raise TypeError(f"{type(self).__name__} has no density with an analytic spread; use Inflate(drawn=True)")
        return torch.logsumexp(ensemble.log_weights + self.log_likelihood(ensemble.outputs.double(), y), 0)

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """N targets drawn for every input, (n, N, ...)."""
        raise TypeError(f"{type(self).__name__} does not draw samples")

    def interval(self, ensemble: Ensemble, level: float) -> Interval:
        """Central interval of the predictive distribution."""
        raise TypeError(f"{type(self).__name__} has no intervals; classification has `prediction_set`")


def expectation(ensemble: Ensemble, values: Tensor) -> Tensor:
    """Σ_s w_s values_s for values (S, N, ...)."""
    weights = ensemble.log_weights.exp().to(values.dtype)
    return torch.einsum("sn,sn...->n...", weights, values)


def normalised(ensemble: Ensemble) -> Ensemble:
    """The same draws with weights that sum to one."""
    return ensemble._replace(log_weights=ensemble.log_weights.log_softmax(0))


class ClassLikelihood(Likelihood):
    """What Categorical and Bernoulli share: class logits, and tempering by an analytic spread."""

    temperature: float

    @abstractmethod
    def class_logits(self, outputs: Tensor) -> Tensor:
        """Logits (..., K) of the classes, tempered, from a network's outputs (..., C)."""

    def conditional(self, outputs: Tensor) -> Conditional:
        """Class probabilities, 1 − Σ p² and entropy of every draw."""
        log_p = self.class_logits(outputs.double()).log_softmax(-1)
        p = log_p.exp()
        # softmax may underflow to −inf · 0
        return Conditional(p, 1 - (p**2).sum(-1), -(p * log_p.clamp_min(-1e30)).sum(-1))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """log softmax(logits)[y]."""
        log_p = self.class_logits(outputs).log_softmax(-1)
        return log_p.gather(-1, y.expand(log_p.shape[:-1])[..., None]).squeeze(-1)

    def rescaled(self, factor: float) -> Self:
        """Logits divided by a further temperature."""
        return replace(self, temperature=self.temperature * factor)  # type: ignore[type-var]

    def spread(self, variance: Tensor) -> Tensor:
        """Variance of tempered logits."""
        return variance / self.temperature**2

    def closed_spread(self, variance: Tensor, outputs: int) -> Tensor:
        """4/log₂ K times the variance of centred logits: here it is all the spread, and no φ scales it.

        Of two classes this is the variance of their one logit, as MacKay's approximation has it; of more it is what
        comes closest to Monte Carlo (mean error of a probability 0.02 from 3 to 100 classes).
        """
        return self.spread(variance) * 4 / math.log2(max(outputs, 2))

    def log_mean(self, ensemble: Ensemble) -> Tensor:
        """log of the predictive probabilities, (N, K): log p̄ / t, renormalised to the mass of p̄.

        t = √(1 + π/8 · spread) is MacKay's probit approximation with one variance per input, so that the order of
        the classes is kept.
        """
        top = ensemble.log_weights.max(0).values
        mass = (ensemble.log_weights - top).exp()
        tiny = torch.finfo(mass.dtype).tiny
        log_p = top[:, None] + torch.einsum("sn,snk->nk", mass, ensemble.conditional.mean).clamp_min(tiny).log()
        tempered = log_p / (1 + math.pi / 8 * ensemble.spread.mean(-1, keepdim=True)).sqrt()
        return tempered - torch.logsumexp(tempered, -1, True) + torch.logsumexp(log_p, -1, True)

    def mean(self, ensemble: Ensemble) -> Tensor:
        """Predictive probabilities, (N, K)."""
        return self.log_mean(ensemble).exp()

    def variance(self, ensemble: Ensemble) -> Tensor:
        """1 − Σ p̄², (N,)."""
        return 1 - (self.mean(ensemble) ** 2).sum(-1)

    def entropy(self, ensemble: Ensemble) -> Tensor:
        """−Σ p̄ log p̄, (N,)."""
        log_p = self.log_mean(ensemble)
        return -(log_p.exp() * log_p).sum(-1)

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log p̄[y], (N,)."""
        return self.log_mean(ensemble).gather(-1, y[:, None]).squeeze(-1)

    def log_prob_mixture(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """For classes the mixture and the predictive mean are one thing."""
        return self.log_prob(ensemble, y)

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """Class labels, (n, N)."""
        cdf = self.mean(ensemble).cumsum(-1)
        uniform = torch.rand(n, len(cdf), 1, generator=generator, dtype=cdf.dtype).to(cdf.device)
        return (uniform * cdf[:, -1:] > cdf).sum(-1)


@dataclass(frozen=True)
class Categorical(ClassLikelihood):
    """K classes, outputs are K logits (N, K)."""

    temperature: float = 1.0

    def class_logits(self, outputs: Tensor) -> Tensor:
        """Outputs over temperature."""
        return outputs / self.temperature

    def locations(self, outputs: Tensor) -> Tensor:
        """Centred logits: what all classes share says nothing."""
        return outputs - outputs.mean(-1, keepdim=True)

    def pooled(self, variance: Tensor) -> Tensor:
        """One number per input, the average over classes: with one per class the order of classes would not stay."""
        return variance.mean(-1, keepdim=True)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """diag(√p) − p √pᵀ over temperature: its square is diag(p) − p pᵀ."""
        p = self.class_logits(outputs).softmax(-1)
        return (torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]) / self.temperature

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Labels as integers in [0, K)."""
        if outputs.shape[-1] < 2:
            raise ValueError(
                "Expected at least 2 outputs for Categorical, got 1; for one logit use dapcal.likelihoods.Bernoulli"
            )
        return _check_labels(y, outputs.shape[-2], outputs.shape[-1])


@dataclass(frozen=True)
class Bernoulli(ClassLikelihood):
    """Two classes, outputs are one logit of class 1 (N, 1); probabilities have two columns."""

    temperature: float = 1.0

    def class_logits(self, outputs: Tensor) -> Tensor:
        """0 and z over temperature."""
        return torch.cat([torch.zeros_like(outputs), outputs / self.temperature], -1)

    def locations(self, outputs: Tensor) -> Tensor:
        """Centred logits are (−z/2, z/2), so that one number says it, as Categorical has it."""
        return outputs / 2

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """√(p (1 − p)) over temperature."""
        z = outputs / self.temperature
        return (torch.sigmoid(z) * torch.sigmoid(-z)).sqrt()[..., None] / self.temperature

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Labels 0 and 1."""
        if outputs.shape[-1] != 1:
            raise ValueError(
                f"Expected 1 output (a logit) for Bernoulli, got {outputs.shape[-1]}; for several use Categorical"
            )
        return _check_labels(y, outputs.shape[-2], 2)


class NormalLikelihood(Likelihood):
    """What both Gaussian likelihoods share: moments, densities, samples and intervals of a location and a noise."""

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

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """Density of the Gaussian that has the predictive mean and variance, (N,)."""
        return log_normal(y, self.mean(ensemble), self.variance(ensemble)).sum(-1)

    def log_prob_mixture(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log Σ_s w_s N(y | location_s, noise_s² + spread), (N,)."""
        mean, variance, _ = ensemble.conditional
        density = log_normal(y, mean, variance + ensemble.spread).sum(-1)
        return torch.logsumexp(ensemble.log_weights + density, 0)

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """Targets from the Gaussian of the moments, (n, N, K)."""
        mean, variance = self.mean(ensemble), self.variance(ensemble)
        noise = torch.randn(n, *mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return mean + variance.sqrt() * noise

    def interval(self, ensemble: Ensemble, level: float) -> Interval:
        """Mean ± z · standard deviation of the Gaussian of the moments."""
        half = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
        mean, deviation = self.mean(ensemble), self.variance(ensemble).sqrt()
        return Interval(mean - half * deviation, mean + half * deviation)

    def _check_targets(self, y: Tensor, n: int, targets: int) -> Tensor:
        y = y[:, None] if y.ndim == 1 else y
        if y.shape != (n, targets):
            raise ValueError(f"Expected targets of shape ({n}, {targets}), got {tuple(y.shape)}")
        if not y.is_floating_point():
            raise ValueError(f"Expected floating-point targets for regression, got {y.dtype}; use y.float()")
        if not y.isfinite().all():
            raise ValueError("Expected finite targets, got NaN or inf; drop those rows")
        return y


@dataclass(frozen=True)
class Gaussian(NormalLikelihood):
    """Targets with one noise level, learnt with the network; outputs are the K locations (N, K)."""

    noise: float | Tensor = 1.0

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
        return Gaussian(noise if noise.requires_grad else float(noise))

    def rescaled(self, factor: float) -> Gaussian:
        """Noise level times `factor`."""
        return Gaussian(float(self.noise) * factor)

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

    factor: float = 1.0
    floor: float = 1e-3

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


def log_normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y | mean, variance), elementwise."""
    return -0.5 * ((y - mean) ** 2 / variance + torch.log(2 * math.pi * variance))


def _check_labels(y: Tensor, n: int, classes: int) -> Tensor:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape != (n,):
        raise ValueError(f"Expected class labels of shape ({n},), got {tuple(y.shape)}")
    if y.is_floating_point() and not y.isfinite().all():
        raise ValueError("Expected whole numbers as class labels, got NaN or inf; drop those rows")
    if y.is_floating_point() and (y != y.round()).any():
        raise ValueError("Expected whole numbers as class labels, got fractions; for regression use Gaussian")
    y = y.long()
    if n and not (int(y.min()) >= 0 and int(y.max()) < classes):
        raise ValueError(
            f"Expected class labels between 0 and {classes - 1} (the model's outputs), got {int(y.min())} to "
            f"{int(y.max())}"
        )
    return y
