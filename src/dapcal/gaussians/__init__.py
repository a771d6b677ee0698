"""Gaussian posteriors by their moments: one covariance structure a file, all a `Gaussian`."""

from dapcal.gaussians.base import Decomposed, Directions, Gaussian
from dapcal.gaussians.diagonal import DiagonalGaussian
from dapcal.gaussians.full import FullGaussian
from dapcal.gaussians.kronecker import Block, KroneckerGaussian
from dapcal.gaussians.low_rank import LowRankGaussian

__all__ = [
    "Block",
    "Decomposed",
    "DiagonalGaussian",
    "Directions",
    "FullGaussian",
    "Gaussian",
    "KroneckerGaussian",
    "LowRankGaussian",
]
