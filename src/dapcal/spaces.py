"""Now `dapcal.distances.choosing`."""

from dapcal.renamed import hand_on

__getattr__ = hand_on(__name__, "dapcal.distances.choosing")
