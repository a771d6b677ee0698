"""What every likelihood gives: moments of one draw, and what weighted draws predict."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.special import ndtr

from dapcal.records import Conditional, Ensemble
from dapcal.storing import Stores


class Interval(NamedTuple):
    """Lower and upper ends, (N, K) each."""

    lower: Tensor
    upper: Tensor


class Split(NamedTuple):
    """A predictive variance and its two parts, shaped as `Likelihood.variance`."""

    total: Tensor
    epistemic: Tensor
    aleatoric: Tensor


@dataclass(frozen=True)
class Unconditional:
    """Mean and variance of the training targets: what is known of a target without its input."""

    stores = Stores()

    mean: tuple[float, ...]  # K
    variance: tuple[float, ...]  # K
    own_spread: bool = False  # they vary so much around any location

    def variance_around(self, location: Tensor) -> Tensor:
        """E[(y − location)²] over the training targets, for locations (N, K); of their own spread E[(y − mean)²]."""
        mean, variance = (location.new_tensor(value) for value in (self.mean, self.variance))
        return variance.expand_as(location) if self.own_spread else variance + (location - mean) ** 2


class Decisions(NamedTuple):
    """Predictions that are right or wrong, one row each: an input has one of a class, and one of every label."""

    probs: Tensor  # (M, K), sum to one
    y: Tensor  # (M,) what was the case


Task = Literal["classification", "multi-label", "per-place", "regression"]
"""What is predicted: one class, several labels that are there or not, a class at every place, or numbers."""


class Likelihood(ABC):
    """p(y | outputs), with what a weighted ensemble of outputs predicts."""

    task: ClassVar[Task] = "regression"

    @abstractmethod
    def conditional(self, outputs: Tensor) -> Conditional:
        """Moments of p(y | θ_s, x_n) from outputs (S, N, C), in float64."""

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """log p(y_n | θ, x_n) for outputs (..., N, C), differentiable, (..., N)."""

    @abstractmethod
    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Targets in the shape and dtype that `log_likelihood` wants; an error that says what is wrong."""

    def check_held_out(self, y: Tensor, held_out: Tensor) -> None:
        """Refuse held-out targets that training targets y say nothing of; of numbers all are known."""
        return

    def unconditional(self, y: Tensor) -> Unconditional | None:
        """What training targets say of a target without its input, where that limits how far a variance can grow."""
        return None

    def room(self, base: Ensemble, limit: Unconditional) -> Tensor:
        """Spread (N, K) that may be added before the variance exceeds the limit's."""
        return (limit.variance_around(self.mean(base)) - self.variance(base)).clamp_min(0)

    def error(self, base: Ensemble, y: Tensor) -> Tensor:
        """How wrong the base posterior is at labelled inputs, (N,): |error|, averaged; of classes whether it is."""
        return (self.mean(base) - y).abs().mean(-1)

    def doubt(self, base: Ensemble) -> Tensor:
        """How unsure the base posterior is, (N,): log of the epistemic variance, averaged; of classes the entropy."""
        epistemic = self.split(base, base).epistemic
        logarithm = epistemic.clamp_min(torch.finfo(epistemic.dtype).tiny).log()
        return logarithm.mean(-1) if logarithm.ndim > 1 else logarithm

    def most_uncertain(self, ensemble: Ensemble) -> float | None:
        """The probability that the most uncertain answer gives to each class; None where there is no such answer."""
        return None

    def aimed_at(self, ensemble: Ensemble, base: Ensemble) -> Tensor:
        """U, what the paper's loss compares with its target γ, (N, K)."""
        return self.split(ensemble, base).epistemic

    def probabilities(self, ensemble: Ensemble) -> Tensor:
        """Of the classes, (N, K)."""
        raise TypeError("`probs` is for classification; regression has `mean` and `variance`")

    def confidence(self, mean: Tensor) -> Tensor:
        """How sure predictive means (N, K) are of what is most likely, (N,); of numbers the variance tells that."""
        raise TypeError(f"{type(self).__name__} has no confidence; use the variance")

    def decisions(self, mean: Tensor, y: Tensor) -> Decisions | None:
        """Predictive means (N, K) and targets as rows that are right or wrong; None for numbers."""
        return None

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

    def shifted(self, outputs: Tensor, by: Tensor) -> Tensor:
        """Draws whose expected targets are `by` (N, K) larger, in the units of the target, (S, N, C)."""
        raise TypeError(
            f"{type(self).__name__} does not say how outputs shift the expected target; write `shifted`, or use "
            "Inflate(), which leaves it where it is"
        )

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

    def expected_rise(self, base: Ensemble, ensemble: Ensemble) -> Tensor:
        """How much lower log p is than what the base posterior says, on average where that is right, (N,).

        The Kullback–Leibler divergence, of classes. Of numbers nothing is said, 0: a noise level that is too small
        expects no rise either.
        """
        return base.log_weights.new_zeros(base.log_weights.shape[1])

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """N targets drawn for every input, (n, N, ...)."""
        raise TypeError(f"{type(self).__name__} does not draw samples")

    def columns(self, ensemble: Ensemble, base: Ensemble, level: float) -> dict[str, Tensor]:
        """What a table shows of a prediction, by name, one row an input."""
        parts = self.split(ensemble, base)
        return {"prediction": self.mean(ensemble), "epistemic": parts.epistemic, "aleatoric": parts.aleatoric}

    def interval(self, ensemble: Ensemble, level: float) -> Interval:
        """Central interval of the predictive distribution."""
        raise TypeError(f"{type(self).__name__} has no intervals; classification has `prediction_set`")

    def interval_of(self, mean: Tensor, variance: Tensor, level: float) -> Interval:
        """Central interval of the distribution that predictive moments (N, K) stand for; by default a Gaussian."""
        half = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
        deviation = variance.sqrt()
        return Interval(mean - half * deviation, mean + half * deviation)

    def place_of(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Share of that distribution under the targets, (N, K)."""
        return ndtr((y - mean) / variance.sqrt())


def expectation(ensemble: Ensemble, values: Tensor) -> Tensor:
    """Σ_s w_s values_s for values (S, N, ...)."""
    weights = ensemble.log_weights.exp().to(values.dtype)
    return torch.einsum("sn,sn...->n...", weights, values)


def normalised(ensemble: Ensemble) -> Ensemble:
    """The same draws with weights that sum to one."""
    return ensemble._replace(log_weights=ensemble.log_weights.log_softmax(0))


def numbers_in_columns(likelihood: Likelihood, ensemble: Ensemble, base: Ensemble, level: float) -> dict[str, Tensor]:
    """What a table shows of numbers as targets: mean, interval, parts of the standard deviation, (N, K) each."""
    ends, parts = likelihood.interval(ensemble, level), likelihood.split(ensemble, base)
    return {
        "prediction": likelihood.mean(ensemble),
        "lower": ends.lower,
        "upper": ends.upper,
        "epistemic": parts.epistemic.sqrt(),
        "aleatoric": parts.aleatoric.sqrt(),
    }
