"""crepes: its normalised conformal regressor gives the intervals that ours do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crepes import ConformalRegressor

from dapcal.likelihoods import Conformal, Gaussian, scores_of


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("n", [40, 98, 250])  # (n + 1) · level is no whole number, which theirs rounds up
def test_intervals_are_those_of_crepes(n, level):
    generator = torch.Generator().manual_seed(n)
    mean, y = torch.randn(2, n, 1, generator=generator, dtype=torch.float64)
    variance = torch.rand(n, 1, generator=generator, dtype=torch.float64) + 0.1
    likelihood = Gaussian(1.0, Conformal(scores_of(mean, variance, y), lower=-1.0))
    new = torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None]
    sigma = torch.linspace(0.5, 2, 7, dtype=torch.float64)[:, None]
    ends = likelihood.interval_of(new, sigma**2, level)
    theirs = ConformalRegressor().fit((y - mean)[:, 0].numpy(), sigmas=variance.sqrt()[:, 0].numpy())
    possible = new.clamp_min(-1.0)  # ours are around the nearest value that a target can have
    expected = theirs.predict_int(possible[:, 0].numpy(), sigmas=sigma[:, 0].numpy(), confidence=level, y_min=-1.0)
    np.testing.assert_allclose(torch.cat(ends, 1).numpy().clip(-1.0), expected, rtol=1e-9)
