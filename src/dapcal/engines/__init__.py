"""Where work runs: in this process, or on the nodes of a Ray cluster; what is done and what comes out are the same."""

from dapcal.engines.engine import Engine, named
from dapcal.engines.local import Local

__all__ = ["Engine", "Local", "named"]
