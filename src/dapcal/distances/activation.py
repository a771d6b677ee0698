"""How little an input activates the classes of a network: a piece of evidence that is no distance, but is used as one.

Of inputs unlike all that it has learnt, a network's logits are often small all together, which probabilities do not
show: they stay the same where a number is added to all logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.distances.projectors import LayerFeatures, MemberFeatures
from dapcal.networks import Layout, as_tensor, parameter_name, run
from dapcal.posteriors.network import NetworkPosterior
from dapcal.storing import Stores
from dapcal.types import Posterior


@dataclass(frozen=True, eq=False)
class Activation:
    """−log Σ_k exp(logit_k), the mean over members; logits are linear in the features of the last layer.

    Liu, Wang, Owens, Li (2020), arXiv:2010.03759, the energy score. A set counts by its least activated point.

    Attributes:
        weights: of every member's last layer, (M, P, K).
        biases: of the same, (M, K).
    """

    stores = Stores()

    weights: Tensor
    biases: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        """Of features (N, M · P), (N,)."""
        members, width, _ = self.weights.shape
        each = points.to(self.weights).reshape(len(points), members, width).transpose(0, 1)  # (M, N, P)
        return -torch.baddbmm(self.biases[:, None], each, self.weights).logsumexp(-1).mean(0)

    def joint(self, points: Tensor) -> Tensor:
        """Scalar."""
        return self(points).max()


def activation_of(posterior: Posterior, projector: LayerFeatures | MemberFeatures, x: Tensor) -> Activation | None:
    """That of a posterior's network, or of all members; None where its outputs are not linear in these features.

    Args:
        posterior: whose outputs are logits.
        projector: to features as they enter the layer, neither averaged nor divided by their length.
        x: a few inputs that it is tried with.
    """
    network = posterior.network
    if network is None or projector.unit or projector.pool:
        return None
    layer = network.get_submodule(projector.layer)
    own = _last_layers(posterior, projector, layer) if isinstance(layer, nn.Linear) else None
    if own is None:
        return None
    points = projector(x)
    members, width, classes = own.weights.shape
    if points.shape[1] != members * width:
        return None
    outputs = posterior.outputs(x) if isinstance(projector, MemberFeatures) else as_tensor(run(network, x))[None]
    each = points.to(own.weights).reshape(len(points), members, width).transpose(0, 1)
    logits = torch.baddbmm(own.biases[:, None], each, own.weights)  # (M, n, K)
    if outputs.shape != (members, len(x), classes) or not logits.isfinite().all():
        return None
    near = 1e-3 * float(logits.abs().max())
    return own if torch.allclose(outputs.detach().to(logits), logits, rtol=1e-3, atol=near) else None


def _last_layers(
    posterior: Posterior, projector: LayerFeatures | MemberFeatures, layer: nn.Linear
) -> Activation | None:
    """Weights and biases as they are multiplied with the projector's features, which members have in other units."""
    if isinstance(projector, LayerFeatures):
        weight = layer.weight.detach()[None]  # (1, K, P)
        bias: Tensor | None = None if layer.bias is None else layer.bias.detach()[None]
    else:
        assert isinstance(posterior, NetworkPosterior)
        layout: Layout = posterior.layout
        found = layout.unflatten(posterior.draws)
        names = [parameter_name(projector.layer, kind) for kind in ("weight", "bias")]
        if names[0] not in found or (layer.bias is not None and names[1] not in found):
            return None  # tied to another layer, or made of other parameters
        weight = found[names[0]] * projector.scale.to(posterior.draws)[:, None, None]  # (M, K, P)
        bias = found.get(names[1])
    biases = weight.new_zeros(weight.shape[:2]) if bias is None else bias.clone()
    return Activation(weight.transpose(1, 2).contiguous(), biases)
