"""What every process of a service is handed: how to load its model and where to log, by objects that pickle knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from dapcal import models
from dapcal.recipes import few_judges
from dapcal.serve import AccessLog, Served


@dataclass
class Loading:
    """Loads the model of a file, as it is when it is called; arguments as of `dapcal serve`."""

    model: Path
    factory: str | None
    device: str
    key: Path | None
    alpha: float
    level: float
    held_out: int = field(default=0, init=False)  # inputs that p-values come from, of what was loaded last

    few: str | None = field(default=None, init=False)  # where judging rows are too few for intervals of that level

    def __call__(self) -> Served:
        """The model as the service sees it."""
        torch.set_num_threads(1)  # rows come in small batches, and the other cores belong to the network's side
        loaded = models.load(self.model, self.factory, self.device, self.key, whole=True)
        self.few = few_judges(loaded.calibrated, self.level)
        self.held_out = len(loaded.calibrated.evidence.held_out)
        return Served.of(loaded, self.model.name, alpha=self.alpha, level=self.level)


@dataclass(frozen=True)
class Log:
    """Opens the access log; - is standard error."""

    path: Path

    def __call__(self) -> AccessLog:
        """Open in this process."""
        return AccessLog(None if str(self.path) == "-" else self.path)
