"""dapcal: distance-aware priors make a trained neural network know how far it is from its data."""

from importlib import import_module as _import_module
from typing import Any as _Any

from dapcal import adapters, adjust, calibration, distances, likelihoods, posteriors
from dapcal.artifact import load
from dapcal.calibrate import Calibrated, calibrate
from dapcal.predictive import Prediction
from dapcal.types import DapcalWarning

__version__ = "0.2.0"
__all__ = [
    "Calibrated",
    "DapcalWarning",
    "Prediction",
    "adapters",
    "adjust",
    "calibrate",
    "calibration",
    "distances",
    "likelihoods",
    "load",
    "posteriors",
]


def __getattr__(name: str) -> _Any:
    """Modules under their names of 0.1.0, which go with the next version."""
    if name in ("gap", "losses", "neighbors", "ood_inputs", "projectors", "scales", "spaces"):
        return _import_module(f"dapcal.{name}")
    raise AttributeError(f"module 'dapcal' has no attribute {name!r}")
