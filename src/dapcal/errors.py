"""Errors that callers tell apart from other wrong values."""

from __future__ import annotations


class NothingToCalibrate(ValueError):
    """The data leave φ undetermined: no input lies away from the training inputs, or no φ keeps to the guard."""
