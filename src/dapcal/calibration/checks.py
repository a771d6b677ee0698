"""What `calibrate` was given, with defaults filled in; what cannot work is refused."""

from __future__ import annotations

from dapcal.adjust import Inflate
from dapcal.calibration.losses import Loss, Target
from dapcal.calibration.scales import Exp
from dapcal.data import Labelled, check_inputs
from dapcal.diagnostics import importance_of
from dapcal.ensembles import outputs_with_spread
from dapcal.likelihoods import Likelihood
from dapcal.posteriors.plain import check_targets
from dapcal.types import Adjustment, Ensemble, Posterior, Scale

FEW = 50  # held-out inputs under which a note says so


def options(adjust: Adjustment | None, loss: Loss | None, scale: Scale | None) -> tuple[Adjustment, Loss, Scale]:
    """Defaults filled in; what cannot work is refused."""
    for name, option in (("adjust", adjust), ("loss", loss), ("scale", scale)):
        if isinstance(option, type):
            raise TypeError(
                f"Expected `{name}` as an object, got the class {option.__name__}; write {option.__name__}()"
            )
        if option is not None and not callable(option):
            raise TypeError(f"Expected `{name}` as an object of dapcal's or a callable, got {option!r}")
    for name, option, kind in (("adjust", adjust, Adjustment), ("loss", loss, Loss)):
        if option is not None and not isinstance(option, kind):
            raise TypeError(
                f"Expected `{name}` to say all that a {kind.__name__} does, but {type(option).__name__} does not; "
                f"derive it from {kind.__module__}.{kind.__name__}"
            )
    return adjust or Inflate(), loss or Target(), scale or Exp()


def check_data(
    posterior: Posterior, adjust: Adjustment, train: Labelled, held_out: Labelled
) -> tuple[Labelled, Labelled]:
    """Inputs of one shape, targets as the likelihood wants them, held-out ones of which training says something."""
    if not hasattr(posterior, "outputs"):
        raise TypeError(
            f"Expected a posterior, got {type(posterior).__name__}; fit one to your network with "
            "dapcal.posteriors.variational.fit, or bring draws with dapcal.posteriors.samples"
        )
    if not hasattr(posterior, "moments"):
        raise TypeError(
            f"Expected a posterior with `moments(x)`, and {type(posterior).__name__} has none; let it return None "
            "where there is no closed form"
        )
    check_inputs(held_out.x, "held_out", like=train.x)
    if len(held_out.x) < 4:
        raise ValueError(f"Expected at least 4 held-out inputs, got {len(held_out.x)}; hold out more")
    moments = posterior.moments(train.x[:1]) if adjust.closed_form else None
    one = outputs_with_spread(posterior, train.x[:1])[0] if moments is None else moments.mean  # (1, C)
    train, held_out = (check_targets(posterior.likelihood, one, data) for data in (train, held_out))
    posterior.likelihood.check_held_out(train.y, held_out.y)
    return train, held_out


def check_spread(likelihood: Likelihood, base: Ensemble) -> Ensemble:
    """What the posterior says of held-out inputs, in which its draws must differ."""
    draws = len(importance_of(base))  # completed weights have one more, the uniform answer
    if not base.spread.any() and not likelihood.location_variance(base.outputs[:draws]).any():
        raise ValueError(
            "All draws give the same outputs at all held-out inputs: there is no spread to inflate, move or weight. "
            "Check that the posterior's draws differ"
        )
    return base


def told_of_rows(held_out: int, judging: int) -> str:
    """What the number of held-out inputs allows, of which `judging` give p-values."""
    smallest = f"{1 / (judging + 1):.3g}"
    if held_out >= FEW:
        return f"smallest possible p-value: {smallest}"
    return (
        f"only {held_out} held-out inputs: half of them choose φ, and no p-value is below 1/({judging} + 1) = "
        f"{smallest}; hold out a hundred or more"
    )
