"""Revert: away from the data a regression returns to what the training targets say without their inputs.

Inflate keeps the network's mean at every distance; a Gaussian process would return to its prior. Read the network as a
measurement with the variance E = (k² − 1)V that distance adds, V the draws' variance and k = (σ0 + d)/σ0, and the
training targets as its prior, N(ȳ, S), where S = max(Var(y) − noise, Var(y)/100) is the variance that a function of the
input could explain. Then, with w = S/(S + E),

    mean = ȳ + w (f̄ − ȳ),   variance = noise + V + w E.

d(wE)/dE = w² >= 0, so the variance grows with distance; d = 0 is the base posterior, d → ∞ is N(ȳ, noise + V + S).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dapcal.ensembles import with_variance
from dapcal.likelihoods import Likelihood, Unconditional
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, Ensemble, Posterior

_LEAST = 0.01  # share of the targets' variance that a function could explain, however large the noise


@dataclass(frozen=True)
class Revert(Adjustment):
    """Widen the spread as Inflate does, and move the mean towards that of the training targets; for regression.

    All draws move together, by (w − 1)(f̄ − ȳ), and keep their spread V. Shrinking each of them towards ȳ instead would
    give the variance noise + w²V + wE, which falls with distance where V > S/2. On the sinusoid (two posteriors, five
    seeds) the log predictive of the two forms differs, at one φ, by 0.00 to 0.08 in the gap: in favour of this form
    where the posterior is too narrow (Laplace), of the other where it is already wide (ensemble).

    The noise in S is that of the input itself, so that no prediction depends on the others of its batch and a noise
    level that was scaled in-domain counts. Where all draws agree (V = 0) distance adds nothing and nothing reverts.

    It changes means far away. That helps where a network extrapolates badly, and costs where it extrapolates well:
    choose it by evidence, such as held-out regions.

    Args:
        targets: mean and variance of the training targets; by default those that `fitted` receives.
    """

    stores = Stores()

    targets: Unconditional | None = None

    @property
    def closed_form(self) -> bool:
        """Always: the variance is added analytically."""
        return True

    @property
    def limited(self) -> bool:
        """Always, by the training targets."""
        return True

    def fitted(self, likelihood: Likelihood, y: Tensor) -> Revert:
        """With mean and variance of training targets y (N, K), which must vary."""
        found = likelihood.unconditional(y)
        if found is None:
            raise ValueError(
                "Revert needs numbers as targets, to whose mean a prediction can return, and those of "
                f"{type(likelihood).__name__} have none; use Inflate(), which works with every likelihood"
            )
        mean, variance = torch.tensor([found.mean, found.variance], dtype=torch.float64)
        constant = torch.nonzero(_is_rounding(variance, mean)).flatten().tolist()
        if constant:
            raise ValueError(
                f"Expected training targets that vary, got the same value everywhere in target {constant[0]}: there is "
                "nothing that a function could explain; drop this target"
            )
        return self if self.targets is not None else replace(self, targets=found)

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """One pass over the draws; every distance is free after that."""
        if self.targets is None:
            raise ValueError(
                "Revert has not seen the training targets yet; use Revert().fitted(likelihood, y), as calibrate does, "
                "or Revert(targets=likelihood.unconditional(y))"
            )
        likelihood = posterior.likelihood
        base, variance = with_variance(posterior, x)
        mean, noise = likelihood.mean(base), likelihood.aleatoric(base)  # (N, K)
        center, total = (
            torch.as_tensor(value, dtype=mean.dtype, device=mean.device)
            for value in (self.targets.mean, self.targets.variance)
        )  # (K,)
        agree = _is_rounding(variance, mean)  # far away k² would make something of it
        explainable = torch.maximum(total - noise, _LEAST * total)  # S, (N, K)

        def at(distance: Tensor) -> Ensemble:
            k = 1 + distance.double() if posterior.prior is None else posterior.prior.widening(distance)
            k = k.to(variance.device)[:, None]
            added = torch.where(agree, 0, variance * (k**2 - 1))  # E
            wider = 1 / (1 / explainable + 1 / added)  # wE, also where E is 0 or infinite
            by = wider / explainable * (center - mean)  # (w − 1)(f̄ − ȳ)
            return base._replace(
                outputs=likelihood.shifted(base.outputs, by),
                conditional=likelihood.conditional(likelihood.shifted(base.outputs.double(), by)),  # not yet rounded
                spread=base.spread + wider,
            )

        return at


def _is_rounding(variance: Tensor, mean: Tensor) -> Tensor:
    """Whether a variance is what is left when equal numbers are averaged."""
    return variance <= (10 * torch.finfo(torch.float64).eps * mean) ** 2
