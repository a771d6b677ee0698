"""dapcal: distance-aware priors make a trained neural network know how far it is from its data."""

from dapcal import (
    adapters,
    adjust,
    distances,
    gap,
    likelihoods,
    losses,
    ood_inputs,
    posteriors,
    projectors,
    scales,
)
from dapcal.artifact import load
from dapcal.calibrate import Calibrated, calibrate
from dapcal.predictive import Prediction
from dapcal.types import DapcalWarning

__version__ = "0.1.0"
__all__ = [
    "Calibrated",
    "DapcalWarning",
    "Prediction",
    "adapters",
    "adjust",
    "calibrate",
    "distances",
    "gap",
    "likelihoods",
    "load",
    "losses",
    "ood_inputs",
    "posteriors",
    "projectors",
    "scales",
]
