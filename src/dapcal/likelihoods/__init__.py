"""Likelihoods: what a network's outputs say about targets, for one draw and for weighted draws.

A likelihood that you write subclasses `Likelihood` and gives `conditional`, `log_likelihood` and `check`; the
predictive mean, variance and density of weighted draws then follow. Override those where a closed form is better. One
for classes subclasses `ClassLikelihood` and gives `class_logits` and `check`; what does not say otherwise (`task`)
counts as regression.
"""

from dapcal.likelihoods.base import Decisions, Interval, Likelihood, Split, Task, Unconditional, expectation, normalised
from dapcal.likelihoods.classes import Bernoulli, Categorical, ClassLikelihood
from dapcal.likelihoods.conformal import Conformal, Moments, crossed, scores_of
from dapcal.likelihoods.counts import Poisson
from dapcal.likelihoods.labels import MultiLabel
from dapcal.likelihoods.normal import Gaussian, MeanAndNoise, NoiseHead, NormalLikelihood, log_normal
from dapcal.likelihoods.places import PerPlace
from dapcal.likelihoods.quantiles import FromQuantiles
from dapcal.likelihoods.varying import VaryingNoise, places

__all__ = [
    "Bernoulli", "Categorical", "ClassLikelihood", "Conformal", "Decisions", "FromQuantiles", "Gaussian", "Interval",
    "Likelihood", "MeanAndNoise", "Moments", "MultiLabel", "NoiseHead", "NormalLikelihood", "PerPlace", "Poisson",
    "Split", "Task", "Unconditional", "VaryingNoise", "crossed", "expectation", "log_normal", "normalised", "places",
    "scores_of",
]  # fmt: skip
