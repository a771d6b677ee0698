"""Against what harm is measured: the better of what there was before, the network itself and its posterior.

    network ──temperature──► NLL ┐
                                 ├─ the lower one is the reference, from which the guard's tolerance counts
    posterior ─temperature─► NLL ┘

A posterior that is worse than its network by more than half of the guard is narrowed towards the network, until it is
not, and no further than that gains a tenth of the guard: far from the data φ makes up for the spread that it loses, but
what doubts an input is what is left of it. Where no distance counts, nothing makes up for it, and nothing else needs
the tolerance: there it keeps the widest spread that the guard allows, counted with its standard error.
"""

from __future__ import annotations

import math
import re
from dataclasses import is_dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dapcal.amounts import amount
from dapcal.calibration.in_domain import scaled, scaled_where_it_helps, with_likelihood
from dapcal.data import Labelled
from dapcal.ensembles import base_ensemble, read_by
from dapcal.likelihoods import Likelihood
from dapcal.networks import checked_outputs
from dapcal.types import Ensemble, Posterior

SHARES = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.06, 0.03, 0.01)
OF_MOMENTS = (*SHARES, 1e-3, 1e-4)  # draws so narrow would differ by rounding alone
_BATCH = 512  # inputs at a time


@runtime_checkable
class AroundNetwork(Protocol):
    """A posterior that lies around one network: Laplace, SWAG, variational, dropout."""

    @property
    def alone(self) -> nn.Module | None:
        """That network; None where draws were trained each by itself, or brought."""
        ...

    def narrowed(self, share: float) -> Posterior:
        """Deviations from the network times `share`."""
        ...


class Reference(NamedTuple):
    """What was there before, scaled in the domain, and what is going to be calibrated.

    Attributes:
        name: which was better on the half that chooses, "network" or "posterior".
        posterior: with its temperature or noise level, and narrowed where it had to be.
        network: the likelihood of the network alone, scaled; None where there is no such network.
        log_prob: of the reference at the rows that choose, (N,).
        share: of its spread that the posterior keeps.
        notes: what was decided, in words.
    """

    name: str
    posterior: Posterior
    network: Likelihood | None
    log_prob: Tensor
    share: float
    notes: tuple[str, ...]


def choose_reference(
    posterior: Posterior,
    chooses: Labelled,
    drawn: bool = False,
    scaling: bool | None = None,
    guard: float | None = 0.01,
    whole: bool = False,
) -> Reference:
    """The better of network and posterior, each scaled in the domain, on the half that chooses φ.

    Args:
        posterior: as it was given.
        chooses: the half of the held-out data that chooses φ.
        drawn: see the posterior by its draws, also where it has moments.
        scaling: of temperature or noise level: True, False, or (None) where it helps rows that it was not fitted to and
            there is a guard.
        guard: nats; without it (None) the posterior is the reference, and is not narrowed.
        whole: the spread may take the whole guard, as no distance is going to widen it.
    """
    given = posterior.likelihood
    see = read_by(posterior, chooses.x, drawn)  # one pass
    if scaling:
        posterior = with_likelihood(posterior, scaled(see, given, chooses.y))
    elif scaling is None and guard is not None and is_dataclass(posterior):
        posterior = with_likelihood(posterior, scaled_where_it_helps(see, given, chooses.y))
    log_prob = posterior.likelihood.log_prob(see(posterior.likelihood), chooses.y)
    network = alone(posterior)
    if network is None or guard is None:
        return Reference("posterior", posterior, None, log_prob, 1.0, _in_domain(given, posterior))
    outputs = outputs_alone(network, chooses.x)

    def read(likelihood: Likelihood) -> Ensemble:
        return base_ensemble(likelihood, outputs[None])

    likelihood = given
    if scaling is not False:
        likelihood = scaled(read, given, chooses.y) if scaling else scaled_where_it_helps(read, given, chooses.y)
    by_network = likelihood.log_prob(read(likelihood), chooses.y)
    if not by_network.mean() > log_prob.mean():
        return Reference("posterior", posterior, likelihood, log_prob, 1.0, _in_domain(given, posterior))
    notes = []
    behind, share = float((by_network - log_prob).mean()), 1.0
    enough = whole and _with_error(by_network - log_prob) <= guard
    if behind > guard / 2 and not enough:  # also where that may be chance: the guard counts from the better of both
        around = with_likelihood(posterior, likelihood)
        assert isinstance(around, AroundNetwork)
        by_draws = drawn or posterior.moments(chooses.x[:1]) is None
        shares = SHARES if by_draws else OF_MOMENTS
        tried = {share: _log_prob(around.narrowed(share), chooses, drawn) for share in shares}
        # half of the tolerance, so that some of it is left for the distance
        allowed = [s for s in shares if (by_network - tried[s]).mean() <= guard / 2]
        told = f"the posterior is worse than its network by {behind:.3g} nats on the held-out rows that choose: "
        if not allowed:  # of a network without any noise to speak of
            notes.append(f"{told}no narrower one comes near it, so harm is measured against the posterior")
            return Reference("posterior", posterior, likelihood, log_prob, 1.0, (*_in_domain(given, posterior), *notes))
        best = max(float(tried[s].mean()) for s in allowed)
        kept = [s for s in allowed if float(tried[s].mean()) >= best - guard / 10]  # doubt costs hardly anything
        kept += [s for s in shares if whole and _with_error(by_network - tried[s]) <= guard]
        share = max(kept)
        posterior = around.narrowed(share)
        notes.append(f"{told}its spread was multiplied by {share:g}")
    return Reference("network", posterior, likelihood, by_network, share, (*_in_domain(given, posterior), *notes))


def as_narrow(posterior: Posterior, share: float) -> Posterior:
    """A refit with the share of its spread that the posterior keeps; one without a network to lie around as it is."""
    return posterior.narrowed(share) if share < 1 and isinstance(posterior, AroundNetwork) else posterior


def alone(posterior: Posterior) -> nn.Module | None:
    """The one network that the posterior lies around, if there is one."""
    return posterior.alone if isinstance(posterior, AroundNetwork) else None


def outputs_alone(network: nn.Module, x: Tensor) -> Tensor:
    """Outputs (N, C) of one network."""
    device = next(network.parameters()).device
    with torch.no_grad():
        return torch.cat([checked_outputs(network(part.to(device)), len(part)) for part in x.split(_BATCH)])


def _with_error(rises: Tensor) -> float:
    return float(rises.mean()) + float(rises.std()) / math.sqrt(len(rises))


def _log_prob(posterior: Posterior, data: Labelled, drawn: bool) -> Tensor:
    base = read_by(posterior, data.x, drawn)(posterior.likelihood)
    return posterior.likelihood.log_prob(base, data.y.to(base.outputs.device))


def _in_domain(given: Likelihood, posterior: Posterior) -> tuple[str, ...]:
    """What is in use, which is the network's where the posterior was narrowed towards it."""
    if posterior.likelihood == given:
        return ()
    return (f"calibrated in the domain: {_told(posterior.likelihood)} in place of {_told(given)}",)


def _told(likelihood: Likelihood) -> str:
    """A likelihood with numbers of three digits."""
    return re.sub(r"\d+\.\d{4,}(e[-+]?\d+)?", lambda number: amount(float(number[0]), 3), str(likelihood))
