"""Ways of getting draws from p(θ | data): one file each, all giving a `dapcal.types.Posterior`."""

from dapcal.posteriors import (
    dropout,
    ensemble,
    gaussian,
    hmc,
    laplace,
    map,
    predictions,
    samples,
    sgmcmc,
    swag,
    trees,
    variational,
    vogn,
)

__all__ = [
    "dropout", "ensemble", "gaussian", "hmc", "laplace", "map", "predictions", "samples", "sgmcmc", "swag",
    "trees", "variational", "vogn",
]  # fmt: skip
