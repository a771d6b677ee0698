"""Networks and posteriors of the CIFAR-10 experiment under one seed, each trained once for whoever needs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from dapcal.detectors import spectral
from dapcal.experiments.cifar.pictures import Photographs
from dapcal.experiments.cifar.task import PhotoTask
from dapcal.experiments.cifar.training import Clock, train
from dapcal.experiments.images.bench import Bench, Parts, Readout
from dapcal.experiments.images.memory import Remembered, remembered
from dapcal.files import complete_or_absent
from dapcal.networks import feature_layer, layer_input
from dapcal.posteriors import ensemble, swag, variational
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.progress import Epoch

SCALES_FASTER = 100.0  # times the rate of the means, at which VI learns log-scales


class PhotoBench(Bench):
    """Images, networks and posteriors of one seed.

    Weights of networks stay in the work folder: an ensemble is calibrated with all of its members in memory. A network
    whose weights are not there is trained (again). VI and SWAG are fitted anew by whoever needs them first.

    Args:
        task: what and how.
        data: its images, the same for all seeds.
        seed: of the network; of the ensemble, the first.
        work: folder of weights and checkpoints.
        device: where all of it lives.
        clock: when to stop training.
        progress: told of a stage, and of its epochs.
    """

    task: PhotoTask

    def __init__(
        self,
        task: PhotoTask,
        data: Photographs,
        seed: int,
        work: Path,
        device: str,
        clock: Clock | None = None,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self.data, self.clock, self.progress = data, clock, progress
        self.seconds: dict[str, float] = {}  # of what was trained here, by name
        super().__init__(task, seed, work, device)

    @cached_property
    def outside(self) -> dict[str, Tensor]:
        """Images that networks should not know."""
        return self.data.outside

    def member(self, number: int) -> Remembered:
        """The network of a seed, so many after this one's."""
        seed = self.seed + number
        return self._point(f"network-{seed}", partial(self.network, seed), seed)

    @cached_property
    def spectral(self) -> Remembered:
        """A network trained with spectrally normalised layers, which are plain ones afterwards."""

        def bounded() -> nn.Module:
            return spectral.normalised(self.network(self.seed), self.task.bound, example=self.train[0][:1])

        return self._point(f"spectral-{self.seed}", bounded, self.seed)

    @cached_property
    def ensemble(self) -> Remembered:
        """The networks of this seed and of those after it."""
        members = [self.member(number).network for number in range(self.task.members)]
        return self._remembered(ensemble.of(members, self.likelihood))

    @cached_property
    def variational(self) -> Remembered:
        """Mean-field posterior around the network, its KL tempered."""

        def fit() -> NetworkPosterior:
            return variational.fit(
                self.map.network, self.likelihood, self.train, prior_scale=self.task.sigma0,
                kl_weight=self.task.kl_weight, initial_scale=self.task.initial_scale, draws=self.task.draws,
                seed=self.seed, epochs=self.task.variational_epochs, batch_size=self.task.batch_size,
                learning_rate=self.task.variational_rate, optimizer=slow_means, progress=self._told("VI"),
            )  # fmt: skip

        return self._remembered(self._timed("variational", fit))

    @cached_property
    def swag(self) -> Remembered:
        """From the network on; the prior is what its weight decay stands for."""

        def fit() -> NetworkPosterior:
            return swag.fit(
                self.map.network, self.likelihood, self.train, prior_scale=self.decayed_scale, draws=self.task.draws,
                seed=self.seed, per_epoch=self.task.swag_per_epoch, epochs=self.task.swag_epochs,
                batch_size=self.task.batch_size, learning_rate=self.task.swag_rate, progress=self._told("SWAG"),
            )  # fmt: skip

        return self._remembered(self._timed("swag", fit))

    @property
    def decayed_scale(self) -> float:
        """σ0 with ‖θ‖²/(2 σ0² N) = ½ · weight decay · ‖θ‖²."""
        return (self.task.weight_decay * len(self.train[0])) ** -0.5

    @cached_property
    def readout(self) -> Readout:
        """Its last layer, and the features that enter it: one pass over the network serves all detectors of them."""
        network = self.map.network
        layer, _ = feature_layer(network, self.train[0][:1])

        def features(x: Tensor) -> Tensor:
            return self.memory.recall("features", x, lambda: layer_input(network, layer, x))

        head = nn.Sequential(network.get_submodule(layer))
        return Readout(
            head, (features(self.train[0]), self.train[1]), (features(self.held_out[0]), self.held_out[1]), features
        )

    def _parts(self) -> tuple[Parts, Parts, Parts]:
        return self.data.train, self.data.held_out, self.data.test

    def _point(self, name: str, make: Callable[[], nn.Module], seed: int) -> Remembered:
        """A trained network: its weights from the work folder, or trained now."""
        path, checkpoint = (self.work / f"{name}.{kind}" for kind in ("safetensors", "checkpoint"))
        self.work.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            own = _channels_last(make())
            self._timed(name, lambda: self._train(own, name, seed, checkpoint))
            state = {key: value.contiguous() for key, value in spectral.plain(own).state_dict().items()}
            with complete_or_absent(path) as part:
                save_file(state, part)
            checkpoint.unlink(missing_ok=True)
        network = _channels_last(self.network(seed))
        network.load_state_dict(load_file(path, device=str(self.device)))
        point = map_posterior.point(network.eval(), self.likelihood, prior_scale=self.task.sigma0)
        return self._remembered(point)

    def _train(self, network: nn.Module, name: str, seed: int, checkpoint: Path) -> None:
        task = self.task
        train(
            network, self.train, epochs=task.epochs, batch_size=task.batch_size, learning_rate=task.learning_rate,
            weight_decay=task.weight_decay, seed=seed, checkpoint=checkpoint, compiled=task.compiled, clock=self.clock,
            progress=partial(self.progress, name),
        )  # fmt: skip

    def _remembered(self, posterior: NetworkPosterior) -> Remembered:
        return remembered(posterior, self.memory)

    def _told(self, stage: str) -> Callable[[Epoch], None]:
        def told(epoch: Epoch) -> None:
            self.progress(stage, epoch.number, epoch.total)
            if self.clock is not None and epoch.number < epoch.total:
                self.clock.check()

        return told

    def _timed(self, name: str, do: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = do()
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = round(time.perf_counter() - started, 3)
        return found


def _channels_last(network: nn.Module) -> nn.Module:
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def slow_means(parameters: list[Tensor], learning_rate: float) -> Optimizer:
    """Adam that moves the means of a trained network little, while log-scales find their size."""
    means, scales, *others = parameters
    groups = [
        {"params": [means], "lr": learning_rate},
        {"params": [scales, *others], "lr": SCALES_FASTER * learning_rate},
    ]
    return Adam(groups)
