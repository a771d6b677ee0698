"""Ways of getting draws from p(θ | data): one file each, all giving a `dapcal.types.Posterior`."""

from dapcal.posteriors import gaussian, laplace, map, predictions, samples, variational

__all__ = ["gaussian", "laplace", "map", "predictions", "samples", "variational"]
