"""What detectors see of a trained classifier: its logits and the features that enter its last linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dapcal.data import Data, check_inputs, gather
from dapcal.likelihoods import Categorical
from dapcal.networks import checked_outputs, entering, feature_layer, frozen_copy, unfused

BATCH = 1024  # inputs per forward pass


class Activations(NamedTuple):
    """Of N inputs, in one forward pass."""

    features: Tensor  # (N, P)
    logits: Tensor  # (N, K)


class Head(NamedTuple):
    """The last linear layer: logits = W z + b, in float64."""

    weight: Tensor  # (K, P)
    bias: Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained network in evaluation mode, its features and logits in batches and without gradients.

    Attributes:
        network: a frozen copy.
        layer: the layer whose input are the features.
        pool: whether that input, (N, C, ...), is averaged over places.
        batch_size: inputs per forward pass.
    """

    network: nn.Module
    layer: str
    pool: bool
    batch_size: int = BATCH

    def __call__(self, x: Tensor) -> Activations:
        """Of all inputs, on the network's device."""
        with torch.no_grad():
            parts = [self.run(batch) for batch in check_inputs(x, "x").split(self.batch_size)]
        return Activations(torch.cat([p.features for p in parts]), torch.cat([p.logits for p in parts]))

    def run(self, batch: Tensor) -> Activations:
        """Of one batch: one forward pass, the features caught on their way."""
        seen: list[Tensor] = []
        layers = {self.layer: self.network.get_submodule(self.layer)}
        with entering(layers, lambda _, features: seen.append(features)):
            logits = logits_of(self.network, batch)
        if len(seen) != 1:
            raise ValueError(
                f"Expected layer `{self.layer}` to run once in a forward pass, it ran {len(seen)} times; end the "
                "network in a linear layer of its own"
            )
        features = seen[0].flatten(2).mean(2) if self.pool else seen[0].flatten(1)
        if len(features) != len(batch):
            raise ValueError(
                f"Expected one feature vector an input to enter layer `{self.layer}`, got {len(features)} for "
                f"{len(batch)} inputs; put the batch first"
            )
        return Activations(features, logits)

    def map(self, function: Callable[[Activations], Tensor], x: Tensor) -> Tensor:
        """A function of the activations, batch by batch; its values on the device and in the dtype of x."""
        return batchwise(lambda batch: function(self.run(batch)), x, self.batch_size)

    def head(self, activations: Activations) -> Head:
        """The last linear layer, checked to give the logits from the features."""
        layer = self.network.get_submodule(self.layer)
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach().double()
            bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().double()
            features, logits = (part[: self.batch_size] for part in activations)
            if features.shape[1] == weight.shape[1] and logits.shape[1] == len(weight):
                expected = features.double() @ weight.T + bias
                # half precision and TF32 products keep three digits
                if torch.allclose(logits.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
                    return Head(weight, bias)
        raise ValueError(
            f"Expected a network whose logits are those of its last linear layer, but `{self.layer}` does not give "
            "them from its input; end the network in nn.Linear, or use a detector of features alone (knn, ddu)"
        )


def classifier_of(network: nn.Module, x: Tensor, batch_size: int = BATCH) -> Classifier:
    """A frozen copy of a network, its features where its last linear layer begins (see `networks.feature_layer`)."""
    copy = frozen(network)
    layer, pool = feature_layer(copy, x[:1])
    return Classifier(copy, layer, pool, batch_size)


class Training(NamedTuple):
    """A classifier and what it makes of its training data."""

    classifier: Classifier
    activations: Activations
    targets: Tensor  # (N,), as they were given

    def labels(self) -> Tensor:
        """Class labels (N,), checked, on the network's device."""
        return checked_labels(self.activations.logits, self.targets)


def training_of(network: nn.Module, train: Data, batch_size: int = BATCH) -> Training:
    """A frozen copy of the network, and the activations of all training inputs."""
    x, y = gather(train, "train")
    classifier = classifier_of(network, x, batch_size)
    return Training(classifier, classifier(x), y)


def frozen(network: nn.Module) -> nn.Module:
    """A copy in evaluation mode, outside of inference mode so that gradients may pass it."""
    with torch.inference_mode(False):
        return frozen_copy(network)


def logits_of(network: nn.Module, batch: Tensor) -> Tensor:
    """Finite logits (N, K) of one batch, on the network's device."""
    device = next((p.device for p in network.parameters()), batch.device)
    with unfused():
        logits = checked_outputs(network(batch.to(device)), len(batch))
    if logits.shape[1] < 2:
        raise ValueError("Expected a classifier with logits of two classes or more, got one; give both classes a logit")
    return logits


def batches_of_logits(network: nn.Module, x: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Logits batch by batch, without gradients."""
    for batch in check_inputs(x, "x").split(batch_size):
        with torch.no_grad():
            yield logits_of(network, batch)


def batchwise(function: Callable[[Tensor], Tensor], x: Tensor, batch_size: int) -> Tensor:
    """A function of every batch of x, without gradients; its values on the device and in the dtype of x."""
    with torch.no_grad():
        values = torch.cat([function(batch) for batch in check_inputs(x, "x").split(batch_size)])
    dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.get_default_dtype()
    return values.to(x.device, dtype)


def checked_labels(logits: Tensor, y: Tensor) -> Tensor:
    """Class labels (N,) on the device of the logits (N, K)."""
    return Categorical().check(logits[None], y.to(logits.device))
