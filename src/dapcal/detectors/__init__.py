"""Baselines that score how far an input lies from the training data: one file each.

A detector is made by a function of a trained classifier (`fit`, or for scores of the logits their name) and is a
callable from inputs (N, ...) to scores (N,); higher = further out. The classifier is copied, never changed.
"""

from dapcal.detectors import (
    dac,
    ddu,
    due,
    duq,
    fdbd,
    gapa,
    knn,
    logits,
    mahalanobis,
    odin,
    sngp,
    spectral,
    temperature,
    vim,
)

__all__ = [
    "dac",
    "ddu",
    "due",
    "duq",
    "fdbd",
    "gapa",
    "knn",
    "logits",
    "mahalanobis",
    "odin",
    "sngp",
    "spectral",
    "temperature",
    "vim",
]
