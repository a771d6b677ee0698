"""Ways to adjust a posterior to a distance: one file each, all a `dapcal.types.Adjustment`."""

from dapcal.adjust.inflate import Inflate, OfTrainingTargets
from dapcal.adjust.matched import MomentMatched
from dapcal.adjust.revert import Revert
from dapcal.adjust.reweight import ClosedForm, PriorMonteCarlo, Reweight, SelfNormalised
from dapcal.adjust.transport import Transport
from dapcal.adjust.unchanged import Unchanged

__all__ = [
    "ClosedForm",
    "Inflate",
    "MomentMatched",
    "OfTrainingTargets",
    "PriorMonteCarlo",
    "Revert",
    "Reweight",
    "SelfNormalised",
    "Transport",
    "Unchanged",
]
