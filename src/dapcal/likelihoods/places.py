"""The likelihood of a class at every place of an input, as in segmentation: one distance an input, many classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dapcal.likelihoods.base import Decisions, Likelihood
from dapcal.likelihoods.classes import ClassLikelihood
from dapcal.records import Conditional, Ensemble
from dapcal.storing import Stores

LARGEST = 2048  # outputs whose curvature, outputs × outputs for every input, is written down


@dataclass(frozen=True)
class PerPlace(Likelihood):
    """A class at every place; outputs are the logits of a network (N, K, H, W), flattened to (N, K·H·W).

    A network that returns (N, K, H, W) is `nn.Sequential(network, nn.Flatten())`; targets are (N, H, W), and predictive
    means (N, K, H, W). Distance is that of the whole input and widens every place by its own spread. `log_prob` sums
    over places, so that a guard counts for the whole input: `guard=0.01 * H * W` allows 0.01 nats a place. An ensemble
    serves large outputs; a Laplace approximation writes down the curvature of up to 2,048 of them.

    Args:
        each: what a place's outputs say of its class, `Categorical()` or `Bernoulli()`.
        places: sizes of the axes after the classes', e.g. (H, W).
        ignore: label of places that do not count.
        classes_last: whether outputs were (N, H, W, K), or (N, T, K) of the words of a text; means are then, too.
    """

    stores = Stores()
    task = "per-place"

    each: ClassLikelihood
    places: tuple[int, ...]
    ignore: int | None = None
    classes_last: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.each, ClassLikelihood):
            raise TypeError(
                f"Expected Categorical() or Bernoulli() at every place, got {type(self.each).__name__}; numbers at "
                "every place are targets of Gaussian() as y.flatten(1)"
            )
        if not self.places or any(size < 1 for size in self.places):
            raise ValueError(f"Expected `places` as sizes >= 1 of the axes after the classes', got {self.places}")

    @property
    def count(self) -> int:
        """Number of places."""
        return math.prod(self.places)

    def conditional(self, outputs: Tensor) -> Conditional:
        """Probabilities (S, N, P, K), variances (S, N, P), and entropies, summed over places."""
        mean, variance, entropy = self.each.conditional(self._by_place(outputs))
        return Conditional(mean, variance, entropy.sum(-1))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """log softmax(logits)[y], summed over places that count."""
        counts, y = self._counting(y)
        return (self.each.log_likelihood(self._by_place(outputs), y) * counts).sum(-1)

    def mean(self, ensemble: Ensemble) -> Tensor:
        """Predictive probabilities, (N, K, H, W)."""
        return self.each.mean(self._folded(ensemble)).unflatten(0, (-1, *self.places)).movedim(-1, self._axis)

    def probabilities(self, ensemble: Ensemble) -> Tensor:
        """The mean."""
        return self.mean(ensemble)

    def confidence(self, mean: Tensor) -> Tensor:
        """The largest probability, averaged over places."""
        return mean.max(self._axis).values.flatten(1).mean(1)

    def decisions(self, mean: Tensor, y: Tensor) -> Decisions:
        """One for every place that counts."""
        counts, y = self._counting(y)
        rows = mean.movedim(self._axis, -1).flatten(0, -2)[counts.flatten()]
        return self.each.decisions(rows, y.flatten()[counts.flatten()])

    def variance(self, ensemble: Ensemble) -> Tensor:
        """1 − Σ p̄², (N, P)."""
        return self.each.variance(self._folded(ensemble)).unflatten(0, (-1, self.count))

    def entropy(self, ensemble: Ensemble) -> Tensor:
        """Sum of the places' entropies, (N,)."""
        return self.each.entropy(self._folded(ensemble)).unflatten(0, (-1, self.count)).sum(-1)

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log p̄[y], summed over places that count, (N,)."""
        counts, y = self._counting(y)
        density = self.each.log_prob(self._folded(ensemble), y.flatten()).unflatten(0, (-1, self.count))
        return (density * counts).sum(-1)

    def error(self, base: Ensemble, y: Tensor) -> Tensor:
        """Share of wrong places among those that count."""
        counts, y = self._counting(y)
        wrong = self.each.error(self._folded(base), y.flatten()).unflatten(0, (-1, self.count)) & counts
        return wrong.double().sum(-1) / counts.sum(-1).clamp_min(1)

    def expected_rise(self, base: Ensemble, ensemble: Ensemble) -> Tensor:
        """Summed over places, also those whose targets do not count."""
        rise = self.each.expected_rise(self._folded(base), self._folded(ensemble))
        return rise.unflatten(0, (-1, self.count)).sum(-1)

    def doubt(self, base: Ensemble) -> Tensor:
        """Entropy."""
        return self.entropy(base)

    def most_uncertain(self, ensemble: Ensemble) -> float:
        """1/K."""
        return 1 / ensemble.conditional.mean.shape[-1]

    def aimed_at(self, ensemble: Ensemble, base: Ensemble) -> Tensor:  # noqa: ARG002
        """The predictive probabilities, one after the other."""
        return self.mean(ensemble).flatten(1)

    def rescaled(self, factor: float) -> PerPlace:
        """One temperature for all places."""
        return replace(self, each=self.each.rescaled(factor))

    def locations(self, outputs: Tensor) -> Tensor:
        """Those of every place, one after the other."""
        return self.each.locations(self._by_place(outputs)).flatten(-2)

    def pooled(self, variance: Tensor) -> Tensor:
        """One number a place."""
        return self.each.pooled(variance.unflatten(-1, (self.count, -1))).squeeze(-1)

    def spread(self, variance: Tensor) -> Tensor:
        """As at one place."""
        return self.each.spread(variance)

    def closed_spread(self, variance: Tensor, outputs: int) -> Tensor:
        """As at one place, which has its share of the outputs."""
        return self.each.closed_spread(variance, outputs // self.count)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """Roots of all places, each of its own outputs alone; outputs of one class lie side by side."""
        n, size = outputs.shape
        if size > LARGEST:
            raise ValueError(
                f"A curvature of {size} outputs takes {size}² numbers for every input (at most {LARGEST} outputs are "
                "taken); train several networks and use dapcal.posteriors.ensemble.of(networks, likelihood)"
            )
        roots = self.each.curvature_root(self._by_place(outputs).flatten(0, 1)).unflatten(0, (n, self.count))
        whole = torch.diag_embed(roots.movedim(1, -1))  # (N, k, m, P, P)
        return whole.permute(0, *((3, 1) if self.classes_last else (1, 3)), 4, 2).reshape(n, size, -1)

    def columns(self, ensemble: Ensemble, base: Ensemble, level: float) -> dict[str, Tensor]:  # noqa: ARG002
        """The most likely class of every place, probabilities (N, K, H, W), and the parts of 1 − Σ p̄²."""
        mean, parts = self.mean(ensemble), self.split(ensemble, base)
        return {
            "prediction": mean.argmax(self._axis),
            "probability": mean,
            "epistemic": parts.epistemic.unflatten(1, self.places),
            "aleatoric": parts.aleatoric.unflatten(1, self.places),
        }

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """Class labels, (n, N, H, W), each place by its own predictive mean."""
        return self.each.sample(self._folded(ensemble), n, generator).unflatten(1, (-1, *self.places))

    def check_held_out(self, y: Tensor, held_out: Tensor) -> None:
        """Every held-out class is one of training."""
        kept = (part if self.ignore is None else part[part != self.ignore] for part in (y, held_out))
        self.each.check_held_out(*kept)

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Labels (N, H, W) as integers."""
        n, size = outputs.shape[-2:]
        if size % self.count:
            raise ValueError(
                f"Expected outputs of K classes at {' × '.join(map(str, self.places))} places, flattened, got {size}; "
                "check `places`"
            )
        if y.shape != (n, *self.places):
            raise ValueError(f"Expected a class for every place, {(n, *self.places)}, got {tuple(y.shape)}")
        kept = y if self.ignore is None else y.where(y != self.ignore, 0)
        self.each.check(self._by_place(outputs.reshape(-1, n, size)[0]).flatten(0, 1), kept.flatten())
        return y.long()

    def _by_place(self, outputs: Tensor) -> Tensor:
        """Outputs (..., k·P), or (..., P·k), as (..., P, k)."""
        if self.classes_last:
            return outputs.unflatten(-1, (self.count, -1))
        return outputs.unflatten(-1, (-1, self.count)).movedim(-1, -2)

    @property
    def _axis(self) -> int:
        """Of the classes in means."""
        return -1 if self.classes_last else 1

    def _folded(self, ensemble: Ensemble) -> Ensemble:
        """Every place as an input of its own."""
        mean, variance, entropy = ensemble.conditional
        apart = Conditional(mean.flatten(1, 2), variance.flatten(1, 2), entropy.repeat_interleave(self.count, 1))
        return Ensemble(
            outputs=self._by_place(ensemble.outputs).flatten(1, 2),
            conditional=apart,
            log_weights=ensemble.log_weights.repeat_interleave(self.count, 1),
            spread=ensemble.spread.expand(-1, self.count).reshape(-1, 1),
        )

    def _counting(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Which places count, (N, P), and labels (N, P) that are classes everywhere."""
        y = y.flatten(1)
        counts = torch.ones_like(y, dtype=torch.bool) if self.ignore is None else y != self.ignore
        return counts, y.where(counts, 0)
