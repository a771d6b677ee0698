"""Likelihoods of classes: categorical and Bernoulli."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dapcal.likelihoods.base import Decisions, Likelihood
from dapcal.records import Conditional, Ensemble
from dapcal.storing import Stores

FROM_ZERO = "; number them from 0: y - 1"
SOFT_LABELS = (
    "soft labels {}, probabilities of every class; a likelihood is of one class an input, y.argmax(1), or one drawn "
    "from them, torch.multinomial(y, 1)[:, 0]"
)


class ClassLikelihood(Likelihood):
    """What Categorical and Bernoulli share: class logits, and tempering by an analytic spread."""

    task = "classification"
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
        return tempered(log_p, ensemble.spread.mean(-1, keepdim=True))

    def mean(self, ensemble: Ensemble) -> Tensor:
        """Predictive probabilities, (N, K)."""
        return self.log_mean(ensemble).exp()

    def probabilities(self, ensemble: Ensemble) -> Tensor:
        """The mean."""
        return self.mean(ensemble)

    def confidence(self, mean: Tensor) -> Tensor:
        """The largest probability."""
        return mean.max(-1).values

    def decisions(self, mean: Tensor, y: Tensor) -> Decisions:
        """One an input; the paper's probabilities do not sum to one."""
        return Decisions(mean / mean.sum(-1, keepdim=True), y)

    def check_held_out(self, y: Tensor, held_out: Tensor) -> None:
        """Every held-out class is one of training."""
        unknown = sorted(set(held_out.unique().tolist()) - set(y.unique().tolist()))
        if unknown:
            raise ValueError(
                f"Classes {unknown} appear in `held_out` but never in `train`; train on them, or drop those rows "
                "(unknown classes belong into `ood`)"
            )

    def error(self, base: Ensemble, y: Tensor) -> Tensor:
        """Whether the most likely class is another than y."""
        return self.mean(base).argmax(-1) != y

    def doubt(self, base: Ensemble) -> Tensor:
        """Entropy."""
        return self.entropy(base)

    def most_uncertain(self, ensemble: Ensemble) -> float:
        """1/K."""
        return 1 / ensemble.conditional.mean.shape[-1]

    def aimed_at(self, ensemble: Ensemble, base: Ensemble) -> Tensor:  # noqa: ARG002
        """The predictive probabilities."""
        return self.mean(ensemble)

    def variance(self, ensemble: Ensemble) -> Tensor:
        """1 − Σ p̄², (N,)."""
        return 1 - (self.mean(ensemble) ** 2).sum(-1)

    def entropy(self, ensemble: Ensemble) -> Tensor:
        """−Σ p̄ log p̄, (N,); at least 0, also where unnormalised weights make probabilities above 1."""
        log_p = self.log_mean(ensemble)
        return -(log_p.exp() * log_p).sum(-1).clamp_max(0)

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log p̄[y], (N,)."""
        return self.log_mean(ensemble).gather(-1, y[:, None]).squeeze(-1)

    def log_prob_mixture(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """For classes the mixture and the predictive mean are one thing."""
        return self.log_prob(ensemble, y)

    def columns(self, ensemble: Ensemble, base: Ensemble, level: float) -> dict[str, Tensor]:  # noqa: ARG002
        """The most likely class, probabilities (N, K), and the parts of 1 − Σ p̄²."""
        probabilities, parts = self.mean(ensemble), self.split(ensemble, base)
        return {
            "prediction": probabilities.argmax(-1),
            "probability": probabilities,
            "epistemic": parts.epistemic,
            "aleatoric": parts.aleatoric,
        }

    def expected_rise(self, base: Ensemble, ensemble: Ensemble) -> Tensor:
        """Σ p̄ log(p̄/q̄)."""
        log_p = self.log_mean(base)
        return (log_p.exp() * (log_p - self.log_mean(ensemble))).sum(-1)

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """Class labels, (n, N)."""
        cdf = self.mean(ensemble).cumsum(-1)
        uniform = torch.rand(n, len(cdf), 1, generator=generator, dtype=cdf.dtype).to(cdf.device)
        return (uniform * cdf[:, -1:] > cdf).sum(-1)


@dataclass(frozen=True)
class Categorical(ClassLikelihood):
    """K classes, outputs are K logits (N, K)."""

    stores = Stores()

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

    stores = Stores()

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


def tempered(log_p: Tensor, spread: Tensor) -> Tensor:
    """log p / t along the last axis, renormalised to the mass of p, t = √(1 + π/8 · spread)."""
    softer = log_p / (1 + math.pi / 8 * spread).sqrt()
    return softer - torch.logsumexp(softer, -1, True) + torch.logsumexp(log_p, -1, True)


def _check_labels(y: Tensor, n: int, classes: int) -> Tensor:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape != (n,):
        raise ValueError(f"Expected class labels of shape ({n},), got {_rather(y, n, classes)}")
    y = whole(y, "class labels")
    if n and not (int(y.min()) >= 0 and int(y.max()) < classes):
        rather = "; drop rows that are to be ignored (x[y >= 0], y[y >= 0])" if int(y.min()) < 0 else ""
        rather = FROM_ZERO if int(y.min()) == 1 and int(y.max()) == classes else rather
        raise ValueError(
            f"Expected class labels between 0 and {classes - 1} (the model's outputs), got {int(y.min())} to "
            f"{int(y.max())}{rather}"
        )
    return y


def whole(y: Tensor, what: str) -> Tensor:
    """Labels as integers; `what` is what errors call them."""
    if y.is_floating_point() and not y.isfinite().all():
        raise ValueError(f"Expected whole numbers as {what}, got NaN or inf; drop those rows")
    if y.is_complex() or (y.is_floating_point() and (y != y.round()).any()):
        raise ValueError(f"Expected whole numbers as {what}, got fractions; for regression use Gaussian")
    return y.long()


def are_soft_labels(y: Tensor, classes: int) -> bool:
    """Whether targets are rows (N, K) of probabilities, which sum to one; one-hot rows are, too."""
    if y.ndim != 2 or y.shape[1] != classes or y.is_complex() or not bool((y >= 0).all()):
        return False
    return bool(torch.isclose(y.double().sum(1), torch.ones((), dtype=torch.float64, device=y.device)).all())


def _rather(y: Tensor, n: int, classes: int) -> str:
    """What targets of another shape seem to be, and what to do with them."""
    shape = tuple(y.shape)
    if len(y) == n and are_soft_labels(y, classes):
        is_whole = bool(((y == 0) | (y == 1)).all())
        return f"one-hot rows {shape}; use y.argmax(1)" if is_whole else SOFT_LABELS.format(shape)
    if y.ndim == 2 and len(y) == n and y.shape[1] == classes and bool(((y == 0) | (y == 1)).all()):
        return f"zeros and ones {shape}; for several labels an input use MultiLabel()"
    if y.ndim > 2 and len(y) == n:
        return f"{shape}; for a class at every place use PerPlace(Categorical(), places={tuple(y.shape[1:])})"
    return f"{shape}; give one class for every input"
