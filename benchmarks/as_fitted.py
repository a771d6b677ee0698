"""Regression as `dapcal fit` does it, from matrices: the target's logarithm is learnt where that is likelier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import norm

from dapcal.calibrate import Calibrated
from dapcal.likelihoods import Gaussian
from dapcal.predictive import Prediction
from dapcal.recipes import Recipe, fit, logarithm, may_be_logarithmic

LEVEL = 0.95


class Numbers(NamedTuple):
    """Predictions of standardised targets, (N,) each.

    Attributes:
        mean: of the target.
        lower: end of its 95 % interval.
        upper: the other.
        log_density: of targets (N,) that are asked about.
        crps: continuous ranked probability score of them.
        prediction: as the library gives it, of the target or its logarithm.
    """

    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    log_density: Callable[[np.ndarray], np.ndarray]
    crps: Callable[[np.ndarray], np.ndarray]
    prediction: Prediction | None = None


def gaussian(mean: np.ndarray, deviation: np.ndarray) -> Numbers:
    """A normal distribution for every row."""
    reach = norm.ppf((1 + LEVEL) / 2) * deviation

    def crps(y: np.ndarray) -> np.ndarray:
        z = (y - mean) / deviation
        return deviation * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))

    return Numbers(mean, mean - reach, mean + reach, lambda y: norm.logpdf(y, mean, deviation), crps)


def fitted(x: np.ndarray, y: np.ndarray, zero: float, recipe: Recipe) -> Callable[[np.ndarray], Numbers]:
    """Learns rows, and predicts others.

    Args:
        x: inputs, (N, P).
        y: standardised targets, (N,).
        zero: what the target 0 is among them.
        recipe: how.
    """
    inputs, amounts = torch.from_numpy(x), torch.from_numpy(y - zero)
    found = logarithm(inputs, amounts, recipe.seed) if may_be_logarithmic(amounts) else None
    if found is None or not found.counts:
        plain = _fit(inputs, y, recipe)
        return lambda x: _plain(plain(torch.from_numpy(x)))
    logs, factor = amounts.log(), found.smearing
    center, scale = float(logs.mean()), float(logs.std(correction=0))
    model = _fit(inputs, ((logs - center) / scale).numpy(), replace(recipe, logarithms=True))
    return lambda x: _from_logarithm(model(torch.from_numpy(x)), center, scale, zero, factor)


def _fit(x: torch.Tensor, y: np.ndarray, recipe: Recipe) -> Calibrated:
    return fit(x, torch.from_numpy(y).float()[:, None], Gaussian(1.0), 1, recipe).calibrated


def _parts(found: Prediction) -> list[np.ndarray]:
    ends = found.interval(LEVEL)
    return [part[:, 0].double().numpy() for part in (found.mean, found.variance.sqrt(), ends.lower, ends.upper)]


def _plain(found: Prediction) -> Numbers:
    mean, deviation, lower, upper = _parts(found)
    return gaussian(mean, deviation)._replace(lower=lower, upper=upper, prediction=found)


def _from_logarithm(found: Prediction, center: float, scale: float, zero: float, factor: float) -> Numbers:
    """A log-normal distribution from `zero` on."""
    mean, deviation, *ends = (part * scale for part in _parts(found))
    mean, ends = mean + center, [end + center for end in ends]

    def log_density(y: np.ndarray) -> np.ndarray:
        return norm.logpdf(np.log(y - zero), mean, deviation) - np.log(y - zero)

    def crps(y: np.ndarray) -> np.ndarray:
        """Baran and Lerch (2015), arXiv:1407.3252."""
        place = (np.log(y - zero) - mean) / deviation
        shared = norm.cdf(place - deviation) + norm.cdf(deviation / np.sqrt(2)) - 1
        return (y - zero) * (2 * norm.cdf(place) - 1) - 2 * np.exp(mean + deviation**2 / 2) * shared

    lower, upper = (zero + np.exp(np.minimum(end, 700)) for end in ends)
    return Numbers(zero + factor * np.exp(mean), lower, upper, log_density, crps, found)
