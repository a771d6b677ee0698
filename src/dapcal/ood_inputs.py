"""Now `dapcal.calibration.inputs`."""

from dapcal.renamed import hand_on

__getattr__ = hand_on(__name__, "dapcal.calibration.inputs")
