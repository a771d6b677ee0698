"""Calibration losses: what a good φ makes small, one value per calibration input.

A loss is called once with the `Problem` and returns a function of the factor g(φ), so that what does not depend on φ
is done once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dapcal.adjust.reweight import ClosedForm
from dapcal.adjust.transport import Transport
from dapcal.calibration.inputs import HeldOut, Misclassified, OODInputs
from dapcal.data import Labelled
from dapcal.ensembles import seen
from dapcal.posteriors.gaussian import prior_of
from dapcal.posteriors.network import NetworkPosterior
from dapcal.types import Adjusted, Adjustment, Ensemble, Posterior

if TYPE_CHECKING:
    from dapcal.distances import Space


class Problem(NamedTuple):
    """What a loss may look at."""

    posterior: Posterior
    x: Tensor  # calibration inputs x_j*, (N, ...)
    y: Tensor | None  # their targets, where there are any
    pre_distance: Tensor  # d0, (N,)
    adjusted: Adjusted  # d -> the posterior adjusted at x
    train: Labelled
    adjust: Adjustment
    spaces: tuple[Space, ...]  # what the distance is fitted from
    in_domain: Callable[[Posterior, Labelled], Posterior] | None = None  # scales a refit on its own held-out rows
    share: float = 1.0  # of its spread that the posterior keeps, and so a refit
    given: Posterior | None = None  # as it was before it was scaled and narrowed, where it was
    around_network: bool = False  # made around a plain network, with the spread that held-out rows like best


@runtime_checkable
class Loss(Protocol):
    """A calibration loss; one that you write may derive from this class, and then says only what is different here."""

    def inputs(self, given: OODInputs | None) -> OODInputs:
        """What the loss is about: the inputs that were given; by default those that the posterior gets wrong."""
        return given or Misclassified()

    def __call__(self, problem: Problem) -> Callable[[float], Tensor]:
        """A function from the factor g to one loss per input, (N,)."""
        ...


@dataclass(frozen=True)
class Target(Loss):
    """The paper's loss ‖U_φ(x_j*) − γ‖² (eq. calib_loss).

    Classification: U is the predictive mean, γ = 1/K in every class. Regression: U is the epistemic variance,
    γ = `times` the 95 % quantile of the epistemic variances at the training inputs, per target, of the posterior as it
    was given. A noise level that was lowered in the domain may be too low away from it: what it lost is added to γ.
    The spread around a plain network was fitted to held-out rows and says nothing of what is unknown elsewhere: there
    γ is the variance of the training targets, what is known without looking at the input, as 1/K is of classes.

    Args:
        gamma: another target than these.
        times: factor on the quantile in regression.
    """

    gamma: float | tuple[float, ...] | None = None
    times: float = 10.0

    def __call__(self, problem: Problem) -> Callable[[float], Tensor]:
        """Squared distance from the target."""
        likelihood = problem.posterior.likelihood
        base = problem.adjusted(torch.zeros_like(problem.pre_distance))
        if self.gamma is not None:
            gamma = torch.tensor(self.gamma, dtype=torch.float64, device=base.outputs.device)
        elif (probability := likelihood.most_uncertain(base)) is not None:
            gamma = torch.tensor(probability, dtype=torch.float64)
        else:
            gamma = self._variance(problem, base)

        def at(factor: float) -> Tensor:
            ensemble = problem.adjusted(factor * problem.pre_distance)
            return ((likelihood.aimed_at(ensemble, base) - gamma) ** 2).sum(-1)

        return at

    def _variance(self, problem: Problem, base: Ensemble) -> Tensor:
        """γ of regression, (K,)."""
        unconditional = problem.posterior.likelihood.unconditional
        if problem.around_network and (known := unconditional(problem.train.y)) is not None:
            return torch.tensor(known.variance, dtype=torch.float64, device=base.outputs.device)
        return self.times * torch.quantile(epistemic_on(problem), 0.95, dim=0) + taken_at(problem, base)


@dataclass(frozen=True)
class LogPredictive(Loss):
    """−log p(y_j* | x_j*, data): the predictive density of labelled calibration inputs."""

    def inputs(self, given: OODInputs | None) -> OODInputs:
        """All held-out inputs, where none are given."""
        return given or HeldOut()

    def __call__(self, problem: Problem) -> Callable[[float], Tensor]:
        """Negative log predictive."""
        likelihood, y = problem.posterior.likelihood, _labels(problem, "LogPredictive")
        return lambda factor: -likelihood.log_prob(problem.adjusted(factor * problem.pre_distance), y)


@dataclass(frozen=True)
class LogMarginal(Loss):
    """−log p(y_j* | x_j*) with θ from the distance-aware prior N(0, (σ0 + d)² I), by Monte Carlo.

    Args:
        draws: from the prior.
        seed: of the draws.
    """

    draws: int = 200
    seed: int = 0

    def inputs(self, given: OODInputs | None) -> OODInputs:
        """All held-out inputs, where none are given."""
        return given or HeldOut()

    def __call__(self, problem: Problem) -> Callable[[float], Tensor]:
        """The prior is a Gaussian posterior too: Transport moves it."""
        if not isinstance(problem.posterior, NetworkPosterior):
            raise ValueError("LogMarginal needs a posterior over a network's parameters with a prior scale")
        y = _labels(problem, "LogMarginal")
        prior = prior_of(problem.posterior, self.draws, self.seed)
        adjusted = Transport()(prior, problem.x)
        likelihood = prior.likelihood
        return lambda factor: -likelihood.log_prob_mixture(adjusted(factor * problem.pre_distance), y)


@dataclass(frozen=True)
class EmpiricalBayes(Loss):
    """−[log Z(c_j) − Σ_g n_g log((σ0_g + d_j)/σ0_g)]: minus the log ratio of the evidences p(y|x_j*,x)/p(y|x)."""

    def __call__(self, problem: Problem) -> Callable[[float], Tensor]:
        """Closed form of a Gaussian posterior; no forward pass at all."""
        log_z, prior = ClosedForm()(problem.posterior), problem.posterior.prior
        assert prior is not None

        def at(factor: float) -> Tensor:
            distance = factor * problem.pre_distance
            return (prior.log_widening(distance) * prior.sizes).sum(1) - log_z(distance)

        return at


def epistemic_on(problem: Problem, batch_size: int = 2048) -> Tensor:
    """Epistemic variance of the posterior as it was given at the training inputs, in batches, (N, K)."""
    posterior = problem.given or problem.posterior
    drawn = not problem.adjust.closed_form
    bases = (seen(posterior, batch, drawn) for batch in problem.train.x.split(batch_size))
    return torch.cat([posterior.likelihood.split(base, base).epistemic for base in bases])


def taken_at(problem: Problem, base: Ensemble) -> Tensor:
    """Noise variance that in-domain scaling has taken away, mean over the calibration inputs, (K,).

    Held-out rows say that it is too much in the domain; of the places away from it they say nothing.
    """
    if problem.given is None:
        return torch.zeros((), dtype=torch.float64)
    before = seen(problem.given, problem.x, not problem.adjust.closed_form)
    noise = problem.given.likelihood.split(before, before).aleatoric
    return (noise - problem.posterior.likelihood.split(base, base).aleatoric).mean(0).clamp_min(0)


def _labels(problem: Problem, loss: str) -> Tensor:
    if problem.y is None:
        raise ValueError(
            f"{loss} needs targets for the calibration inputs, and these OOD inputs have none; give "
            "ood=(inputs, targets), or use the loss Target()"
        )
    outputs = problem.adjusted(torch.zeros_like(problem.pre_distance)).outputs
    return problem.posterior.likelihood.check(outputs, problem.y.to(outputs.device))
