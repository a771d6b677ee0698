"""Ways of getting draws from p(θ | data): one file each, all giving a `dapcal.types.Posterior`."""

from dapcal.posteriors import gaussian, map, predictions, samples, variational

__all__ = ["gaussian", "map", "predictions", "samples", "variational"]
