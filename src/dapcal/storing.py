"""How a class says what an artefact stores of it.

A class that may be stored has `stores = Stores()`; its fields are stored, but for those that it names. That is all: an
artefact finds the class by its name in the module where it lives (`dapcal.artifact.ROOMS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stores:
    """What is stored of an object: its fields.

    Attributes:
        given: fields that may hold code of the user's own (a network, a function). Code is not stored: whoever loads
            gives it again, by the argument of `dapcal.load` that stands beside the field here.
        network: a field that holds the network of the artefact's posterior, which is stored once, as the posterior.
        again: a field that may hold an object that is stored before, as a rule the artefact's posterior; it is stored
            once.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    network: str | None = None
    again: str | None = None
