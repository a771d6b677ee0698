"""How φ is chosen: losses, calibration inputs, scales, the search under its guard; and the OOD score."""

from dapcal.calibration.gap import GapCrossValidation
from dapcal.calibration.inputs import Around, Given, Hardest, HeldOut, Misclassified
from dapcal.calibration.losses import EmpiricalBayes, LogMarginal, LogPredictive, Loss, Problem, Target
from dapcal.calibration.scales import Exp, ScaledSigmoid, Softplus

__all__ = [
    "Around", "EmpiricalBayes", "Exp", "GapCrossValidation", "Given", "Hardest", "HeldOut", "LogMarginal",
    "LogPredictive", "Loss", "Misclassified", "Problem", "ScaledSigmoid", "Softplus", "Target",
]  # fmt: skip
