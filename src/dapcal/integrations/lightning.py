"""A Lightning callback that calibrates when `Trainer.fit` ends.

In use:

    from dapcal.integrations.lightning import Calibrate

    trainer = lightning.Trainer(callbacks=[Calibrate("digits.dap", Categorical())])
    trainer.fit(module, train_loader, validation_loader)  # writes digits.dap and digits.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dapcal.adapters.modules import from_lightning
from dapcal.data import Data
from dapcal.integrations.ending import Ending
from dapcal.integrations.libraries import base
from dapcal.integrations.loaders import Pair, in_order, only
from dapcal.likelihoods import Likelihood
from dapcal.models.network import NetworkModel

_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class Calibrate(base("Callback", "lightning", "lightning.pytorch", "pytorch_lightning")):  # type: ignore[misc]
    """Calibrates the module as it is when `fit` ends, and writes the artefact and the report.

    The data sets of the trainer's loaders are read once more, in order; what a data set augments at random is seen
    augmented, so give `train` without it. With several devices the process of rank zero calibrates, on all rows, and
    the others wait. `fast_dev_run` writes nothing. An error at the end is a warning, as a training is worth more.

    Load the artefact with `dapcal.load(path, from_lightning(Module()))` (`dapcal.adapters.modules`).

    Args:
        path: of the artefact, e.g. "digits.dap".
        likelihood: p(y | outputs); by default as in `dapcal.calibrate`.
        held_out: in-distribution data that training did not see; by default a part of the validation data.
        share: that part. The rest, which the calibration has not seen, is left for measuring what it gives.
        train: what the network was trained on; by default the rows of the training loader's data set.
        network: what is calibrated of the module, e.g. `lambda module: module.net`; by default its forward.
        pair: from a batch to (inputs, targets), where batches are something else.
        report: where the HTML page goes; True: beside the artefact, False: nowhere.
        classes: their names, in the order of the outputs; by default 0, 1, ….
        seed: of the part, of draws, and of the split of the held-out data.
        options: further arguments of `dapcal.calibrate`, e.g. {"ood": images}.

    Attributes:
        model: the calibrated `NetworkModel` (`model.calibrated` predicts), once there is one.
    """

    def __init__(
        self,
        path: str | Path,
        likelihood: Likelihood | None = None,
        *,
        held_out: Data | None = None,
        share: float = 0.5,
        train: Data | None = None,
        network: Callable[[Any], nn.Module] = from_lightning,
        pair: Pair | None = None,
        report: bool | str | Path = True,
        classes: Sequence[str] = (),
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.ending = Ending(Path(path), likelihood, held_out, share, train, report, classes, seed, options or {})
        self.network, self.pair = network, pair
        self.model: NetworkModel | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what cannot work before hours of training."""
        self.ending.check_places()
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED:
            raise ValueError(
                f"Expected the whole network in one process, but {strategy} shards it; take the callback out, and use "
                "dapcal.calibrate on the network of a checkpoint"
            )
        self.network(pl_module)  # a module without a forward is refused now
        if self.ending.held_out is None and not trainer.enable_validation:
            raise ValueError("Expected held-out data, and this trainer does not validate; give `held_out`")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Calibrate, in one process of all."""
        if trainer.fast_dev_run:
            return
        if trainer.is_global_zero:
            self.model = self.ending.or_warn(lambda: self._calibrated(trainer, pl_module))
        trainer.strategy.barrier("dapcal")  # the others would end, and take the group of processes with them

    def _calibrated(self, trainer: Any, module: Any) -> NetworkModel:
        known, validation = (
            None if loader is None else in_order(loader, self.pair)
            for loader in (
                None if self.ending.train is not None else only(trainer.train_dataloader, "training", "train"),
                None if self.ending.held_out is not None else only(trainer.val_dataloaders, "validation", "held_out"),
            )
        )
        return self.ending(self.network(module), known, validation)
