"""What every posterior says inside a gap, alone, with the paper's weights and with our default."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapcal import metrics
from dapcal.adjust import Reweight
from dapcal.calibrate import calibrate
from dapcal.calibration.inputs import Given
from dapcal.distances import Space
from dapcal.distances.projectors import Features
from dapcal.ensembles import seen
from dapcal.experiments.gap.batched import layout_for, mlp
from dapcal.experiments.gap.training import (
    Networks,
    Plan,
    Setting,
    Split,
    choose,
    score_ensemble,
    score_map,
    score_variational,
)
from dapcal.likelihoods import Gaussian
from dapcal.likelihoods.normal import log_normal
from dapcal.posteriors import ensemble, gaussian, laplace
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.types import DapcalWarning, Ensemble

HARDEST = 0.3  # share of the held-out inputs that the paper calibrates on
Row = dict[str, Any]


def evaluate(plan: Plan, split: Split, networks: Networks, seed: int) -> dict[str, Row]:
    """All rows of one split: "VI", "VI + paper", "VI + ours", …, and what the paper's own grid would have chosen.

    "VI, untuned" is a variational posterior of one learning rate, whatever held-out data say of it. Its noise is
    larger, and with it the paper's estimator does what it is known for: see `_papers` on vanishing weights.
    """
    made = _Made(plan, split, networks, seed)
    scores = {
        "MAP": score_map(plan, networks, split.held_out),
        "VI": score_variational(plan, networks, split.held_out, "variational", seed),
        "VI from scratch": score_variational(plan, networks, split.held_out, "scratch", seed),
        "ensemble": score_ensemble(plan, networks, split.held_out),
    }
    best = {name: choose(plan, score) for name, score in scores.items()}
    point = made.point(best["MAP"])
    posteriors = {
        "VI": made.mean_field("variational", best["VI"]),
        "VI from scratch": made.mean_field("scratch", best["VI from scratch"]),
        "ensemble": made.members(best["ensemble"]),
        "Laplace": laplace.fit(point.network, point.likelihood, split.train, draws=plan.draws, seed=seed),
    }
    rows = {"MAP": _alone(split, point)}
    for name, posterior in posteriors.items():
        rows[name] = _alone(split, posterior)
        if posterior.gaussian is not None:
            rows[f"{name} + paper"] = _papers(split, posterior, point, seed)
        rows[f"{name} + ours"] = _ours(split, posterior, seed)
    settings = {name: best[name.partition(" + ")[0].replace("Laplace", "MAP")] for name in rows}

    their = {name: choose(plan, scores[name], plan.paper_rates) for name in ("MAP", "VI from scratch")}
    their_point = made.point(their["MAP"])
    theirs = made.mean_field("scratch", their["VI from scratch"])
    rows["MAP, paper's grid"] = _alone(split, their_point)
    rows["VI from scratch, paper's grid"] = _alone(split, theirs)
    rows["VI from scratch, paper's grid + paper"] = _papers(split, theirs, their_point, seed)
    settings |= {name: their[name.partition(",")[0]] for name in rows if "grid" in name}

    untuned = Setting(plan.rates.index(plan.untuned_rate), len(plan.epochs) - 1)
    posterior = made.mean_field("scratch", untuned)
    rows["VI, untuned"] = _alone(split, posterior)
    rows["VI, untuned + paper"] = _papers(split, posterior, made.point(untuned), seed)
    rows["VI, untuned + ours"] = _ours(split, posterior, seed)
    settings |= {name: untuned for name in rows if "untuned" in name}
    for name, row in rows.items():
        rate, epochs = settings[name]
        row |= {"learning_rate": plan.rates[rate], "epochs": plan.epochs[epochs]}
    rows["no network"] = _alone(split, made.constant())
    return rows


@dataclass(frozen=True, eq=False)
class _Made:
    """Posteriors made of the trained networks of one split."""

    plan: Plan
    split: Split
    networks: Networks
    seed: int

    def point(self, at: Setting, member: int = 0) -> NetworkPosterior:
        mean, log_noise = (self.networks[f"map.{name}"][at.rate, member, at.epochs] for name in ("mean", "log_noise"))
        model = mlp(self.split.train.x.shape[1], self.plan.hidden)
        torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        return map_posterior.point(model, Gaussian(float(log_noise.exp())))

    def constant(self) -> NetworkPosterior:
        """Training mean and variance at every input: targets are standardised."""
        model = mlp(self.split.train.x.shape[1], self.plan.hidden)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        return map_posterior.point(model, Gaussian(1.0))

    def members(self, at: Setting) -> NetworkPosterior:
        points = [self.point(at, member) for member in range(self.plan.members)]
        return ensemble.of([p.network for p in points], ensemble.pooled([p.likelihood for p in points]))

    def mean_field(self, method: str, at: Setting) -> NetworkPosterior:
        mean, log_scale, log_noise = (
            self.networks[f"{method}.{name}"][at.rate, at.epochs] for name in ("mean", "log_scale", "log_noise")
        )
        model = mlp(self.split.train.x.shape[1], self.plan.hidden)
        named = layout_for(self.split.train.x.shape[1], self.plan.hidden).unflatten
        likelihood = Gaussian(float(log_noise.exp()))
        return gaussian.diagonal(
            model, likelihood, named(log_scale.exp()), mean=named(mean), draws=self.plan.draws, seed=self.seed
        )


def _alone(split: Split, posterior: NetworkPosterior) -> Row:
    """The posterior as it is; linearised ones by their closed-form moments."""
    return _judged(split, posterior, *(seen(posterior, part.x) for part in (split.test, split.held_out)))


def _ours(split: Split, posterior: NetworkPosterior, seed: int) -> Row:
    """All defaults. Where calibration is refused, the posterior stays as it is and the row says why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        try:
            calibrated = calibrate(posterior, train=split.train, held_out=split.held_out, seed=seed)
        except ValueError as error:
            return _alone(split, posterior) | {"refused": str(error)}
    inside, outside = calibrated(split.held_out.x), calibrated(split.test.x)
    return _judged(split, posterior, outside.ensemble, inside.ensemble) | {
        "phi": calibrated.phi,
        "spaces": [space.name for space in calibrated.distance.spaces],
        "pre_distance_q50_q95": _quantiles(outside.pre_distance, 0.5, 0.95),
        "warnings": sorted({str(w.message) for w in caught}),
    }


def _papers(split: Split, posterior: NetworkPosterior, point: NetworkPosterior, seed: int) -> Row:
    """Importance weights, calibrated on the hardest inputs of the whole held-out set, without guard or radius.

    Distances are measured in the last hidden layer of the MAP network. With inputs given and neither guard nor radius,
    the halves of the held-out set that `calibrate` forms have no influence on φ. Where all weights vanish, the
    unnormalised moments are those of N(training mean, noise²), whatever the input; the row has that log-likelihood too.
    """
    x, y = split.held_out
    likelihood = posterior.likelihood
    error = (likelihood.mean(seen(posterior, x, drawn=True)) - y).abs()[:, 0]
    hardest = error.argsort(descending=True)[: round(HARDEST * len(x))]
    space = Space(Features().fit_projector(split.train.x, point), radius=None, name="MAP features")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)  # the weights collapse; the row has their W and ESS
        calibrated = calibrate(
            posterior, train=split.train, held_out=split.held_out, ood=Given(x[hardest], y[hardest]), distance=space,
            adjust=Reweight(), guard=None, seed=seed,
        )  # fmt: skip
        outside, inside = calibrated(split.test.x), calibrated(x)
    normalised = Reweight(normalise=True)(posterior, split.test.x)(outside.distance)
    gap = split.test.y.double()
    proper = likelihood.log_prob(normalised, gap)
    nothing = log_normal(gap, torch.zeros_like(gap), likelihood.aleatoric(outside.base_ensemble))
    return _judged(split, posterior, outside.ensemble, inside.ensemble) | {
        "phi": calibrated.phi,
        "log_likelihood_normalised": float(proper.mean()) - math.log(split.scale),
        "log_likelihood_without_weight": float(nothing.mean()) - math.log(split.scale),
        "log10_total_weight_median": float(outside.ensemble.log_weights.logsumexp(0).median()) / math.log(10),
        "ess_median": float(outside.diagnostics.ess.median()),
    }


def _judged(split: Split, posterior: NetworkPosterior, test: Ensemble, held_out: Ensemble) -> Row:
    """Numbers in the units of the target; the log-likelihood is of the moments' Gaussian, and of the mixture."""
    likelihood, scale, y = posterior.likelihood, split.scale, split.test.y.double()
    mean, variance = likelihood.mean(test), likelihood.variance(test)
    lower, upper = likelihood.interval(test, 0.95)
    return {
        "log_likelihood": float(likelihood.log_prob(test, y).mean()) - math.log(scale),
        "log_likelihood_mixture": float(likelihood.log_prob_mixture(test, y).mean()) - math.log(scale),
        "rmse": metrics.rmse(mean, y) * scale,
        "crps": metrics.crps_gaussian(mean, variance, y) * scale,
        "coverage": metrics.coverage(lower, upper, y),
        "width": metrics.mean_width(lower, upper) * scale,
        "held_out_log_likelihood": float(likelihood.log_prob(held_out, split.held_out.y.double()).mean())
        - math.log(scale),
    }


def _quantiles(values: Tensor, *levels: float) -> list[float]:
    return torch.quantile(values.double(), torch.tensor(levels, dtype=torch.float64)).tolist()
