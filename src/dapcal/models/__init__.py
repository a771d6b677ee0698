"""What a command hands around: a table's model or a network's, behind one protocol `Model`, with one loader."""

from dapcal.models.loading import load
from dapcal.models.model import Model

__all__ = ["Model", "load"]
