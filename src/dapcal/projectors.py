"""Now `dapcal.distances.projectors`."""

from dapcal.renamed import hand_on

__getattr__ = hand_on(__name__, "dapcal.distances.projectors")
