"""A model of the service that a process of its own can load soon."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Toy:
    """Is called what its file says, and predicts the number of its process."""

    file: Path

    def __call__(self) -> Any:
        from dapcal.serve import Field, Served

        record = {"prediction": float(os.getpid()), "interval": {"lower": 0.0, "upper": 1.0, "level": 0.9}}
        record |= dict.fromkeys(("epistemic", "aleatoric", "distance", "ood_p_value"), 0.5) | {"ood": False}
        name = self.file.read_text()
        if not name:
            raise ValueError("The file is empty")
        return Served(name, "regression", (Field("x", "number"),), (), lambda rows: [record for _ in rows])
