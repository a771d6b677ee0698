"""Errors that callers tell apart from other wrong values."""

from __future__ import annotations


class NothingToCalibrate(ValueError):
    """The data leave φ undetermined: no input lies away from the training inputs, or no φ keeps to the guard."""


class CannotRun(ValueError):
    """A network does not run on the inputs that it was given."""


class NotOutputs(TypeError):
    """What a network returned is not a tensor of outputs, and does not hold one."""
