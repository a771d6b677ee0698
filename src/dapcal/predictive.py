"""Prediction: everything that is asked of a distance-aware prediction, from weighted outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapcal.diagnostics import Diagnostics, effective_sample_size, importance_of, pareto_k, total_weight
from dapcal.evidence import Piece, in_words, leading
from dapcal.likelihoods import ClassLikelihood, Interval, Likelihood, Split, expectation
from dapcal.records import ALPHA, LEVEL, Conditional, Ensemble


@dataclass(frozen=True, eq=False)
class Prediction:
    """A predictive distribution at N inputs, and how far they are from the training data.

    Uncertainty is split so that distance adds epistemic uncertainty alone: the aleatoric part is what the base draws
    say, and never more than the total.

    Attributes:
        likelihood: p(y | outputs).
        ensemble: the posterior adjusted to the inputs' distances.
        base_ensemble: the posterior as it was.
        pre_distance: d0, (N,).
        distance: d = g(φ) d0, (N,).
        ood_score: combined evidence that an input is out of distribution, higher = further out, (N,).
        ood_p_value: conformal p-value of that score among held-out inputs, (N,).
        contracted: parameters wider than the prior, see `Diagnostics`.
        is_joint: whether the inputs were taken as one set.
        evidence: the pieces of that score by name, "doubt" and the spaces that distances are measured in: each
            standardised, with a p-value of its own.
    """

    likelihood: Likelihood
    ensemble: Ensemble
    base_ensemble: Ensemble
    pre_distance: Tensor
    distance: Tensor
    ood_score: Tensor
    ood_p_value: Tensor
    contracted: int = 0
    is_joint: bool = False
    evidence: Mapping[str, Piece] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.ensemble.outputs.shape[1]

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Prediction:
        """The prediction at some of the inputs; a single row is a prediction at one input."""
        if isinstance(rows, int):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"Expected a row between 0 and {len(self) - 1}, got {rows}")
            rows = [rows % len(self)]
        index = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        return self._map(lambda value, axis: value[(slice(None),) * axis + (index,)])

    def cpu(self) -> Prediction:
        """The same with all tensors in main memory."""
        return self._map(lambda value, _: value.cpu())

    def columns(self, *, level: float = LEVEL, alpha: float = ALPHA) -> dict[str, np.ndarray]:
        """Plain arrays by name, one row an input: what tables and services show.

        Classes: `prediction`, the most likely class; `probability`, (N, K); `epistemic` and `aleatoric`, the two parts
        of 1 − Σ p². Labels: `prediction`, 0 or 1, `probability`, and the two parts of p (1 − p), (N, L) each.
        Targets: `prediction`, `lower` and `upper` of the interval that holds the target with probability `level`,
        `epistemic` and `aleatoric` as standard deviations, (N, K) each. All: `distance`, `ood_score`,
        `ood_p_value`, `ood`, whether that is at most `alpha`, and `reason`, why it is (see `reasons`).

        Args:
            level: of the intervals.
            alpha: share of ordinary inputs that may be called out of distribution.
        """
        named = {
            **self.likelihood.columns(self.ensemble, self.base_ensemble, _check_level(level)),
            "distance": self.distance,
            "ood_score": self.ood_score,
        }
        shown = {n: self._like_outputs(value) if value.is_floating_point() else value for n, value in named.items()}
        judged = {"ood_p_value": self.ood_p_value, "ood": self.ood_p_value <= alpha}
        columns = {name: value.cpu().numpy() for name, value in {**shown, **judged}.items()}
        return columns | {"reason": np.array(self.reasons(alpha), object)}

    def reasons(self, alpha: float = ALPHA) -> list[str]:
        """Why inputs are flagged, "ambiguous" or "far from the training data (features)"; "" where they are not.

        The piece of evidence that is most unusual by itself is named (`dapcal.evidence.leading`): an explanation, not a
        test. The test is the p-value of the score.

        Args:
            alpha: inputs with a p-value up to this are flagged.
        """
        flagged = (self.ood_p_value <= alpha).tolist()
        if not self.evidence:
            return [""] * len(flagged)
        is_classification = self.likelihood.task != "regression"
        named = zip(flagged, leading(self.evidence), strict=True)
        return [in_words(piece, is_classification) if flag else "" for flag, piece in named]

    def __repr__(self) -> str:
        flagged = int((self.ood_p_value <= ALPHA).sum())
        return (
            f"Prediction({len(self)} inputs, {type(self.likelihood).__name__}, {flagged} with p-values up to {ALPHA})"
        )

    @property
    def base(self) -> Prediction:
        """The prediction before the adjustment, for comparison."""
        return replace(self, ensemble=self.base_ensemble, distance=torch.zeros_like(self.distance))

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean: probabilities of classes (N, K) or labels (N, L), or expected targets (N, K)."""
        return self._rounded(self.likelihood.mean(self.ensemble))

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities, (N, K), or those of labels, (N, L)."""
        return self._rounded(self.likelihood.probabilities(self.ensemble))

    @cached_property
    def variance(self) -> Tensor:
        """Total predictive variance: 1 − Σ p² for classes (N,), p (1 − p) of labels (N, L), of targets (N, K)."""
        return self._like_outputs(self._split.total)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The part of `variance` that more data would not remove."""
        return self._like_outputs(self._split.aleatoric)

    @cached_property
    def epistemic(self) -> Tensor:
        """The part of `variance` that comes from not knowing the parameters."""
        return self._like_outputs(self._split.epistemic)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution (differential in regression), (N,)."""
        return self._like_outputs(self.likelihood.entropy(self.ensemble))

    @cached_property
    def mutual_information(self) -> Tensor:
        """Epistemic part of the entropy: entropy − min(E[H[y | θ]] of the base draws, entropy), (N,)."""
        entropy = self.likelihood.entropy(self.ensemble)
        expected = self.likelihood.expected_entropy(self.base_ensemble)
        return self._like_outputs(entropy - torch.minimum(expected, entropy))

    def interval(self, level: float = LEVEL) -> Interval:
        """Central predictive interval that holds the target with probability `level` (regression)."""
        lower, upper = self.likelihood.interval(self.ensemble, _check_level(level))
        return Interval(self._like_outputs(lower), self._like_outputs(upper))

    def prediction_set(self, level: float = LEVEL) -> Tensor:
        """Smallest set of classes with probability at least `level`, as a mask (N, K)."""
        if not isinstance(self.likelihood, ClassLikelihood):
            raise TypeError(
                f"A prediction set holds the one class of an input, and {type(self.likelihood).__name__} has none; use "
                f"{'`interval`' if self.likelihood.task == 'regression' else '`probs`'}"
            )
        probabilities, order = self.probs.sort(-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before < _check_level(level))

    def log_prob(self, y: Tensor) -> Tensor:
        """log predictive probability of labels, or log density of targets under the Gaussian of the moments, (N,)."""
        return self._like_outputs(self.likelihood.log_prob(self.ensemble, self._check(y)))

    def log_prob_mixture(self, y: Tensor) -> Tensor:
        """log Σ_s w_s p(y | θ_s), (N,): in regression the mixture over draws, in classification as `log_prob`."""
        return self._like_outputs(self.likelihood.log_prob_mixture(self.ensemble, self._check(y)))

    def log_prob_joint(self, y: Tensor) -> Tensor:
        """log Σ_s w_s Π_n p(y_n | θ_s), a scalar: the density of all targets as one set (`Calibrated.joint`)."""
        if not self.is_joint:
            raise ValueError("A joint density needs one distance for the whole set; predict with calibrated.joint(x)")
        if self.ensemble.spread.any():
            raise ValueError(
                "A closed-form spread has no joint density over inputs; calibrate with adjust=Inflate(drawn=True)"
            )
        density = self.likelihood.log_likelihood(self.ensemble.outputs.double(), self._check(y))
        return self._like_outputs(torch.logsumexp(self.ensemble.log_weights[:, 0] + density.sum(1), 0))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n labels (n, N) or targets (n, N, K) for every input, drawn from the predictive distribution."""
        total = total_weight(self.ensemble.log_weights)
        if not torch.allclose(total, torch.ones_like(total), atol=1e-6):
            raise ValueError(
                "The weights do not sum to one, so there is no distribution to draw from; use Reweight(complete=True), "
                "Reweight(normalise=True) or another adjustment"
            )
        if generator is None:
            generator = torch.Generator()
            generator.seed()  # from the system; torch.seed() would reseed the global generator
        drawn = self.likelihood.sample(self.ensemble, n, generator)
        return self._like_outputs(drawn) if drawn.is_floating_point() else drawn

    def expect(self, statistic: Callable[[Tensor], Tensor]) -> Tensor:
        """E[f(θ)] for a statistic of the outputs, outputs (S, N, C) -> (S, N, ...) (paper, eq. pred_stats)."""
        if self.ensemble.spread.any():
            raise ValueError(
                "A closed-form spread has no draws to average a statistic over; calibrate with "
                "adjust=Inflate(drawn=True)"
            )
        return self._like_outputs(expectation(self.ensemble, statistic(self.ensemble.outputs).double()))

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """Effective sample size, total weight and Pareto k̂ per input."""
        weights = importance_of(self.ensemble)
        return Diagnostics(
            ess=self._like_outputs(effective_sample_size(weights)),
            total_weight=self._like_outputs(total_weight(weights)),
            pareto_k=self._like_outputs(pareto_k(weights)),
            contracted=self.contracted,
        )

    def _map(self, change: Callable[[Tensor, int], Tensor]) -> Prediction:
        """Every tensor changed; `change` is told which of its axes are the inputs."""
        ensembles = _mapped(self.ensemble, change), _mapped(self.base_ensemble, change)
        per_input: dict[str, Any] = {name: change(getattr(self, name), 0) for name in PER_INPUT}
        evidence = {name: Piece(*(change(part, 0) for part in piece)) for name, piece in self.evidence.items()}
        return replace(self, ensemble=ensembles[0], base_ensemble=ensembles[1], evidence=evidence, **per_input)

    @cached_property
    def _split(self) -> Split:
        return self.likelihood.split(self.ensemble, self.base_ensemble)

    def _rounded(self, exact: Tensor) -> Tensor:
        rounded = self._like_outputs(exact)
        return _with_top(exact, rounded) if isinstance(self.likelihood, ClassLikelihood) else rounded

    def _check(self, y: Tensor) -> Tensor:
        return self.likelihood.check(self.ensemble.outputs, y.to(self.ensemble.outputs.device))

    def _like_outputs(self, value: Tensor) -> Tensor:
        dtype = self.ensemble.outputs.dtype
        return value.to(torch.promote_types(dtype, torch.float32))


PER_INPUT = ("pre_distance", "distance", "ood_score", "ood_p_value")


def joined(predictions: Iterable[Prediction]) -> Prediction:
    """Independent predictions of several batches as one."""
    parts = list(predictions)
    first = parts[0]
    if any(part.is_joint for part in parts):
        raise ValueError("A joint prediction is of one set of inputs; it cannot be joined to another")

    def cat(values: Sequence[Any], axis: int) -> Any:
        return None if values[0] is None else torch.cat(list(values), axis)

    def ensemble(several: Sequence[Ensemble]) -> Ensemble:
        conditional = Conditional(*(cat(v, 1) for v in zip(*(e.conditional for e in several), strict=True)))
        return Ensemble(
            outputs=cat([e.outputs for e in several], 1),
            conditional=conditional,
            log_weights=cat([e.log_weights for e in several], 1),
            spread=cat([e.spread for e in several], 0),
            importance=cat([e.importance for e in several], 1),
        )

    per_input: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in PER_INPUT}
    return replace(
        first,
        ensemble=ensemble([part.ensemble for part in parts]),
        base_ensemble=ensemble([part.base_ensemble for part in parts]),
        evidence={
            name: Piece(*map(torch.cat, zip(*(part.evidence[name] for part in parts), strict=True)))
            for name in first.evidence
        },
        **per_input,
    )


def _with_top(exact: Tensor, rounded: Tensor) -> Tensor:
    """Rounded probabilities (N, K) whose most likely class is that of the exact ones.

    Near 1/K classes that differ may round to one number: the most likely one stays ahead by a last digit.
    """
    top = exact.argmax(-1, keepdim=True)
    highest = rounded.max(-1, keepdim=True).values
    tied = (rounded == highest).sum(-1, keepdim=True) > 1
    ahead = highest * (1 + torch.finfo(rounded.dtype).eps)
    return torch.where(tied, rounded.scatter(-1, top, ahead), rounded)


def _mapped(ensemble: Ensemble, change: Callable[[Tensor, int], Tensor]) -> Ensemble:
    return Ensemble(
        outputs=change(ensemble.outputs, 1),
        conditional=Conditional(*(change(value, 1) for value in ensemble.conditional)),
        log_weights=change(ensemble.log_weights, 1),
        spread=change(ensemble.spread, 0),
        importance=None if ensemble.importance is None else change(ensemble.importance, 1),
    )


def _check_level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"Expected `level` between 0 and 1, got {level}")
    return level
